"""What lives on of clients from round to round: what a strategy declares, of those that took part, and nothing else."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from both_executors import both_executors
from saving import SavesAfter
from torch.optim import SGD

from fl_lightning import ClientModule, Participation, SequentialExecutor, StackedExecutor
from fl_lightning.executors import storage
from fl_lightning.executors.storage import on_disk
from fl_lightning.executors.store import FIRST_ROWS, ClientStore
from fl_lightning.models import NormalizedGCN
from fl_lightning.round.stage import Persistence, Stage
from fl_lightning.run import checkpoint
from fl_lightning.strategies import APFL, S2FGL, Ditto, FedAvg, FedBABU, FedPer, Local, PFedMe
from fl_lightning.testing.comparison import assert_same

SOME = Participation(num_clients=2)


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run a strategy; return the trainer."""

    def run(executor, strategy, model=None, data=None, **settings):
        settings = {"num_rounds": 3, "precision": "64-true", "seed": 1, **settings}
        ckpt_path = settings.pop("ckpt_path", None)
        trainer = make_trainer(executor=executor(), **settings)
        trainer.fit(model or make_model(dropout=0.5), data or federation, strategy, ckpt_path=ckpt_path)
        return trainer

    return run


def who_took_part(trainer: Any, num_rounds: int = 3) -> set[int]:
    draws = (trainer.participation.draw(trainer.run.training_clients, r, trainer.seed)[0] for r in range(num_rounds))
    return {client for work_fraction in draws for client in work_fraction}


# ------------------------------------------------------------------ what is declared


@both_executors
def test_fedavg_with_fresh_optimizers_keeps_nothing_of_clients(executor, fit) -> None:
    trainer = fit(executor, FedAvg(reset_optimizer=True), participation=SOME)

    clients = trainer.state_dict()["clients"]
    assert clients == {"clients": [], "parameters": {}, "signals": {}, "holdings": {}}
    assert len(trainer.run.executor.store) == 0
    assert trainer.run.executor.stored_bytes() == 0


@both_executors
def test_only_clients_that_took_part_are_kept(executor, fit) -> None:
    for strategy in (FedPer(), Local(), FedAvg()):
        trainer = fit(executor, strategy, participation=SOME, num_rounds=2)
        kept = trainer.state_dict()["clients"]
        assert set(kept["clients"]) == who_took_part(trainer, 2) != set(range(5))
        assert all(len(t) == len(kept["clients"]) for t in [*kept["parameters"].values(), *kept["signals"].values()])


@both_executors
@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        (FedPer(), {"head.weight", "head.bias"}),
        (FedBABU(), set()),
        (FedPer(personal=["head.bias"], reset_optimizer=True), {"head.bias"}),
    ],
    ids=["FedPer", "FedBABU", "head.bias"],
)
def test_parameters_that_are_sent_every_round_are_not_kept(strategy, names, executor, fit) -> None:
    clients = fit(executor, strategy).state_dict()["clients"]
    assert set(clients["parameters"]) == names
    assert any(name.startswith("optimizer/") for name in clients["signals"]) != strategy.reset_optimizer


def test_twins_keep_their_personal_models_and_mixtures_both(fit) -> None:
    ditto, apfl = (fit(StackedExecutor, kind(), num_rounds=1).state_dict()["clients"] for kind in (Ditto, APFL))
    assert {name.partition(".")[0] for name in ditto["parameters"]} == {"personal"}
    assert {name.partition(".")[0] for name in apfl["parameters"]} == {"personal", "shared"}


@both_executors
def test_an_optimizer_without_state_is_nothing_to_keep(executor, fit, make_model) -> None:
    plain, momentum = (
        fit(executor, FedAvg(), model=make_model(optimizer=functools.partial(SGD, lr=0.1, momentum=m)))
        for m in (0.0, 0.9)
    )
    assert plain.state_dict()["clients"]["clients"] == []
    assert momentum.state_dict()["clients"]["clients"] == [0, 1, 2, 3, 4]


