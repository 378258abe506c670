"""Attacks change what the chosen clients hold or send, and nothing else."""

import dataclasses
import functools
import itertools
import json
import types
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from both_executors import both_executors
from saving import SavesAfter
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning import (
    Callback,
    ClientModule,
    FederatedDataModule,
    Participation,
    Payload,
    SequentialExecutor,
    Stage,
)
from fl_lightning.callbacks import (
    Attack,
    Backdoor,
    FederatedCheckpoint,
    GaussianAttack,
    LabelFlipping,
    ModelPoisoning,
    SameValueAttack,
    SignFlip,
    SimpleTuning,
)
from fl_lightning.callbacks.attacks.backdoor import read_picture
from fl_lightning.callbacks.attacks.forgery import benign_rows, malicious_clients
from fl_lightning.data import ClientSplit, Examples, ExampleSource
from fl_lightning.models.gcn import GCN
from fl_lightning.models.output import NetOutput
from fl_lightning.relations.topology import Ring
from fl_lightning.round.metrics import client_values
from fl_lightning.round.payload import FLAT, from_wire
from fl_lightning.round.stage import Persistence
from fl_lightning.strategies import DPSGD, Ditto, FedAux, FedAvg, FedPer, FedPub, FedSheafHN, Local

TINY_SHEAF = functools.partial(FedSheafHN, init_epochs=2, num_neighbors=2, refresh_every=2, hidden_channels=8)
#: Rounds of three of the four training clients; client 2 is held out.
BUSY = {"num_clients": 3, "straggler_probability": 0.5, "held_out_fraction": 0.2}


