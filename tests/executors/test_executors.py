import functools
import gc
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from both_executors import both_executors
from torch import nn
from torch.optim import LBFGS, SGD, Adagrad, Adam

from fl_lightning import ClientModule, Participation, SequentialExecutor, StackedExecutor
from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.callbacks import FederatedCheckpoint
from fl_lightning.data import ClientGraph
from fl_lightning.executors import stack, storage
from fl_lightning.executors.budget import client_bytes
from fl_lightning.executors.keys import derive_keys
from fl_lightning.kernels.randomness import derive_key
from fl_lightning.models import GCN
from fl_lightning.round.payload import flatten
from fl_lightning.run import checkpoint
from fl_lightning.strategies import FedAvg, FedPer, FedSheafHN, Local

CPU = torch.device("cpu")


@both_executors
def test_unlabeled_nodes_are_left_out(executor, graphs, given_clients, make_model, make_trainer, assert_same) -> None:
    states = []
    for unknown in (-1, 2):  # the label of a node without a role must not matter
        changed = []
        for graph in graphs:
            node = int(graph.train_mask_N.nonzero()[0])
            y_N, train_mask_N = graph.y_N.clone(), graph.train_mask_N.clone()
            y_N[node], train_mask_N[node] = unknown, False
            changed.append(ClientGraph(**{**vars(graph), "y_N": y_N, "train_mask_N": train_mask_N}))
        trainer = make_trainer(executor=executor())
        result = trainer.fit(make_model(), given_clients(changed), Local())
        states.append((dict(trainer.run.executor.state().parameters), result))

    assert_same(states[0], states[1])


# ---------------------------------------------------------------- how clients are run


@pytest.mark.parametrize(
    "settings", [{"max_padding": 0.0}, {"max_padding": 0.8, "max_clients_per_group": 2}, {}], ids=str
)
@pytest.mark.parametrize("participation", [{}, {"num_clients": 3}], ids=str)
def test_groups_do_not_change_results(
    settings, participation, federation, make_model, make_trainer, assert_same
) -> None:
    runs = []
    for executor in (StackedExecutor(max_padding=0.8), StackedExecutor(**settings)):
        trainer = make_trainer(
            executor=executor, precision="64-true", participation=Participation(**participation), num_rounds=4
        )
        strategy = FedSheafHN(num_epochs=2, init_epochs=2, num_neighbors=2, refresh_every=1)
        result = trainer.fit(make_model(), federation, strategy)
        runs.append((trainer.run.executor.groups, trainer.state_dict()["clients"], result))

    assert runs[0][0] != runs[1][0]
    assert_same(runs[1][1], runs[0][1], tolerance=1e-9)
    assert_same(runs[1][2], runs[0][2], tolerance=1e-6)


def test_grouping_bounds_padding_and_number(federation, make_model, make_trainer) -> None:
    def groups(**settings) -> list[tuple[int, ...]]:
        trainer = make_trainer(executor=StackedExecutor(**settings), num_rounds=1)
        trainer.fit(make_model(), federation, Local(num_epochs=0))
        return trainer.run.executor.groups

    # The sizes are 30, 24, 18, 12, 8.
    assert groups(max_padding=0.2) == [(0, 1), (2,), (3,), (4,)]
    assert groups(max_padding=0.4) == [(0, 1, 2), (3, 4)]
    assert groups(max_padding=0.4, max_clients_per_group=2) == [(0, 1), (2, 3), (4,)]
    assert groups(max_padding=0.75) == [(0, 1, 2, 3, 4)]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_padding": 1.0},
        {"max_padding": -0.1},
        {"max_clients_per_group": 0},
        {"max_group_mib": 0.0},
        {"storage_folder": "/tmp"},
        {"storage_folder": "/does/not/exist", "storage": "disk"},
    ],
    ids=str,
)
def test_executor_settings_out_of_range(settings) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        StackedExecutor(**settings)