@both_executors
def test_statistics_that_no_server_knows_are_kept(executor, fit, make_model) -> None:
    net = functools.partial(NormalizedGCN, hidden_channels=8)
    for statistics in ("personal", "shared"):
        model = ClientModule(net, make_model().optimizer_factory, running_statistics=statistics)
        kept = fit(executor, FedAvg(reset_optimizer=True), model=model).state_dict()["clients"]["parameters"]
        assert bool(kept) == (statistics == "personal")
        assert all("running" in name for name in kept)


class Forgetful(FedPer):
    """Forgets to say that the classifier lives on."""

    def persistence(self) -> Persistence:
        return dataclasses.replace(super().persistence(), parameters=())


class ForgetsOptimizer(Local):
    """Forgets to say that the optimizer's state lives on."""

    def persistence(self) -> Persistence:
        return dataclasses.replace(super().persistence(), optimizer=False)


@both_executors
def test_what_is_not_declared_is_lost_at_once(executor, fit, tmp_path) -> None:
    """In the run itself as after a resume, and a checkpoint does not score as its run."""
    for kind, forgetful in ((FedPer, Forgetful), (Local, ForgetsOptimizer)):
        path = tmp_path / kind.__name__ / "two.ckpt"
        kept, lost = fit(executor, kind()), fit(executor, forgetful(), callbacks=[SavesAfter(2, path)])
        assert kept.run.history[0]["train/loss"] == lost.run.history[0]["train/loss"]
        assert kept.run.history[1]["train/loss"] != lost.run.history[1]["train/loss"]
        resumed = fit(executor, forgetful(), ckpt_path=str(path))
        assert_same(resumed.run.history, lost.run.history)


def test_a_checkpoint_does_not_score_as_its_run_where_too_little_is_declared(
    federation, make_model, make_trainer, tmp_path
) -> None:
    scores = {}
    for kind in (FedPer, Forgetful):
        path = tmp_path / kind.__name__ / "last.ckpt"
        trainer = make_trainer(callbacks=[SavesAfter(3, path)])
        trainer.fit(make_model(), federation, kind())
        actual = make_trainer().test(make_model(), federation, kind(), ckpt_path=str(path))
        scores[kind] = actual["test/loss"] == trainer.run.history[-1]["test/loss"]
    assert scores == {FedPer: True, Forgetful: False}


# ------------------------------------------------------------------ equality, resume, failures


def test_a_round_of_small_clients_follows_one_of_all(fit, monkeypatch) -> None:
    """What S2FGL remembers of each node is padded for the largest client at hand, which is another then."""
    small = {4: 1.0, 3: 1.0}
    monkeypatch.setattr(
        Participation, "draw", lambda self, clients, r, seed: (small if r else dict.fromkeys(clients, 1.0), ())
    )
    stacked, sequential = (fit(executor, S2FGL()) for executor in (StackedExecutor, SequentialExecutor))
    assert_same(stacked.run.history, sequential.run.history, tolerance=1e-5)


class Fails(ClientModule):
    """The loss of the client of 24 nodes is infinite."""

    def loss(self, output: Any, batch: Any) -> Any:
        return super().loss(output, batch) / (batch.example_mask.sum() != 24)


