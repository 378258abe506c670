"""What the tests of several strategies run on."""

import dataclasses
import functools

import pytest
import torch
from quadratics import fit_quadratics

from fl_lightning import ClientModule, StackedExecutor


@pytest.fixture
def quadratics(tmp_path):
    """Runs on the quadratics of the sheets."""
    return functools.partial(fit_quadratics, default_root_dir=str(tmp_path))


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Runs on the graphs, with dropout and Adam, unless told otherwise; with the net of a kind of strategy if named."""

    def run(
        strategy,
        executor=StackedExecutor,
        data=None,
        *,
        kind=ClientModule,
        dropout=0.5,
        optimizer=None,
        **settings,
    ):
        trainer = make_trainer(executor=executor(), **{"seed": 1, **settings})
        trainer.fit(make_model(kind, dropout=dropout, optimizer=optimizer), data or federation, strategy)
        return trainer

    return run


@pytest.fixture
def relabeled(graphs, given_clients):
    """The graphs as they are, and with other labels outside the training nodes."""
    data = []
    for flip in (False, True):
        labels = [torch.where(g.train_mask_N | (not flip), g.y_N, (g.y_N + 1) % 3) for g in graphs]
        clients = [dataclasses.replace(g, y_N=y_N) for g, y_N in zip(graphs, labels, strict=True)]
        data.append(given_clients(clients))
    return data