def test_a_budget_of_memory_makes_groups(federation, make_model, make_trainer, assert_same) -> None:
    runs = []
    for mib in (None, 1e308, 0.05, 1e-6):
        trainer = make_trainer(
            executor=StackedExecutor(max_padding=0.8, max_group_mib=mib), precision="64-true", num_rounds=2
        )
        trainer.fit(make_model(), federation, FedAvg())
        runs.append((trainer.run.executor.groups, dict(trainer.run.executor.state().parameters)))

    whole, unbounded, some, single_clients = (len(groups) for groups, _ in runs)
    assert whole == unbounded == 1 < some < single_clients == 5
    for _, state in runs[1:]:
        assert_same(state, runs[0][1], tolerance=1e-9)


def test_memory_of_a_client_grows_with_its_parameters_and_its_data(graphs, make_model) -> None:
    def needed(client: int, **net: int) -> int:
        model = make_model(**net)
        model.build(graphs[0].num_features, 3)
        return client_bytes(
            model.double().train(),
            single(GraphCollator(graphs, device=torch.device("cpu"), dtype=torch.float64)([client])),
        )

    small, large = (needed(client) for client in (4, 0))
    parameters = 5 * 8 * sum(p.numel() for p in GCN(6, 3, hidden_channels=8).parameters())
    # 30 and 8 nodes; some of what is kept does not depend on their number
    assert 2.5 < (large - parameters) / (small - parameters) < 30 / 8
    assert needed(4, hidden_channels=64) > 15 * small


