"""How the strategies' files and settings hang together."""

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor

from fl_lightning import strategies
from fl_lightning.strategies import FedAvg, FedPub, Strategy
from fl_lightning.strategies.mixing.base import Mixing, example_weights
from fl_lightning.strategies.mixing.similarity_mixing import SimilarityMixing

STRATEGIES = sorted(
    {
        kind
        for kind in vars(strategies).values()
        if inspect.isclass(kind) and issubclass(kind, Strategy) and not inspect.isabstract(kind)
    },
    key=lambda kind: kind.__name__,
)
every_strategy = pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)


@every_strategy
def test_an_algorithm_leans_on_another_only_if_it_derives_from_it(kind: type[Strategy]) -> None:
    algorithms = {other.__module__ for other in STRATEGIES} - {kind.__module__}
    derived_from = {base.__module__ for base in kind.__mro__}
    tree = ast.parse(Path(inspect.getfile(kind)).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert imported & algorithms <= derived_from


def test_shared_pieces_lean_on_no_algorithm_and_families_not_on_each_other() -> None:
    algorithms = {kind.__module__ for kind in STRATEGIES}
    root = Path(inspect.getfile(strategies)).parent
    families = {path.name for path in root.iterdir() if (path / "base.py").exists()}
    assert families == {"mixing", "hypernetwork", "decentralized"}
    for path in set(root.rglob("*.py")) - set(root.rglob("__init__.py")):
        index = path.relative_to(root).with_suffix("").parts
        nodes = ast.walk(ast.parse(path.read_text()))
        imported = {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        assert ".".join(("fl_lightning", "strategies", *index)) in algorithms or not imported & algorithms, path
        used = {family for family in families for name in imported if f".strategies.{family}" in name}
        assert used <= {index[0]}, path


@every_strategy
def test_every_setting_is_a_field_with_a_help_text(kind: type[Strategy]) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "strategy")
    settings = {field.name for field in dataclasses.fields(kind) if field.init}
    help_texts = {action.dest.removeprefix("strategy."): action.help for action in parser._actions}
    assert settings == set(inspect.signature(kind).parameters)
    assert settings <= help_texts.keys()
    assert all(help_texts[name] and len(str(help_texts[name])) > 5 for name in settings)
    assert {"num_epochs", "reset_optimizer"} <= settings


@every_strategy
def test_settings_are_checked_by_their_own_names(kind: type[Strategy]) -> None:
    with pytest.raises(ValueError, match=r"strategy\.num_epochs must not be negative, got -1"):
        kind(num_epochs=-1)


def test_a_strategy_may_have_an_ordinary_constructor() -> None:
    class HalfWay(Mixing):
        def __init__(self, *, pull: float = 0.5, num_epochs: int = 7) -> None:
            super().__init__(num_epochs=num_epochs, personal=["head.*"])
            self.pull = pull

        def mixing_matrix(self, upload) -> Tensor:
            return example_weights(upload)[None]

    strategy = HalfWay(pull=0.3)
    assert (strategy.num_epochs, strategy.pull, list(strategy.personal)) == (7, 0.3, ["head.*"])
    assert (strategy.reset_optimizer, strategy.aggregation) == (False, None)
    with pytest.raises(ValueError, match="num_epochs"):
        HalfWay(num_epochs=-1)


def test_a_strategy_says_what_it_is_made_of() -> None:
    assert "num_epochs=2" in repr(FedAvg(num_epochs=2))
    assert FedAvg() != FedAvg()  # a strategy has state


def test_other_similarities_are_mixed_alike(federation, make_model, make_trainer) -> None:
    """Nearest in distance, weighted by a power: neither cosine nor softmax."""

    class Nearest(FedPub):
        def similarity(self, signature_CD: Tensor, other_KD: Tensor) -> Tensor:
            return 1 / (1 + torch.cdist(signature_CD, other_KD))

        def weights(self, similarity_CK: Tensor) -> Tensor:
            return similarity_CK**2 / (similarity_CK**2).sum(dim=1, keepdim=True)

    assert issubclass(Nearest, SimilarityMixing)
    trainer = make_trainer()
    strategy = Nearest()
    trainer.fit(make_model(FedPub), federation, strategy)
    signature_CD = strategy.signatures.rows_CD
    expected_CC = 1 / (1 + torch.cdist(signature_CD, signature_CD))
    matrices = strategy.matrices()
    torch.testing.assert_close(matrices["functional embedding"], expected_CC)
    torch.testing.assert_close(matrices["mixing"], expected_CC**2 / (expected_CC**2).sum(dim=1, keepdim=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"personal": None}, r"strategy\.personal must not be null: leave it out for \(\)"),
        ({"num_epochs": 10**30}, r"strategy\.num_epochs must be at most 1,000,000, got 1e\+30"),
        ({"weighting": "size"}, r"strategy\.weighting must be 'examples' or 'equal', got 'size'"),
    ],
)
def test_senseless_settings_are_refused_by_the_base(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedAvg(**settings)