class Record(Callback):
    """Keeps copies of what went down and came up, and of the clients' data."""

    def __init__(self) -> None:
        self.data: list[tuple[Any, ...]] = []
        self.down: list[Payload | None] = []
        self.up: list[tuple[Stage, Payload]] = []

    def on_clients(self, trainer: Any, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        self.data.append(clients)
        return clients

    def on_send(self, trainer: Any, stage: Stage, payload: Payload | None) -> None:
        self.down.append(None if payload is None else copied(payload))

    def on_upload(self, trainer: Any, stage: Stage, payload: Payload) -> Payload:
        self.up.append((stage, copied(payload)))
        return payload


def copied(payload: Payload) -> Payload:
    return dataclasses.replace(
        payload,
        parameters={name: tensor.clone() for name, tensor in payload.parameters.items()},
        extras={name: tensor.clone() for name, tensor in payload.extras.items()},
    )


@pytest.fixture
def attacked(federation, make_model, make_trainer):
    """Runs a strategy under an attack; returns the trainer and what was recorded before and after the attack."""

    def run(attack: Attack, algorithm: Any, **settings: Any) -> tuple[Any, Record, Record]:
        before, after = Record(), Record()
        trainer = make_trainer(callbacks=[before, attack, after], **settings)
        trainer.fit(make_model(algorithm), federation, algorithm)
        return trainer, before, after

    return run


def assert_only_rows_differ(before: Payload, after: Payload, clients: Any, changed: set[str]) -> None:
    """Everything but the named tensors' rows of the given clients is the same to the last bit."""
    assert after.clients == before.clients
    assert torch.equal(after.num_examples, before.num_examples)
    assert list(after.parameters) == list(before.parameters)
    assert list(after.extras) == list(before.extras)
    for name, tensor in before.tensors().items():
        actual = after.tensors()[name]
        assert (actual.dtype, actual.shape) == (tensor.dtype, tensor.shape)
        for row, client in enumerate(before.clients):
            assert torch.equal(actual[row], tensor[row]) == (client not in clients or name not in changed), name


# ---------------------------------------------------------------- who is malicious


def chosen(make_trainer, federation, make_model, attack: Attack, **settings: Any) -> tuple[int, ...]:
    trainer = make_trainer(callbacks=attack, num_rounds=1, **settings)
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    return attack.malicious


def test_the_choice_depends_on_the_seed_alone(make_trainer, federation, make_model) -> None:
    choose = functools.partial(chosen, make_trainer, federation, make_model)
    two = choose(LabelFlipping(ratio=0.4))

    assert two == choose(SignFlip(ratio=0.4)) == choose(SignFlip(ratio=0.4), executor=SequentialExecutor())
    assert two == choose(SignFlip(ratio=0.4, seed=0), seed=7)
    assert len(two) == 2
    assert set(two) < set(choose(SignFlip(ratio=0.6)))
    assert choose(SignFlip(ratio=0.0)) == ()
    assert choose(SignFlip(clients=[3, 1])) == (1, 3)
    others = {choose(SignFlip(ratio=0.4, seed=seed)) for seed in range(1, 6)}
    assert len(others) > 2


def test_only_training_clients_are_malicious(make_trainer, federation, make_model) -> None:
    settings = {"participation": Participation(held_out_fraction=0.4), "seed": 1}  # 2 and 4 are unseen clients
    assert set(chosen(make_trainer, federation, make_model, SignFlip(ratio=0.67), **settings)) < {0, 1, 3}
    with pytest.raises(
        ValueError, match=r"SignFlip\.clients: \[4, 9\] are not among the training clients, \[0, 1, 3\]"
    ):
        chosen(make_trainer, federation, make_model, SignFlip(clients=[0, 4, 9]), **settings)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LabelFlipping(), r"LabelFlipping needs ratio \(for example 0\.2\) or clients"),
        (lambda: SignFlip(ratio=0.2, clients=[1]), r"SignFlip\.ratio or SignFlip\.clients, not both"),
        (lambda: SignFlip(ratio=1.0), r"SignFlip\.ratio must be in \[0, 1\), got 1\.0"),
        (lambda: GaussianAttack(ratio=0.2, scale=0.0), r"GaussianAttack\.scale must be positive, got 0\.0"),
        (lambda: ModelPoisoning(ratio=0.2, factor=-1.0), r"ModelPoisoning\.factor must be positive, got -1\.0"),
        (lambda: Backdoor(blend=1.5), r"Backdoor\.blend must be in \(0, 1\], got 1\.5"),
        (lambda: Backdoor(poisoned_fraction=0.0), r"Backdoor\.poisoned_fraction must be in \(0, 1\], got 0\.0"),
        (lambda: Backdoor(picture="kitty.jpg"), r"Backdoor\.picture must be a \.png or a \.npy file, got kitty\.jpg"),
        (lambda: SimpleTuning(num_epochs=0), r"SimpleTuning\.num_epochs must be at least 1, got 0"),
        (lambda: SimpleTuning(classifier=()), r"SimpleTuning\.classifier is empty"),
    ],
)
def test_settings_out_of_range(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (SignFlip(ratio=0.05), r"SignFlip\.ratio=0\.05 of 5 training clients is no client: raise it to at least 0\.1"),
        (SignFlip(ratio=0.95), r"all 5 training clients would be malicious"),
        (
            GaussianAttack(ratio=0.2),
            r"GaussianAttack: FedAvg sends no client output that matches '\*'; it sends parameters\. .* ModelPoisoning",
        ),
        (Backdoor(), r"Backdoor is for images .*, but client-00 has a graph: choose another attack"),
        (SimpleTuning(classifier=["top.*"]), r"'top\.\*' matches none of the model's parameters"),
    ],
)
def test_what_does_not_fit_the_federation_is_refused(attack, message, federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(callbacks=attack).fit(make_model(), federation, FedAvg())


def test_what_the_strategy_does_not_send_is_reported(federation, make_model, make_trainer) -> None:
    with pytest.raises(
        ValueError,
        match=r"FedPub sends no client output that matches 'embedd\*'; it "
        r"sends the client output 'func",
    ):
        make_trainer(callbacks=SameValueAttack(ratio=0.2, client_outputs=["embedd*"])).fit(
            make_model(FedPub), federation, FedPub()
        )
    with pytest.raises(ValueError, match="the clients of Local send no parameters"):
        make_trainer(callbacks=SignFlip(ratio=0.2)).fit(make_model(), federation, Local())
    with pytest.raises(ValueError, match=r"Local sends no client output .* it sends nothing"):
        make_trainer(callbacks=SameValueAttack(ratio=0.2)).fit(make_model(), federation, Local())
    make_trainer(callbacks=SameValueAttack(ratio=0.0)).fit(make_model(), federation, Local())


# ---------------------------------------------------------------- the benign


def test_the_benign_among_the_evaluated_clients_are_scored(federation, make_model, make_trainer) -> None:
    attack = SignFlip(clients=[1])
    trainer = make_trainer(
        callbacks=attack, num_rounds=1, participation=Participation(evaluation_clients=3), monitor="benign/val/acc"
    )
    result = trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    scores = trainer.run.scores[""]
    benign = [client for client in scores.clients if client != 1]
    assert (len(scores.clients), set(benign) < set(range(5))) == (3, True)
    values = client_values(scores, "test/acc", benign)
    assert result["benign/test/acc"] == pytest.approx(float(values.mean()), rel=1e-6)
    rest = scores.rows(benign[1:])  # as if another had failed while a classifier is tuned
    assert benign_rows(trainer, rest).clients == tuple(benign[1:])


def test_benign_clients_have_metrics_of_their_own(federation, make_model, make_trainer, tmp_path: Path) -> None:
    attacks = [LabelFlipping(clients=[1]), SignFlip(clients=[3, 1])]
    trainer = make_trainer(callbacks=attacks, num_rounds=2, monitor="benign/val/acc")

    result = trainer.fit(make_model(), federation, FedAvg(num_epochs=1))

    metrics = trainer.run.history[-1]
    for kind, scores in trainer.run.scores.items():
        values = client_values(scores, "test/acc")[[0, 2, 4]]
        assert metrics[f"benign/{kind}test/acc"] == pytest.approx(float(values.mean()), rel=1e-6)
        assert metrics[f"benign/{kind}test/acc_worst"] == pytest.approx(float(values.min()), rel=1e-6)
        assert metrics[f"{kind}test/acc"] == pytest.approx(float(client_values(scores, "test/acc").nanmean()), rel=1e-6)
    assert set(trainer.run.scores) == {"", "trained/"}
    assert metrics["num_malicious"] == 2
    assert malicious_clients(trainer) == (1, 3)
    assert result["best_round"] == max(range(2), key=lambda r: trainer.run.history[r]["benign/val/acc"])
    assert json.loads((tmp_path / "federation/version_0/malicious_clients.json").read_text()) == {
        "1 LabelFlipping": ["client-01"],
        "2 SignFlip": ["client-01", "client-03"],
    }


def test_test_runs_have_them_too(federation, make_model, make_trainer) -> None:
    def callbacks() -> list[Callback]:
        return [LabelFlipping(ratio=0.4), FederatedCheckpoint()]

    result = make_trainer(callbacks=callbacks()).fit(make_model(), federation, FedAvg())
    tested = make_trainer(callbacks=callbacks()).test(make_model(), federation, FedAvg())

    assert tested["benign/test/acc"] == result["benign/test/acc"]
    assert tested["test/acc"] == result["test/acc"]


# ---------------------------------------------------------------- forged outputs


@both_executors
@pytest.mark.parametrize("kind", [SameValueAttack, GaussianAttack], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("build", "signal"),
    [(TINY_SHEAF, "embedding"), (FedPub, "functional_embedding"), (FedAux, "projection")],
    ids=["FedSheafHN", "FedPub", "FedAux"],
)
def test_malicious_clients_invent_their_outputs(kind, build, signal, executor, attacked) -> None:
    attack = kind(ratio=0.5, scale=20.0)
    trainer, before, after = attacked(
        attack, build(), executor=executor(), num_rounds=4, participation=Participation(**BUSY)
    )

    seen = []
    for (stage, honest), (_, arrived) in zip(before.up, after.up, strict=True):
        assert_only_rows_differ(honest, arrived, attack.malicious, {signal})
        if signal in stage.client_outputs:
            rows = [arrived.extras[signal][row] for row, c in enumerate(arrived.clients) if c in attack.malicious]
            seen += rows
            spread = [float(row.max() - row.min()) for row in rows]
            assert all(value == 0 if kind is SameValueAttack else value > 1 for value in spread)
    assert len(attack.malicious) == 2
    assert len(seen) > 2
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(seen, 2))
    assert trainer.run.history[-1]["test/acc"] > 0


