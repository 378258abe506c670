"""What every strategy must do: the checks of ``fl_lightning.testing``, and a few more. A new one is found by itself."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import StackedExecutor, strategies
from fl_lightning.executors import storage
from fl_lightning.relations.topology import Complete
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Stage
from fl_lightning.strategies import FGGP, FedGCN, FedPub, PFedHN, Pooled, SheafRidge, Strategy
from fl_lightning.testing import CHECKS, StrategyRuns
from fl_lightning.testing.checks import check_server_state_is_complete
from fl_lightning.testing.comparison import assert_same

STRATEGIES = sorted(
    {
        kind
        for kind in vars(strategies).values()
        if inspect.isclass(kind) and issubclass(kind, Strategy) and not inspect.isabstract(kind)
    },
    key=lambda kind: kind.__name__,
)
#: Settings for a federation of five clients, for the strategies that have them.
TINY = {
    "num_epochs": 3,
    "init_epochs": 2,
    "pretrain_epochs": 2,
    "refine_epochs": 2,
    "num_federated_rounds": 2,
    "num_join_epochs": 2,
    "num_finetune_epochs": 2,
    "num_neighbors": 2,
    "num_warmup_rounds": 1,
    "warmup_rounds": 1,
    "refresh_every": 2,
    "hidden_channels": 8,
    "mean_weight": 1.0,
    "diffusion_lr": 0.01,
    "hypernetwork_lr": 0.01,
    "topology": Complete(),  # the same neighbors whatever the order of the clients
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:DFedAvgM is for SGD with momentum"),
    pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree"),
]
every_strategy = pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)


def tiny(kind: type[Strategy], *, dropout: bool = True) -> Strategy:
    names = inspect.signature(kind).parameters
    settings: dict[str, Any] = {name: value for name, value in TINY.items() if name in names}
    if not dropout:
        settings |= {name: 0.0 for name in names if name.endswith("dropout")}
        settings |= {name: "same" for name in names if name == "batches"}  # instead of parts drawn at random
    return kind(**settings)


@pytest.fixture(scope="module", params=STRATEGIES, ids=lambda kind: kind.__name__)
def runs(request: Any, federation: Any, make_model: Any, tmp_path_factory: Any) -> StrategyRuns:
    """The runs of a strategy, which its checks share."""
    folder: Path = tmp_path_factory.mktemp(request.param.__name__)
    return StrategyRuns(tiny(request.param), federation, folder, make_model(request.param, dropout=0.5))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(runs: StrategyRuns, check: Any) -> None:
    check(runs)


#: Those whose mixed and trained models can be blended.
BLENDING = [kind for kind in STRATEGIES if "blend" in inspect.signature(kind).parameters]


@pytest.mark.full
@pytest.mark.parametrize("kind", BLENDING, ids=lambda kind: kind.__name__)
def test_a_blend_that_can_be_set_is_scored(kind, federation, make_model, make_trainer) -> None:
    strategy = tiny(kind)
    strategy.blend = True
    trainer = make_trainer(num_rounds=1, executor=StackedExecutor())
    trainer.fit(make_model(kind), federation, strategy)
    assert "blend/val/acc" in trainer.run.history[0]


def test_small_groups_on_disk_come_to_the_same(runs: StrategyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SMALLEST_FILE_BYTES", 1)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # thousands of small files, fast
    small_groups = StackedExecutor(max_clients_per_group=2, max_group_mib=0.2, storage="disk", storage_folder=memory)
    run = runs.run(small_groups, participation=runs.busy())

    expected = runs.sequential
    for part in ("parameters", "signals"):
        states = (each.trainer.state_dict()["clients"][part] for each in (run, expected))
        assert_same(*states, tolerance=1e-9)
    assert_same(run.strategy.state_dict(), expected.strategy.state_dict(), tolerance=1e-9)
    assert_same(run.history, expected.history, tolerance=1e-6)
    assert_same(run.result, expected.result, tolerance=1e-6)


def forgotten(runs: StrategyRuns, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, bool]]:
    """Each name that the classes of a strategy declare, and whether the contract notices if it is left out."""
    assert runs.sequential.result  # with all names
    for kind in type(runs.strategy).__mro__:
        for name in vars(kind).get("server_state", ()):
            with monkeypatch.context() as patch:
                patch.setattr(kind, "server_state", tuple(other for other in kind.server_state if other != name))
                try:
                    check_server_state_is_complete(runs)
                except AssertionError:
                    yield name, True
                else:
                    yield name, False


#: What does not change in the runs of most strategies: each of these is needed by one of ``NEEDS``.
RARELY_NEEDED = {"breadth", "trials", "estimated_shares", "uniform_mixing", "num_collapsed_rounds", "logits_NK", "lost"}
#: What never changes: a server that was set up with another one refuses to load.
NEVER_CHANGES = {"adjacency_CC"}


class LosesTotals(FedGCN):
    """One client has received no totals, and its messages go on being lost."""

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        lost = stage.name in ("receive-0", "settle")
        super().aggregate(stage, upload.rows(upload.clients[1:]) if lost else upload)


NEEDS = {
    "lost": LosesTotals,
    "breadth": lambda: FedPub(),
    "estimated_shares": lambda: FedPub(common_share=None),
    "uniform_mixing": lambda: FedPub(similarity_temperature=1e-9),
    "logits_NK": lambda: Pooled(graph="whole"),
    "num_collapsed_rounds": lambda: PFedHN(embedding_scale=1e-9, hidden_channels=8),
    "trials": lambda: FedPub(
        validate_every=1, similarity_temperature=1e6, validate_similarity_temperature=[0.0, 10.0, 1e6]
    ),
    "SheafRidge: trials": lambda: SheafRidge(validate_every=1, num_neighbors=2, validate_personal=["head.*"]),
}


def test_a_forgotten_name_of_server_state_is_noticed(runs: StrategyRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    unnoticed = {name for name, is_noticed in forgotten(runs, monkeypatch) if not is_noticed}
    assert unnoticed <= RARELY_NEEDED | NEVER_CHANGES


@pytest.mark.parametrize("name", NEEDS)
def test_what_is_rarely_needed_is_noticed_where_it_is(name, federation, make_model, tmp_path, monkeypatch) -> None:
    strategy = NEEDS[name]()
    runs = StrategyRuns(strategy, federation, tmp_path, make_model(type(strategy)))
    assert (name.rpartition(" ")[2], True) in set(forgotten(runs, monkeypatch))


def test_the_known_strategies_are_found() -> None:
    assert {"FedAvg", "FedPer", "FedProx", "FedSheafHN", "Local"} <= {kind.__name__ for kind in STRATEGIES}
    assert {kind.__name__ for kind in STRATEGIES} <= set(strategies.__all__)


@every_strategy
def test_training_lowers_the_loss(kind, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=6)

    result = trainer.fit(make_model(kind), federation, tiny(kind))

    first, *_, last = trainer.run.history
    loss = "classifier/train/loss" if kind is FGGP else "train/loss"  # the loss of its vote need not fall
    assert last[loss] < 0.95 * first[loss]
    assert result["val/acc"] == pytest.approx(max(row["val/acc"] for row in trainer.run.history))
    assert result["test/acc"] == trainer.run.history[result["best_round"]]["test/acc"]


@every_strategy
def test_permuting_clients_permutes_results(kind, graphs, given_clients, make_model, make_trainer) -> None:
    order = [3, 0, 4, 2, 1]
    runs = []
    for clients in (graphs, [graphs[client] for client in order]):
        trainer = make_trainer(precision="64-true")
        result = trainer.fit(make_model(kind, dropout=0.0), given_clients(clients), tiny(kind, dropout=False))
        runs.append((trainer.run.executor.state(), trainer.run.scores, result))
    (state, scores, result), (permuted_state, permuted_scores, permuted_result) = runs

    assert_same(permuted_state.parameters, state.rows(order).parameters, tolerance=1e-8)
    for prefix, payload in scores.items():
        assert_same(permuted_scores[prefix].extras, payload.rows(order).extras, tolerance=1e-6)
    assert_same(permuted_result, result, tolerance=1e-6)


@every_strategy
def test_models_are_scored_on_the_union_or_it_is_refused(kind, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1, evaluate_union=True)
    if kind.needs_own_examples:
        with pytest.raises(ValueError, match=r"evaluate_union is true, but .* cannot be scored on those of others"):
            trainer.fit(make_model(kind), federation, tiny(kind))
        return
    assert trainer.fit(make_model(kind), federation, tiny(kind))["union/test/acc"] >= 0