@pytest.mark.parametrize("settings", [{}, {"max_clients_per_group": 2}], ids=str)
def test_clients_on_disk_are_the_same_clients(
    settings, federation, make_model, make_trainer, assert_same, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(storage, "SMALLEST_FILE_BYTES", 1)
    folder = tmp_path / "files"
    folder.mkdir()
    states = []
    for where in ({}, {"storage": "disk", "storage_folder": str(folder)}):
        trainer = make_trainer(
            executor=StackedExecutor(max_padding=0.8, **settings, **where),
            participation=Participation(num_clients=4, straggler_probability=0.5),
            callbacks=[FederatedCheckpoint()],
            num_rounds=4,
        )
        trainer.fit(make_model(), federation, FedPer(num_epochs=3))
        last, best = (checkpoint.read(trainer.run.folder / f"checkpoints/{name}.ckpt") for name in ("last", "best"))
        states.append([{name: state[name] for name in ("clients", "strategy", "history")} for state in (last, best)])

    assert_same(states[1], states[0])
    mapped = Path("/proc/self/maps")
    if mapped.exists():  # there are such files, and none has a name any more
        assert f"{folder}/clients-" in mapped.read_text()
    assert not list(folder.iterdir())


def test_a_full_disk_is_named(monkeypatch, tmp_path) -> None:
    def full(*args: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(storage.os, "posix_fallocate", full, raising=False)
    with pytest.raises(ValueError, match=r"4 MiB of the clients' state do not fit into '.*: choose another storage_f"):
        storage.on_disk(str(tmp_path))((1024, 1024), torch.float32, CPU)


@pytest.mark.parametrize("nets", [1, 2])
@both_executors
def test_clients_are_freed_with_their_trainer(executor, nets, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(executor=executor())
    model = make_model()
    model.net_factories = model.net_factories * nets
    trainer.fit(model, federation, Local())
    held = weakref.ref(trainer), weakref.ref(trainer.run.executor)
    gc.disable()  # nothing may have to wait for the collector of cycles
    try:
        del trainer
        assert [reference() for reference in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("participation", [{}, {"num_clients": 4}], ids=str)
def test_clients_of_many_ages_step_in_the_order_of_their_ages(
    participation, federation, make_model, make_trainer, assert_same, monkeypatch
) -> None:
    draws = Participation(straggler_probability=0.5, **participation)
    states = []
    for most in (stack.MANY_BLOCKS, 0):
        monkeypatch.setattr(stack, "MANY_BLOCKS", most)
        trainer = make_trainer(
            executor=StackedExecutor(max_padding=0.8), precision="64-true", participation=draws, num_rounds=5
        )
        trainer.fit(make_model(), federation, FedPer(num_epochs=4))
        states.append(trainer.state_dict()["clients"])

    assert len(set(states[0]["signals"]["optimizer/step/head.bias"].tolist())) > 2
    assert_same(states[1], states[0], tolerance=1e-9)


def test_some_of_those_that_stepped_as_one_are_slow_in_the_next_round(
    federation, make_model, make_trainer, assert_same
) -> None:
    class Slow(Participation):
        def draw(self, clients: Sequence[int], round_idx: int, seed: int) -> tuple[dict[int, float], list[int]]:
            return {client: 0.5 if round_idx == 1 and client < 2 else 1.0 for client in clients}, []

    states = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.8)):
        trainer = make_trainer(executor=executor, precision="64-true", participation=Slow(), num_rounds=3)
        trainer.fit(make_model(), federation, FedPer(num_epochs=2))
        states.append(dict(trainer.run.executor.state().tensors()))

    assert states[1]["optimizer/step/head.bias"].tolist() == [5, 5, 6, 6, 6]
    assert_same(states[1], states[0], tolerance=1e-9)


def test_keys_of_many_clients_are_those_of_each() -> None:
    clients, steps = torch.tensor([0, 3, 2**40]), torch.arange(4)
    for seed in (0, 7, -3, 2**63 + 5, 2**64 - 1):
        keys = derive_keys(seed, "träin", 12, clients, steps[:, None])
        assert keys.tolist() == [[derive_key(seed, "träin", 12, c, s) for c in clients.tolist()] for s in range(4)]


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(SGD, lr=0.1),
        functools.partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
        functools.partial(Adam, lr=0.05, amsgrad=True),
        functools.partial(Adam, lr=0.05, fused=True),
        functools.partial(Adagrad, lr=0.1),
        functools.partial(torch.optim.RMSprop, lr=0.01, centered=True),
        functools.partial(torch.optim.NAdam, lr=0.02),
        functools.partial(torch.optim.Adafactor, lr=0.02),  # looks at a whole matrix
    ],
    ids=str,
)
@pytest.mark.parametrize("reset", [False, True])
def test_any_optimizer_gives_the_same_in_both_executors(
    optimizer, reset, federation, make_model, make_trainer, assert_same, tmp_path
) -> None:
    states = []
    participation = Participation(num_clients=3, straggler_probability=0.5)
    for executor in (SequentialExecutor, functools.partial(StackedExecutor, max_padding=0.8)):
        trainer = make_trainer(executor=executor(), precision="64-true", participation=participation)
        trainer.fit(make_model(optimizer=optimizer), federation, FedAvg(reset_optimizer=reset))
        path = tmp_path / "v" / f"{len(states)}.ckpt"
        trainer.save_checkpoint(path)
        resumed = make_trainer(executor=executor(), precision="64-true", participation=participation, num_rounds=5)
        resumed.fit(make_model(optimizer=optimizer), federation, FedAvg(reset_optimizer=reset), ckpt_path=str(path))
        whole = make_trainer(executor=executor(), precision="64-true", participation=participation, num_rounds=5)
        whole.fit(make_model(optimizer=optimizer), federation, FedAvg(reset_optimizer=reset))
        assert_same(resumed.state_dict()["clients"], whole.state_dict()["clients"])
        states.append(dict(whole.run.executor.state().parameters))

    assert_same(states[1], states[0], tolerance=1e-9)


def by_rank(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Weight decay for matrices alone, as usual."""
    groups = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]]
    return SGD([{"params": groups[0], "weight_decay": 0.3}, {"params": groups[1], "lr": 0.5}], lr=0.1, momentum=0.5)


class Bounded(Adagrad):
    """Bounds the norm of all gradients that it is given."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.05)
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [by_rank, lambda ps: by_rank(ps[:2]), Bounded], ids=["rank", "place", "norm"])
def test_an_optimizer_sees_the_parameters_of_one_client(
    optimizer, federation, make_model, make_trainer, assert_same
) -> None:
    states = []
    participation = Participation(straggler_probability=0.5)
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(executor=executor, precision="64-true", participation=participation)
        trainer.fit(make_model(optimizer=optimizer), federation, FedPer(num_epochs=2))
        states.append(dict(trainer.run.executor.state().parameters))
    assert_same(states[1], states[0], tolerance=1e-12)