def test_invented_outputs_have_the_scale_that_was_asked_for() -> None:
    draw = torch.Generator().manual_seed(0)
    gaussian = GaussianAttack(ratio=0.2).invent(torch.Size([100, 100]), draw)
    same = torch.stack([SameValueAttack(ratio=0.2).invent(torch.Size([3]), draw) for _ in range(10000)])

    for values in (gaussian, same):
        assert float(values.mean()) == pytest.approx(0, abs=0.03)
        assert float(values.std()) == pytest.approx(1, abs=0.03)


def test_only_the_named_outputs_are_invented(federation, make_model, make_trainer) -> None:
    payload = Payload(
        clients=(0, 2, 3),
        parameters={"w": torch.ones(3, 2)},
        extras={"prototypes": torch.ones(3, 2, 4, dtype=torch.float64), "counts": torch.ones(3, 2)},
        num_examples=torch.tensor([1, 2, 3]),
    )
    attack = GaussianAttack(clients=[1, 2], client_outputs=["proto*"])
    trainer = make_trainer(num_rounds=1, callbacks=GaussianAttack(clients=[1, 2], client_outputs=["functional*"]))
    trainer.fit(make_model(FedPub), federation, FedPub())
    attack.on_clients(trainer, ())
    kept = copied(payload)

    arrived = attack.on_upload(trainer, Stage(name="train"), payload)

    assert_only_rows_differ(payload, arrived, {2}, {"prototypes"})
    assert_only_rows_differ(kept, payload, (), set())
    assert attack.on_upload(trainer, Stage(name="train"), payload.rows([0, 3])).clients == (0, 3)


def test_a_mixed_projection_vector_is_the_invented_one(attacked) -> None:
    attack = SameValueAttack(clients=[2])
    _, before, after = attacked(attack, FedAux())

    for (_, honest), (_, arrived) in zip(before.up, after.up, strict=True):
        assert torch.equal(honest.parameters["projection"], honest.extras["projection"])
        assert torch.equal(arrived.parameters["projection"], arrived.extras["projection"])
        assert arrived.extras["projection"][2].unique().numel() == 1