@pytest.mark.parametrize("kind", [FedAvg, FedPer, PFedMe], ids=lambda kind: kind.__name__)
def test_resume_after_every_round(kind, fit, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(storage, "SMALLEST_FILE_BYTES", 1)
    draws, states = Participation(num_clients=3, dropout_probability=0.3, straggler_probability=0.4), []
    executors = {
        "sequential": SequentialExecutor,
        "stacked": functools.partial(StackedExecutor, max_padding=0.9),
        "disk": functools.partial(StackedExecutor, max_clients_per_group=2, storage="disk"),
    }
    for name, executor in executors.items():
        paths = {r: tmp_path / name / f"{r}.ckpt" for r in (1, 2, 3)}
        saves = [SavesAfter(r, path) for r, path in paths.items()]
        whole = fit(executor, kind(num_epochs=2), num_rounds=4, participation=draws, callbacks=saves)
        states.append((whole.state_dict()["clients"], whole.run.history))
        for path in paths.values() if name != "sequential" else ():  # the contract resumes these
            resumed = fit(executor, kind(num_epochs=2), num_rounds=4, participation=draws, ckpt_path=str(path))
            assert_same(resumed.state_dict()["clients"], whole.state_dict()["clients"])
            assert_same(resumed.run.history, whole.run.history)
    for clients, history in states[1:]:
        assert_same(clients, states[0][0], tolerance=1e-9)
        assert_same(history, states[0][1], tolerance=1e-6)


@both_executors
def test_of_a_failed_client_without_state_nothing_is_kept(executor, fit, make_model) -> None:
    with pytest.warns(UserWarning, match="client-01 failed .* not finite"):
        kept = fit(executor, FedAvg(), model=make_model(Fails)).state_dict()["clients"]
    assert kept["clients"] == [0, 2, 3, 4]  # no optimizer state of client 1

    with pytest.warns(UserWarning, match="client-01 failed .* not finite"):
        trainer = fit(executor, Local(), model=make_model(Fails))
    kept = trainer.state_dict()["clients"]
    assert kept["clients"] == [0, 1, 2, 3, 4]
    for name, initial in trainer.run.model.parameter_dict().items():
        assert torch.equal(kept["parameters"][name][1], initial.cpu())
        assert not kept["signals"][f"optimizer/started/{name}"][1]


@both_executors
def test_what_a_callback_asks_for_leaves_clients_as_they_were(executor, fit) -> None:
    trainer = fit(executor, Local(), num_rounds=2, participation=SOME)
    run, before = trainer.run, trainer.run.executor.state().copy()
    stage = Stage(name="ask", num_epochs=2, upload=tuple(run.architectures[0]))

    upload = run.executor.ask(stage, range(5), 1)

    assert upload.clients == (0, 1, 2, 3, 4)
    assert all((upload.parameters[name] != before.parameters[name]).any() for name in stage.upload)
    after = run.executor.state()
    assert_same(dict(after.tensors()), dict(before.tensors()))
    assert set(run.executor.lasting_state().clients) == who_took_part(trainer, 2)


# ------------------------------------------------------------------ evaluation


@both_executors
def test_clients_that_have_not_trained_are_scored_by_what_is_sent(executor, fit) -> None:
    trainer = fit(executor, FedAvg(), participation=SOME)
    trained = trainer.participation.draw(range(5), 2, 1)[0].keys()
    mixed, own = (trainer.run.scores[kind].extras["val/loss"] for kind in ("", "trained/"))
    assert {client for client in range(5) if not torch.equal(mixed[client], own[client])} == set(trained)


def test_a_cohort_is_evaluated(fit, federation, make_model, make_trainer, tmp_path) -> None:
    path = tmp_path / "v" / "last.ckpt"
    cohort = Participation(evaluation_clients=2)
    trainer = fit(StackedExecutor, FedPer(), participation=cohort, callbacks=[SavesAfter(3, path)])
    clients = trainer.run.scores[""].clients
    assert clients == trainer.run.evaluated_clients == cohort.evaluated(range(5), 1)
    assert len(clients) == 2
    everyone = fit(StackedExecutor, FedPer())
    table = everyone.run.scores[""].rows(clients).extras["val/loss"]
    torch.testing.assert_close(trainer.run.scores[""].extras["val/loss"], table)
    tested = make_trainer(participation=cohort, seed=1, precision="64-true")
    assert tested.test(make_model(dropout=0.5), federation, FedPer(), ckpt_path=str(path))["test/acc"] >= 0
    assert tested.run.scores[""].clients == clients
    assert len(tested.predict(make_model(dropout=0.5), federation, FedPer(), ckpt_path=str(path))) == 5
    with pytest.raises(ValueError, match=r"participation\.evaluation_clients is 6, but only 5 clients train: lower"):
        fit(StackedExecutor, FedPer(), participation=Participation(evaluation_clients=6))


# ------------------------------------------------------------------ nothing for those that never took part


class Watched(StackedExecutor):
    """Notes what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []
        self.allocate = self.noted

    def noted(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.rows.append(shape[0])
        return storage.in_memory(shape, dtype, device)


@pytest.mark.parametrize("strategy", [FedAvg(reset_optimizer=True), FedPer(), Local()], ids=lambda s: type(s).__name__)
def test_room_is_made_for_those_at_hand_alone(strategy, fit) -> None:
    trainer = fit(Watched, strategy, participation=Participation(num_clients=1), num_rounds=2)
    assert max(trainer.run.executor.rows) <= 2
    assert len(trainer.run.executor.stack.position) <= 2


@pytest.mark.parametrize("strategy", [FedAvg(), FedAvg(reset_optimizer=True), FedPer(), Local()], ids=str)
def test_the_stack_stays_while_the_same_clients_come(strategy, fit) -> None:
    """Nothing is copied: the storage of the second round is that of the first."""
    seen = []

    class Notes(SavesAfter):
        def on_checkpoint_point(self, trainer: Any) -> None:
            stack = trainer.run.executor.stack
            seen.append((id(stack), {n: t.data_ptr() for n, t in stack.parameters.items()}))

    fit(functools.partial(StackedExecutor, max_clients_per_group=2), strategy, callbacks=[Notes(9, None)])
    assert seen[0] == seen[1] == seen[2]


# ------------------------------------------------------------------ the store


def test_a_store_grows_with_its_clients_and_gives_back_what_was_put(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(storage, "SMALLEST_FILE_BYTES", 1)
    for allocate in (storage.in_memory, on_disk(str(tmp_path))):
        store = ClientStore(allocate, 1000, ragged={"rows"})
        clients = [7 * index % 1000 for index in range(100)]
        for client in clients:
            rows = torch.full((1, 1 + client % 3), float(client))
            store.put([client], {"value": torch.tensor([[client, -client]]), "rows": rows})
        assert store.clients == sorted(clients)
        assert 3 not in store
        assert store.tensors["value"].shape[0] == FIRST_ROWS * 8
        actual = store.get(clients[::-1])
        assert actual["value"].tolist() == [[client, -client] for client in clients[::-1]]
        for client, row in zip(clients[::-1], actual["rows"], strict=True):
            assert row.tolist() == [float(client)] * (1 + client % 3) + [0.0] * (2 - client % 3)
        store.put([clients[0]], {"late": torch.ones(1)})
        assert store.get(clients[:2], ["late"])["late"].tolist() == [1.0, 0.0]
        assert store.num_bytes() == sum(t[0].nbytes for t in store.tensors.values()) * 100
        with pytest.raises(KeyError):
            store.get([3])
        store.clear()
        assert len(store) == 0


def test_a_checkpoint_is_as_large_as_what_lives_on(fit, tmp_path) -> None:
    sizes = {}
    for name, strategy in {"nothing": FedAvg(reset_optimizer=True), "head": FedPer(reset_optimizer=True)}.items():
        path = tmp_path / name / "last.ckpt"
        fit(StackedExecutor, strategy, callbacks=[SavesAfter(3, path)], participation=SOME)
        sizes[name] = checkpoint.num_bytes(checkpoint.read(path)["clients"])
    assert sizes["nothing"] == 0
    took_part = {client for r in range(3) for client in SOME.draw(range(5), r, 1)[0]}
    assert sizes["head"] == len(took_part) * 8 * (8 * 3 + 3)