class Follows(torch.optim.Optimizer):
    """Keeps a mean gradient under a name that is a number elsewhere."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            mean = self.state[p].setdefault("mu", torch.zeros_like(p))
            p.sub_(mean.lerp_(p.grad, 0.5), alpha=0.1)


def test_a_slot_of_an_own_optimizer_may_have_the_name_of_a_count(
    federation, make_model, make_trainer, assert_same, monkeypatch
) -> None:
    """More clients than are stepped in any order made all of them fail."""
    monkeypatch.setattr(stack, "MANY_BLOCKS", 2)
    states = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(executor=executor, precision="64-true", num_rounds=2)
        trainer.fit(make_model(optimizer=Follows), federation, Local(num_epochs=2))
        states.append(dict(trainer.run.executor.state().parameters))
    assert_same(states[1], states[0], tolerance=1e-12)


def decaying(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """Steps a scheduler of its own."""
    optimizer = SGD(parameters, lr=0.2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


class Counting(torch.optim.Optimizer):
    """Counts its steps as many optimizers outside torch do: in the state of parameters, the group, or itself."""

    def __init__(self, parameters, place: str, start=0) -> None:
        super().__init__(parameters, {"lr": 0.1, "place": place})
        self.place, self.count = place, start

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                where = {"group": group, "state": self.state[p], "optimizer": vars(self)}[self.place]
                where["count"] = where.get("count", 0) + 1
                p.sub_(group["lr"] / where["count"] * p.grad)


@pytest.mark.parametrize(
    ("optimizer", "kept"),
    [
        (functools.partial(Counting, place="group"), "Counting keeps count"),
        (functools.partial(Counting, place="state"), "Counting keeps count"),
        (functools.partial(Counting, place="optimizer"), "Counting keeps count"),
        (functools.partial(Counting, place="optimizer", start=torch.zeros(())), "Counting keeps count"),
        (decaying, "SGD keeps lr"),
    ],
    ids=["group", "state", "optimizer", "tensor", "scheduler"],
)
def test_optimizers_whose_state_would_be_lost_are_refused(
    optimizer, kept, federation, make_model, make_trainer, assert_same
) -> None:
    states = []
    participation = Participation(straggler_probability=0.5)
    for executor in (SequentialExecutor, functools.partial(StackedExecutor, storage="disk")):
        model = make_model(optimizer=optimizer)
        with pytest.raises(ValueError, match=rf"model\.optimizer: {kept} outside .*reset_optimizer"):
            make_trainer(executor=executor()).fit(model, federation, FedAvg())
        trainer = make_trainer(executor=executor(), precision="64-true", participation=participation)
        trainer.fit(model, federation, FedAvg(reset_optimizer=True))
        states.append(dict(trainer.run.executor.state().parameters))
    assert_same(states[1], states[0], tolerance=1e-12)


def test_each_client_clips_its_own_gradient(federation, make_model, make_trainer, assert_same) -> None:
    optimizer = functools.partial(SGD, lr=0.5)

    def moved(executor, gradient_clip_val: float | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        trainer = make_trainer(executor=executor(), precision="64-true", num_rounds=1)
        model = make_model(optimizer=optimizer, gradient_clip_val=gradient_clip_val)
        trainer.fit(model, federation, Local(num_epochs=1))
        end = dict(trainer.run.executor.state().parameters)
        return flatten({n: end[n] - trainer.run.architectures[0][n] for n in end}).norm(dim=1), end

    free_C, unclipped = moved(StackedExecutor, None)
    bound = float(free_C.median())
    clipped_C, stacked = moved(StackedExecutor, bound / 0.5)
    assert_same(clipped_C, free_C.clamp(max=bound), tolerance=1e-5)  # 1e-6 is added to the norm
    assert_same(moved(SequentialExecutor, bound / 0.5)[1], stacked, tolerance=1e-12)
    assert_same(moved(StackedExecutor, 1e6)[1], unclipped)


def test_both_executors_clip_as_a_client_says(federation, make_model, make_trainer, assert_same) -> None:
    class Heads(ClientModule):
        """Trains the head alone, by clamped gradients."""

        def build_optimizer(self, named_parameters):
            return super().build_optimizer((n, p) for n, p in named_parameters if n.startswith("head"))

        def clip(self, gradients):
            return {name: g if g is None else g.clamp(-0.01, 0.01) for name, g in gradients.items()}

    def trained(executor, **settings) -> dict[str, torch.Tensor]:
        trainer = make_trainer(executor=executor(), precision="64-true", num_rounds=2)
        trainer.fit(make_model(optimizer=functools.partial(SGD, lr=0.5), **settings), federation, Local(num_epochs=2))
        return dict(trainer.run.executor.state().parameters)

    class Bounded(Heads):
        clip = ClientModule.clip

    for settings in ({"kind": Heads}, {"kind": Bounded, "gradient_clip_val": 0.05}):
        assert_same(trained(SequentialExecutor, **settings), trained(StackedExecutor, **settings), tolerance=1e-12)


def test_frozen_parameters_have_no_gradient_to_clip(federation, make_model) -> None:
    model = make_model(gradient_clip_val=1.0)
    gradients = model.clip({"frozen": None, "scalar": torch.tensor([3.0, 0.3]), "vector": torch.tensor([[4.0], [0.4]])})
    assert gradients["frozen"] is None
    assert model.clip({"frozen": None}) == {"frozen": None}
    torch.testing.assert_close(gradients["scalar"], torch.tensor([0.6, 0.3]))
    torch.testing.assert_close(gradients["vector"], torch.tensor([[0.8], [0.4]]))
    with pytest.raises(ValueError, match=r"model\.gradient_clip_val must be positive"):
        make_model(gradient_clip_val=0.0)


@both_executors
def test_optimizer_state_lives_on_unless_reset(executor, federation, make_model, make_trainer) -> None:
    def steps(**settings) -> set[float]:
        trainer = make_trainer(executor=executor())
        trainer.fit(make_model(), federation, FedAvg(num_epochs=2, **settings))
        return set(trainer.run.executor.state().extras["optimizer/step/head.bias"].tolist())

    assert steps() == {6.0}
    assert steps(reset_optimizer=True) == {2.0}


@both_executors
def test_stragglers_step_less_and_absentees_not_at_all(executor, federation, make_model, make_trainer) -> None:
    participation = Participation(num_clients=4, straggler_probability=0.6)
    work_fraction, _ = participation.draw(range(5), 0, 0)
    assert min(work_fraction.values()) < 1 == max(work_fraction.values())

    trainer = make_trainer(executor=executor(), participation=participation, num_rounds=1)
    trainer.fit(make_model(), federation, Local(num_epochs=5))

    steps = trainer.run.executor.state().extras["optimizer/step/head.bias"].tolist()
    for client in range(5):
        share = work_fraction.get(client, 0.0)
        assert steps[client] == (0 if client not in work_fraction else 5 if share == 1 else 1 + int(4 * share))


class PartlyFrozen(GCN):
    """Its first bias is frozen and one parameter is never used."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.convs[0].bias.requires_grad_(False)
        self.idle = nn.Parameter(torch.ones(2))