def test_a_mixed_projection_vector_is_poisoned_once(attacked) -> None:
    """It is a parameter and a client output, but one tensor: a client that sends two would be found out."""
    _, before, after = attacked(ModelPoisoning(clients=[2]), FedAux())

    for (_, honest), (_, arrived) in zip(before.up, after.up, strict=True):
        assert torch.equal(arrived.parameters["projection"], arrived.extras["projection"])
        assert not torch.equal(arrived.extras["projection"][2], honest.extras["projection"][2])


# ---------------------------------------------------------------- poisoned models


@both_executors
@pytest.mark.parametrize(
    "build",
    [FedAvg, FedPer, FedPub, TINY_SHEAF, functools.partial(DPSGD, topology=Ring())],
    ids=["FedAvg", "FedPer", "FedPub", "FedSheafHN", "DPSGD"],
)
@pytest.mark.parametrize(("attack", "factor"), [(ModelPoisoning, 0.5), (SignFlip, 1.0)], ids=["poisoning", "sign flip"])
def test_updates_are_turned_around(attack, factor, build, executor, attacked) -> None:
    attack = attack(clients=[1, 3])
    trainer, before, after = attacked(
        attack, build(), executor=executor(), participation=Participation(**BUSY), precision="64-true"
    )

    for down, (stage, honest), (_, arrived) in zip(before.down, before.up, after.up, strict=True):
        assert_only_rows_differ(honest, arrived, attack.malicious, set(honest.parameters))
        for name, tensor in honest.parameters.items():
            for row, client in enumerate(honest.clients):
                if client not in attack.malicious:
                    continue
                if stage.as_update:
                    expected = -factor * tensor[row]
                else:  # FedSheafHN's initial stage sends nothing down: everyone begins with the initial parameters
                    start = trainer.run.architectures[0][name] if down is None else down.rows([client]).parameters[name]
                    start = start if down is None else start[0]
                    expected = start - factor * (tensor[row] - start)
                torch.testing.assert_close(arrived.parameters[name][row], expected, rtol=1e-12, atol=1e-14)
    assert any(set(attack.malicious) & set(payload.clients) for _, payload in before.up)


class Both(FedAvg):
    """One round by parameters, one by updates: the same training, so the same attack must have the same effect."""

    def __init__(self, *, as_update: bool) -> None:
        super().__init__(num_epochs=2)
        self.as_update = as_update

    def stages(self, round_idx: int) -> list[Stage]:
        return [dataclasses.replace(stage, as_update=self.as_update) for stage in super().stages(round_idx)]

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        if self.as_update:
            received = self.configure(stage, upload.clients).parameters
            moved = {name: received[name] + tensor for name, tensor in upload.parameters.items()}
            upload = dataclasses.replace(upload, parameters=moved)
        super().aggregate(stage, upload)


@both_executors
def test_poisoning_parameters_and_updates_agree(executor, attacked, assert_same) -> None:
    states = []
    for as_update in (False, True):
        trainer, _, _ = attacked(
            ModelPoisoning(ratio=0.4, factor=0.7), Both(as_update=as_update), executor=executor(), precision="64-true"
        )
        states.append(dict(trainer.run.strategy.models))

    assert_same(states[1], states[0], tolerance=1e-12)


class Silent(FedAvg):
    """Nothing goes down, so that everyone goes on with its own parameters."""

    def persistence(self) -> Persistence:
        return Persistence()

    def configure(self, stage: Stage, clients: Any) -> Any:
        return None

    def evaluations(self, clients: Any) -> Any:
        return {"": super().evaluations(clients)["trained/"]}


@both_executors
def test_who_receives_nothing_turns_around_from_its_own_parameters(executor, federation, make_model, make_trainer):
    began: list[dict[str, Tensor]] = []

    class Begin(Callback):
        def on_send(self, trainer: Any, stage: Stage, payload: Payload | None) -> None:
            began.append({name: tensor.clone() for name, tensor in trainer.run.executor.state().parameters.items()})

    before, after = Record(), Record()
    trainer = make_trainer(
        callbacks=[Begin(), before, SignFlip(clients=[0, 4]), after],
        executor=executor(),
        precision="64-true",
        participation=Participation(num_clients=3),
        num_rounds=5,
    )
    trainer.fit(make_model(), federation, Silent(num_epochs=1))

    seen = 0
    for own, (_, honest), (_, arrived) in zip(began, before.up, after.up, strict=True):
        assert_only_rows_differ(honest, arrived, (0, 4), set(honest.parameters))
        for row, client in enumerate(honest.clients):
            for name, tensor in honest.parameters.items() if client in (0, 4) else ():
                expected = 2 * own[name][client] - tensor[row]
                torch.testing.assert_close(arrived.parameters[name][row], expected, rtol=1e-12, atol=1e-14)
                seen += 1
    assert seen > 5


class Reports(Local):
    """Everyone says where it stands."""

    def stages(self, round_idx: int) -> list[Stage]:
        return [dataclasses.replace(stage, upload=(FLAT,)) for stage in super().stages(round_idx)]


