"""What the tests of several strategies run on."""

import functools

import pytest
from quadratics import fit_quadratics

from fl_lightning import StackedExecutor


@pytest.fixture
def quadratics(tmp_path):
    """Runs on the quadratics of the sheets."""
    return functools.partial(fit_quadratics, default_root_dir=str(tmp_path))


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Runs on the graphs, with dropout; and Adam, unless there is another optimiser."""

    def run(strategy, executor=StackedExecutor, optimizer=None, **settings):
        trainer = make_trainer(executor=executor(), seed=1, **settings)
        trainer.fit(make_model(dropout=0.5, optimizer=optimizer), federation, strategy)
        return trainer

    return run