@both_executors
def test_frozen_and_unused_parameters_stay(executor, federation, make_trainer) -> None:
    trainer = make_trainer(executor=executor())
    optimizer = functools.partial(Adam, lr=0.05, weight_decay=0.1)
    trainer.fit(ClientModule(functools.partial(PartlyFrozen, hidden_channels=8), optimizer), federation, Local())

    state = trainer.run.executor.state().parameters
    moved = {name for name, start in trainer.run.architectures[0].items() if not torch.equal(state[name][0], start)}
    assert moved == {"convs.0.weight", "convs.1.weight", "convs.1.bias", "head.weight", "head.bias"}


class Tied(GCN):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.again = self.head


@both_executors
def test_parameters_of_two_names_are_refused(executor, federation, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"model\.net has again\.bias, again\.weight as second names of parameters"):
        make_trainer(executor=executor()).fit(ClientModule(Tied), federation, FedAvg())


@both_executors
def test_optimizers_with_closures_are_refused(executor, federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"model\.optimizer: LBFGS needs a closure; choose a first-order"):
        make_trainer(executor=executor()).fit(make_model(optimizer=LBFGS), federation, FedAvg())


class OwnStep(ClientModule):
    """Counts its hooks and halves the loss."""

    calls: ClassVar[list[str]] = []

    def on_train_start(self) -> None:
        self.calls.append("start")

    def on_train_epoch_end(self) -> None:
        self.calls.append("epoch")

    def training_step(self, batch, batch_idx):
        self.calls.append(f"step {batch_idx}")
        return super().training_step(batch, batch_idx)