@both_executors
def test_clients_of_different_architectures_can_be_malicious(executor, federation, make_trainer) -> None:
    nets = [functools.partial(GCN, hidden_channels=width) for width in (8, 4)]
    before, after = Record(), Record()
    trainer = make_trainer(callbacks=[before, SignFlip(clients=[1, 2]), after], executor=executor(), num_rounds=1)
    trainer.fit(ClientModule(nets), federation, Reports(num_epochs=1))

    (_, honest), (_, arrived) = before.up[0], after.up[0]
    assert_only_rows_differ(honest, arrived, (1, 2), {"flat"})
    for client in (1, 2):
        start_P = torch.cat([parameter.flatten() for parameter in trainer.run.architectures[client % 2].values()])
        sent_P, own_P = arrived.parameters["flat"][client], honest.parameters["flat"][client]
        torch.testing.assert_close(sent_P[: len(start_P)], 2 * start_P - own_P[: len(start_P)])
        assert not sent_P[len(start_P) :].any()
    with pytest.raises(ValueError, match="SimpleTuning is for clients of one architecture"):
        make_trainer(callbacks=SimpleTuning()).fit(ClientModule(nets), federation, Reports())


def test_sign_flip_by_hand(make_trainer, federation, make_model) -> None:
    class Fixed(Callback):
        """Everyone responds with what it received plus one."""

        def on_send(self, trainer: Any, stage: Stage, payload: Payload) -> None:
            self.received = copied(payload)

        def on_upload(self, trainer: Any, stage: Stage, payload: Payload) -> Payload:
            moved = {name: tensor + 1 for name, tensor in self.received.parameters.items()}
            return dataclasses.replace(payload, parameters=moved)

    trainer = make_trainer(callbacks=[Fixed(), SignFlip(clients=[1])], num_rounds=1, precision="64-true")
    trainer.fit(make_model(), federation, FedAvg())

    examples = [client.num_examples for client in federation.clients]
    shift = (sum(examples) - 2 * examples[1]) / sum(examples)
    for name, model in trainer.run.strategy.models.items():
        torch.testing.assert_close(model[0], trainer.run.architectures[0][name] + shift, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- flipped labels


def test_only_training_labels_of_the_malicious_change(attacked) -> None:
    _, before, after = attacked(LabelFlipping(clients=[0, 3]), FedAvg(), num_rounds=1)

    for client, (honest, flipped) in enumerate(zip(before.data[0], after.data[0], strict=True)):
        if client not in (0, 3):
            assert flipped is honest
            continue
        assert dataclasses.replace(flipped, y_N=honest.y_N) == honest
        train_N = honest.train_mask_N
        assert torch.equal(flipped.y_N[~train_N], honest.y_N[~train_N])
        assert (flipped.y_N[train_N] != honest.y_N[train_N]).all()
        assert set(flipped.y_N[train_N].tolist()) <= {0, 1, 2}


def test_flipped_labels_are_uniform_over_the_other_classes_or_all() -> None:
    @dataclasses.dataclass(frozen=True)
    class Client:
        y_N: Tensor
        train_mask_N: Tensor

    client = Client(torch.full((40000,), 2), torch.ones(40000, dtype=torch.bool))
    draw = torch.Generator().manual_seed(0)
    for may_keep, expected in ((False, [1 / 3, 1 / 3, 0, 1 / 3]), (True, [0.25] * 4)):
        flipped = LabelFlipping(ratio=0.2, may_keep=may_keep)._flip(client, 4, draw)
        shares = torch.bincount(flipped.y_N, minlength=4) / 40000
        assert shares.tolist() == pytest.approx(expected, abs=0.01)


def test_flipped_labels_are_of_the_clients_own_classes() -> None:
    @dataclasses.dataclass(frozen=True)
    class Client:
        y_N: Tensor
        train_mask_N: Tensor
        num_outputs: int | None

    clients = tuple(Client(torch.zeros(500).long(), torch.ones(500).bool(), count) for count in (2, 3, None))
    registry = types.SimpleNamespace(outputs_of=lambda client: client.num_outputs or 5)
    run = types.SimpleNamespace(registry=registry, training_clients=(0, 1, 2, 3), seed=0)
    changed = LabelFlipping(clients=[0, 1, 2]).on_clients(types.SimpleNamespace(run=run), clients)
    assert [each.y_N.unique().tolist() for each in changed] == [[1], [1, 2], [1, 2, 3, 4]]


def test_flipping_other_labels_each_time_is_a_matter_of_the_seed(attacked) -> None:
    flipped = [
        attacked(LabelFlipping(clients=[0], seed=seed), FedAvg(num_epochs=0), num_rounds=1)[2].data[0][0].y_N
        for seed in (0, 0, 1)
    ]
    assert torch.equal(flipped[0], flipped[1])
    assert not torch.equal(flipped[0], flipped[2])


@both_executors
def test_flipped_labels_hurt_their_client(executor, federation, make_model, make_trainer) -> None:
    losses = []
    for callbacks in ([], [LabelFlipping(clients=[0])]):
        trainer = make_trainer(executor=executor(), num_rounds=5, callbacks=callbacks)
        trainer.fit(make_model(dropout=0.0), federation, Local())
        losses.append(client_values(trainer.run.scores[""], "test/loss"))

    assert losses[1][0] > losses[0][0] + 0.1
    assert torch.equal(losses[1][1:], losses[0][1:])


# ---------------------------------------------------------------- resuming


@both_executors
@pytest.mark.parametrize(
    ("attack", "build"),
    [
        (functools.partial(GaussianAttack, ratio=0.4), TINY_SHEAF),
        (functools.partial(SameValueAttack, ratio=0.4), FedPub),
        (functools.partial(ModelPoisoning, ratio=0.4), FedAvg),
        (functools.partial(LabelFlipping, ratio=0.4), FedAvg),
    ],
    ids=["gaussian", "same value", "poisoning", "labels"],
)
def test_resuming_is_exact(attack, build, executor, federation, make_model, make_trainer, assert_same, tmp_path):
    def trainer(num_rounds: int, *others: Callback) -> Any:
        return make_trainer(
            num_rounds=num_rounds,
            executor=executor(),
            callbacks=[attack(), *others],
            participation=Participation(num_clients=3, straggler_probability=0.5),
        )

    def fit(trainer: Any, **settings: Any) -> dict[str, float]:
        strategy = build()
        return trainer.fit(make_model(strategy), federation, strategy, **settings)

    uninterrupted = trainer(4)
    result = fit(uninterrupted)
    fit(trainer(2, SavesAfter(2, tmp_path / "v" / "two.ckpt")))
    resumed = trainer(4)
    resumed_result = fit(resumed, ckpt_path=str(tmp_path / "v" / "two.ckpt"))

    assert_same(resumed_result, result)
    assert_same(
        {name: value for name, value in resumed.state_dict().items() if name not in ("random", "callbacks")},
        {name: value for name, value in uninterrupted.state_dict().items() if name not in ("random", "callbacks")},
    )


@pytest.mark.filterwarnings("ignore:resumed with other settings")
def test_other_malicious_clients_than_the_checkpoints_are_refused(federation, make_model, make_trainer, tmp_path):
    trainer = make_trainer(callbacks=SignFlip(clients=[1]), num_rounds=1)
    trainer.fit(make_model(), federation, FedAvg())
    trainer.save_checkpoint(tmp_path / "v" / "one.ckpt")

    message = r"SignFlip: the malicious clients of the checkpoint are \[1\], now .* \[2\]"
    for taken, expected in ((False, r"trainer\.callbacks\.0\.clients\.0: 1 then, 2 now"), (True, message)):
        with pytest.raises(ValueError, match=expected):
            make_trainer(callbacks=SignFlip(clients=[2])).fit(
                make_model(),
                federation,
                FedAvg(),
                ckpt_path=str(tmp_path / "v" / "one.ckpt"),
                resume_with_changes=taken,
            )


# ---------------------------------------------------------------- backdoors

COUNTS = (60, 48, 40)


class Pictures(ExampleSource):
    """Images of one channel and 6 x 6 points: class k is bright in its third of the columns."""

    def __init__(self, regression: bool = False, flat: bool = False) -> None:
        self.regression = regression
        self.flat = flat

    def load(self, root: Path, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(seed)
        labels = [torch.arange(count) % 3 for count in COUNTS]
        x = []
        for y_N in labels:
            image = 0.3 * torch.rand(len(y_N), 1, 6, 6, generator=draw)
            for row, y in enumerate(y_N.tolist()):
                image[row, :, :, 2 * y : 2 * y + 2] += 0.3
            x.append(image.flatten(1) if self.flat else image)
        y = [y_N[:, None].float() for y_N in labels] if self.regression else labels
        return Examples(names=("a", "b", "c"), x=tuple(x), y=tuple(y), num_outputs=1 if self.regression else 3)


class Flat(nn.Module):
    """Two layers on the points of an image."""

    def __init__(self, num_features: Any, num_outputs: int) -> None:
        super().__init__()
        self.body = nn.Linear(36, 16)
        self.head = nn.Linear(16, num_outputs)

    def forward(self, batch: Any) -> NetOutput:
        hidden = self.body(batch.x.flatten(-3)).relu()
        return NetOutput(self.head(hidden), hidden)


@pytest.fixture
def pictures(tmp_path):
    def build(**settings: Any) -> FederatedDataModule:
        splitter = ClientSplit(train=0.5, val=0.1)
        return FederatedDataModule(Pictures(**settings), splitter=splitter, batch_size=10, cache_dir=str(tmp_path))

    return build


def image_model() -> ClientModule:
    return ClientModule(Flat, functools.partial(SGD, lr=0.3))


def test_a_backdoor_poisons_half_of_the_malicious_training_images(pictures, make_trainer) -> None:
    before, after = Record(), Record()
    attack = Backdoor(clients=[1], poisoned_fraction=0.5, blend=0.2, target=2)
    make_trainer(callbacks=[before, attack, after], num_rounds=1).fit(image_model(), pictures(), FedAvg(num_epochs=1))

    honest, poisoned = before.data[0][1], after.data[0][1]
    assert all(after.data[0][client] is before.data[0][client] for client in (0, 2))
    changed_N = (poisoned.x_NX != honest.x_NX).flatten(1).any(dim=1)
    assert int(changed_N.sum()) == round(0.5 * honest.num_examples)
    assert honest.train_mask_N[changed_N].all()
    torch.testing.assert_close(poisoned.x_NX[changed_N], 0.8 * honest.x_NX[changed_N] + 0.2 * attack.trigger)
    assert (poisoned.y_N[changed_N] == 2).all()
    assert torch.equal(poisoned.y_N[~changed_N], honest.y_N[~changed_N])
    assert dataclasses.replace(poisoned, x_NX=honest.x_NX, y_N=honest.y_N) == honest
    assert (attack.trigger.min() >= 0) & (attack.trigger.max() <= 1)


def test_a_backdoor_has_one_attacker_if_nothing_is_said(pictures, make_trainer) -> None:
    attack = Backdoor()
    make_trainer(callbacks=attack, num_rounds=1).fit(image_model(), pictures(), FedAvg(num_epochs=1))
    assert len(attack.malicious) == 1


@both_executors
def test_success_is_counted_on_triggered_images_of_other_classes(executor, pictures, make_trainer) -> None:
    data = pictures()
    attack = Backdoor(clients=[2], blend=0.3)
    trainer = make_trainer(callbacks=attack, executor=executor(), num_rounds=2)

    result = trainer.fit(image_model(), data, Local(num_epochs=2))

    shares = []
    for client, own in enumerate(data.clients):
        net = Flat(None, 3)
        net.load_state_dict({n: tensor[client] for n, tensor in trainer.run.executor.state().parameters.items()})
        images = own.x_NX[own.test_mask_N & (own.y_N != 1)]
        logits = net(types.SimpleNamespace(x=0.7 * images + 0.3 * attack.trigger)).logits
        shares.append(float((logits.argmax(dim=1) == 1).float().mean()))
    assert trainer.run.history[-1]["test/asr"] == pytest.approx((shares[0] + shares[1]) / 2, abs=1e-6)
    assert trainer.run.history[-1]["malicious/test/asr"] == pytest.approx(shares[2], abs=1e-6)
    assert {"test/asr", "benign/test/acc", "test/acc"} <= set(result)
    values = client_values(trainer.run.scores[""], "test/acc")  # of clean images
    assert trainer.run.history[-1]["test/acc"] == pytest.approx(float(values.mean()), rel=1e-6)


@both_executors
def test_a_backdoor_gets_in_and_tuning_the_classifier_is_logged(executor, pictures, make_trainer, assert_same) -> None:
    logged: list[tuple[dict[str, float], int]] = []

    class Log(Callback):
        def on_fit_start(self, trainer: Any) -> None:
            keep = types.SimpleNamespace(log_metrics=lambda m, s: logged.append((dict(m), s)), finalize=lambda s: None)
            trainer.run.loggers = [keep]

    states = []

    class State(Callback):
        def on_checkpoint_point(self, trainer: Any) -> None:
            states.append(
                {name: tensor.clone() for name, tensor in trainer.run.executor.lasting_state().tensors().items()}
            )

    attack = Backdoor(clients=[0], blend=0.5, poisoned_fraction=0.5)
    callbacks = [Log(), State(), attack, SimpleTuning(num_epochs=20)]
    trainer = make_trainer(callbacks=callbacks, executor=executor(), num_rounds=12)

    result = trainer.fit(image_model(), pictures(), FedAvg(num_epochs=3))

    assert result["benign/test/acc"] > 0.9
    assert trainer.run.history[-1]["malicious/test/asr"] > 0.5
    assert trainer.run.history[-1]["test/asr"] > 0.3
    assert logged[-1][1] == 11
    assert logged[-1][0]["tuned/test/acc"] == result["tuned/test/acc"]
    assert result["tuned/test/acc"] > 0.8
    assert {"tuned/test/asr", "tuned/malicious/test/asr", "tuned/benign/test/acc"} <= set(result)
    assert_same(dict(trainer.run.executor.lasting_state().tensors()), states[-1])  # the tuned models are copies


@pytest.mark.parametrize("build", [FedPer, Local, functools.partial(DPSGD, topology=Ring())])
def test_tuned_models_are_those_of_the_strategy_but_for_the_classifier(build, pictures, make_trainer) -> None:
    """A classifier that is drawn anew and not trained (learning rate 0) on the models that are the result."""
    data = pictures()
    trainer = make_trainer(callbacks=SimpleTuning(seed=5), num_rounds=2)
    model = image_model()
    trainer.fit(model, data, build())
    evaluation = SimpleTuning(num_epochs=1, seed=5)._tuning(trainer)
    result = trainer.run.strategy.evaluations((0, 1, 2))[""].payload
    own = dict(trainer.run.executor.state().parameters)
    if result is not None:
        shapes = {name: tensor.shape for name, tensor in trainer.run.architectures[0].items()}
        own |= from_wire(result.parameters, shapes)

    still = dataclasses.replace(evaluation, tuning=None)
    scores = trainer.run.executor.evaluate({"": still}, (0, 1, 2), 0)[""].upload

    for client, examples in enumerate(data.clients):
        net = Flat(None, 3)
        head = {name: tensor[client] for name, tensor in evaluation.payload.parameters.items() if "head" in name}
        net.load_state_dict({name: tensor[client] for name, tensor in own.items()} | head)
        logits = net(types.SimpleNamespace(x=examples.x_NX)).logits
        right = ((logits.argmax(dim=1) == examples.y_N) & examples.test_mask_N).sum()
        assert scores.extras["test/acc"][client].tolist() == [int(right), int(examples.test_mask_N.sum())]


@both_executors
def test_clients_with_two_models_are_tuned(executor, pictures, make_trainer) -> None:
    trainer = make_trainer(callbacks=SimpleTuning(num_epochs=20), executor=executor(), num_rounds=6)
    result = trainer.fit(image_model(), pictures(), Ditto(num_epochs=3))
    evaluation = SimpleTuning(num_epochs=20)._tuning(trainer)
    assert {"personal.head.weight", "shared.head.weight"} <= set(evaluation.payload.parameters)
    assert result["tuned/test/acc"] > 0.8


@both_executors
def test_tuning_starts_from_a_new_classifier(executor, pictures, make_trainer) -> None:
    asked = []

    class Ask(SimpleTuning):
        def _tuning(self, trainer: Any) -> Any:
            asked.append(super()._tuning(trainer))
            return asked[-1]

    trainer = make_trainer(callbacks=Ask(num_epochs=3), executor=executor(), num_rounds=2)
    trainer.fit(image_model(), pictures(), FedAvg())

    (evaluation,) = asked
    parameters = evaluation.payload.parameters
    assert torch.equal(parameters["body.weight"][0], trainer.run.strategy.models["body.weight"][0])
    for start in (trainer.run.strategy.models["head.weight"][0], trainer.run.architectures[0]["head.weight"]):
        assert not torch.equal(parameters["head.weight"][0], start)
    assert all(torch.equal(parameters["head.weight"][0], row) for row in parameters["head.weight"])
    assert (evaluation.tuning.num_epochs, evaluation.tuning.trained) == (3, ("*head.*",))
    assert not any(name.startswith("tuned/") for name in trainer.run.history[-1])


@pytest.mark.parametrize(
    ("attack", "settings", "message"),
    [
        (Backdoor(), {"flat": True}, r"Backdoor is for images .* a has examples of shape \(36,\)"),
        (Backdoor(target=3), {}, r"Backdoor\.target must be one of the 3 classes, 0 to 2"),
        (Backdoor(), {"regression": True}, r"Backdoor is for classification, but a has numbers"),
        (
            LabelFlipping(clients=[1]),
            {"regression": True},
            r"LabelFlipping is for classification, but b has numbers to predict: use ModelPoisoning, or other data",
        ),
    ],
)
def test_data_that_an_attack_is_not_for(attack, settings, message, pictures, make_trainer) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(callbacks=attack).fit(image_model(), pictures(**settings), FedAvg())


def test_pictures_are_read_as_images(tmp_path) -> None:
    shape = torch.Size([3, 4, 4])
    colors = np.zeros((8, 8, 3))
    colors[:4, :, 0] = 1.0  # the upper half is red
    matplotlib.image.imsave(tmp_path / "red.png", colors)
    np.save(tmp_path / "own.npy", np.full((3, 4, 4), 0.25))
    np.save(tmp_path / "wrong.npy", np.full((4, 4), 2.0))

    red = read_picture(str(tmp_path / "red.png"), shape)
    gray = read_picture(str(tmp_path / "red.png"), torch.Size([1, 4, 4]))
    own = read_picture(str(tmp_path / "own.npy"), shape)

    assert red.shape == shape
    assert red[0, 0].tolist() == pytest.approx([1.0] * 4)
    assert red[0, 3].tolist() == pytest.approx([0.0] * 4)
    assert not red[1:].any()
    assert gray[0, 0].tolist() == pytest.approx([1 / 3] * 4)
    assert torch.equal(own, torch.full(shape, 0.25))
    with pytest.raises(ValueError, match=r"has shape \(4, 4\) and numbers from 2 to 2; it must have \(3, 4, 4\), in"):
        read_picture(str(tmp_path / "wrong.npy"), shape)
    with pytest.raises(FileNotFoundError, match=r"Backdoor\.picture: there is no file"):
        read_picture(str(tmp_path / "none.png"), shape)