def test_sequential_runs_the_hooks_of_an_own_training_step(federation, make_model, make_trainer) -> None:
    OwnStep.calls.clear()
    trainer = make_trainer(executor=SequentialExecutor(), num_rounds=1)
    trainer.fit(make_model(OwnStep), federation, FedAvg(num_epochs=2))
    assert OwnStep.calls == ["start", "step 0", "epoch", "step 0", "epoch"] * 5


def test_stacked_hands_a_client_with_hooks_of_its_own_over(federation, make_model, make_trainer, assert_same) -> None:
    def trained(executor) -> dict[str, torch.Tensor]:
        trainer = make_trainer(executor=executor, num_rounds=1)
        trainer.fit(make_model(OwnStep), federation, FedAvg(num_epochs=2))
        return dict(trainer.run.executor.state().parameters)

    with pytest.warns(
        UserWarning, match="OwnStep overrides training_step, on_train_start, on_train_epoch_end, which the"
    ):
        handed_over = trained(StackedExecutor())
    assert_same(handed_over, trained(SequentialExecutor()))


def test_predictions_agree_and_are_probabilities(federation, make_model, make_trainer, tmp_path) -> None:
    path = tmp_path / "v" / "a.ckpt"
    predictions = []
    for executor in (SequentialExecutor(), StackedExecutor()):
        trainer = make_trainer(executor=executor, precision="64-true")
        trainer.fit(make_model(), federation, FedAvg())
        trainer.save_checkpoint(path)
        fresh = make_trainer(executor=executor, precision="64-true")
        predictions.append(fresh.predict(make_model(), federation, FedAvg(), str(path)))

    assert list(predictions[0]) == [0, 1, 2, 3, 4]
    for client, graph in enumerate(federation.clients):
        actual = predictions[1][client]
        torch.testing.assert_close(actual, predictions[0][client])
        torch.testing.assert_close(actual.sum(dim=1), torch.ones(graph.num_nodes))
        correct = (actual.argmax(dim=1) == graph.y_N)[graph.test_mask_N].float().mean()
        score = trainer.run.scores[""].extras["test/acc"][client]
        assert float(correct) == pytest.approx(float(score[0] / score[1]))


@both_executors
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_lower_precision_runs(executor, precision, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(executor=executor(), precision=precision, num_rounds=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(make_model(), federation, FedAvg())
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {tensor.dtype for tensor in trainer.run.executor.state().parameters.values()} == {dtype}
    assert trainer.run.history[-1]["train/loss"] < trainer.run.history[0]["train/loss"]


@both_executors
def test_a_model_that_two_evaluations_share_is_scored_once(executor, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(executor=executor(), num_rounds=1, participation=Participation(num_clients=2))
    trainer.fit(make_model(), federation, FedAvg())
    run, clients = trainer.run, range(len(federation.clients))
    evaluations = run.strategy.evaluations(clients)
    asked: list[list[int]] = []
    score = run.executor._score
    run.executor._score = lambda way, members, *rest: asked.append(list(members)) or score(way, members, *rest)
    together = run.executor.evaluate(evaluations, clients, 0)
    assert [len(members) for members in asked] == [5, 2]  # of the trained models, those of clients that have trained
    for kind, each in evaluations.items():
        alone = run.executor.evaluate({kind: each}, clients, 0)[kind].upload
        for name, value in together[kind].upload.rows(clients).extras.items():
            torch.testing.assert_close(value, alone.rows(clients).extras[name], rtol=0, atol=1e-6)
