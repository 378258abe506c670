import dataclasses
import os
import signal
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from both_executors import both_executors
from lightning import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch_geometric.data import Data

from fl_lightning import (
    Callback,
    ClientModule,
    FederatedDataModule,
    FederatedTrainer,
    Participation,
    Payload,
    SequentialExecutor,
    StackedExecutor,
    Stage,
)
from fl_lightning.callbacks import EarlyStopping, FederatedCheckpoint, RunReport
from fl_lightning.data import GivenPartitioner, GivenSplit, GlobalSplit, PlantedCommunities
from fl_lightning.report.folder import read
from fl_lightning.round.inspection import ServerDiverged
from fl_lightning.round.payload import concatenate
from fl_lightning.run.callback import Hooks, WrongSetting, check_hooks
from fl_lightning.run.failures import ClientFailure
from fl_lightning.strategies import DPSGD, FedAvg, FedSheafHN, Local, PFedHN
from fl_lightning.strategies.client_outputs import graph_embedding

LEFT_OUT = "client-02 failed in stage 'train' round {}: {}; it is left out"


def own_states(trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.run.executor.state().tensors().items()}


class Watch(Callback):
    """Keeps what was sent, what reached the server, the metrics and the clients' states of each round."""

    def __init__(self) -> None:
        self.arrived: list[tuple[int, ...]] = []
        self.failures: list[dict[str, str]] = []
        self.dropouts: list[int] = []
        self.states: list[dict[str, torch.Tensor]] = []
        self.sent: list[dict[str, torch.Tensor]] = []

    def on_send(self, trainer, stage, payload) -> None:
        self.sent.append({} if payload is None else {name: t.clone() for name, t in payload.parameters.items()})

    def on_stage_end(self, trainer, stage, payload) -> None:
        self.arrived.append(payload.clients)

    def on_round_end(self, trainer, metrics) -> None:
        self.failures.append(dict(trainer.run.failures))
        self.dropouts.append(len(trainer.run.dropouts))
        self.states.append(own_states(trainer))


# ---------------------------------------------------------------- failing clients


class Refuses(ClientModule):
    """Raises for the client with 18 nodes (client-02), in the second round only."""

    rounds_seen = 0

    def loss(self, output, batch):
        if len(batch.y) == 18 and self.training:
            self.rounds_seen += 1
            if self.rounds_seen == 2:
                with torch.no_grad():
                    next(self.parameters()).fill_(99.0)
                raise RuntimeError("the disk is full")
        return super().loss(output, batch)


def test_a_client_that_raises_is_restored_and_left_out_of_the_round(federation, make_model, make_trainer) -> None:
    watch = Watch()
    trainer = make_trainer(executor=SequentialExecutor(), callbacks=watch)

    with pytest.warns(UserWarning, match=LEFT_OUT.format(1, r"RuntimeError: the disk is full \(.*, in loss\)")):
        trainer.fit(make_model(Refuses), federation, FedAvg(num_epochs=1))

    assert watch.arrived == [(0, 1, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)]
    assert [set(each) for each in watch.failures] == [set(), {"client-02"}, set()]
    assert watch.failures[1]["client-02"].startswith(f"RuntimeError: the disk is full ({__file__}:")
    assert [row["num_failures"] for row in trainer.run.history] == [0, 1, 0]
    first, second, third = watch.states
    for name, tensor in first.items():
        if not name.startswith("optimizer"):
            assert torch.equal(second[name][2], watch.sent[1][name][2])  # as it began the round
            assert not torch.equal(second[name][1], tensor[1])
            assert not torch.equal(third[name][2], tensor[2])
    assert second["optimizer/step/head.bias"].tolist() == [2, 2, 0, 2, 2]  # and a fresh optimizer


@both_executors
def test_a_client_that_diverges_is_restored_and_left_out(executor, graphs, given_clients, make_model, make_trainer):
    broken = vars(graphs[2]) | {"x_NF": torch.full_like(graphs[2].x_NF, torch.inf)}
    poisoned = [*graphs[:2], type(graphs[2])(**broken), *graphs[3:]]
    watch = Watch()
    trainer = make_trainer(executor=executor(), callbacks=watch, num_rounds=2, evaluate_every=2)

    with pytest.warns(
        UserWarning, match="client-02 failed in stage 'train' round [01]: .*not finite.*; it is left out"
    ):
        trainer.fit(make_model(), given_clients(poisoned), FedAvg())

    assert watch.arrived == [(0, 1, 3, 4)] * 2
    assert all(set(failures) == {"client-02"} for failures in watch.failures)
    for name, received in watch.sent[-1].items():
        assert torch.equal(watch.states[-1][name][2], received[2])
        assert all(tensor.isfinite().all() for tensor in watch.states[-1].values())


@both_executors
def test_the_others_do_not_notice_a_client_that_diverges(
    executor, graphs, given_clients, make_model, make_trainer, assert_same
) -> None:
    states = []
    for scale in (1.0, torch.inf):
        changed = vars(graphs[2]) | {"x_NF": graphs[2].x_NF * scale}
        clients = [*graphs[:2], type(graphs[2])(**changed), *graphs[3:]]
        trainer = make_trainer(executor=executor(), num_rounds=2, evaluate_every=2)
        if scale > 1:
            with pytest.warns(UserWarning, match="client-02 failed"):
                trainer.fit(make_model(), given_clients(clients), Local())
        else:
            trainer.fit(make_model(), given_clients(clients), Local())
        others = [0, 1, 3, 4]
        states.append({name: tensor[others] for name, tensor in own_states(trainer).items()})

    assert_same(states[1], states[0])


class Spoils(Callback):
    """Changes the upload of the second round."""

    def __init__(self, change) -> None:
        self.change = change

    def on_upload(self, trainer, stage: Stage, payload: Payload) -> Payload:
        return self.change(payload) if trainer.run.round_idx == 1 and stage.name == "train" else payload


def with_nan(payload: Payload) -> Payload:
    parameters = {name: tensor.clone() for name, tensor in payload.parameters.items()}
    parameters["convs.1.bias"][payload.clients.index(2), 0] = torch.nan
    return Payload(clients=payload.clients, parameters=parameters, num_examples=payload.num_examples)


def without_one(payload: Payload) -> Payload:
    return payload.rows([client for client in payload.clients if client != 2])


@both_executors
@pytest.mark.parametrize(
    ("change", "why"),
    [(with_nan, "it sent numbers that are not finite"), (without_one, "its update was lost")],
    ids=["nan", "lost"],
)
def test_an_answer_spoiled_on_the_way_is_left_out(executor, change, why, federation, make_model, make_trainer) -> None:
    watch = Watch()
    trainer = make_trainer(executor=executor(), callbacks=[Spoils(change), watch])

    with pytest.warns(UserWarning, match=LEFT_OUT.format(1, why)):
        trainer.fit(make_model(), federation, FedAvg())

    assert watch.arrived == [(0, 1, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)]
    assert watch.failures == [{}, {"client-02": why}, {}]
    assert all(model.isfinite().all() for model in trainer.run.strategy.models.values())


def with_huge_numbers(payload: Payload) -> Payload:
    parameters = {name: tensor.clone() for name, tensor in payload.parameters.items()}
    parameters["convs.0.weight"][payload.clients.index(2)] = 1e30
    return Payload(clients=payload.clients, parameters=parameters, num_examples=payload.num_examples)


def test_huge_finite_numbers_of_one_client_do_not_reach_the_others(federation, make_model, make_trainer) -> None:
    watch = Watch()
    trainer = make_trainer(callbacks=[Spoils(with_huge_numbers), watch])
    with pytest.warns(UserWarning, match="client-02 failed in stage 'train' round 1: it sent numbers too large"):
        trainer.fit(make_model(), federation, FedAvg())
    assert watch.arrived == [(0, 1, 2, 3, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)]


class Sends(Callback):
    """Lets client-02 update a model that is far away, in every round."""

    def on_upload(self, trainer, stage: Stage, payload: Payload) -> Payload:
        tensors = {name: tensor.clone() for name, tensor in payload.parameters.items()}
        for tensor in tensors.values():
            tensor[payload.clients.index(2)] += 100.0
        return dataclasses.replace(payload, parameters=tensors)


@pytest.mark.parametrize("strategy", [FedAvg, PFedHN, DPSGD], ids=lambda kind: kind.__name__)
def test_a_bound_on_updates_holds_in_every_family(strategy, federation, make_model, make_trainer) -> None:
    watch = Watch()
    trainer = make_trainer(callbacks=[Sends(), watch], participation=Participation(max_update_norm=50.0), num_rounds=2)
    with pytest.warns(UserWarning, match=r"client-02 failed .*: its update is .* long, participation.max_update_norm"):
        trainer.fit(make_model(), federation, strategy())
    assert watch.arrived == [(0, 1, 3, 4)] * 2


@pytest.mark.parametrize("evaluate_every", [1, 3])
def test_a_server_that_diverges_is_neither_sent_nor_evaluated(
    evaluate_every, federation, make_model, make_trainer
) -> None:
    class Diverges(FedAvg):
        def update(self, name, before, mixed):
            return mixed * torch.inf if name == "head.bias" else mixed

    trainer = make_trainer(evaluate_every=evaluate_every)
    with pytest.raises(ServerDiverged, match=r"models of client-00, client-01, client-02, \.\.\. are not finite"):
        trainer.fit(make_model(), federation, Diverges())
    assert len(trainer.run.history) == (1 if evaluate_every > 1 else 0)


@pytest.mark.parametrize("change", [with_nan, without_one])
def test_stop_names_round_stage_and_client(change, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=Spoils(change), participation=Participation(on_failure="stop"))
    with pytest.raises(ClientFailure, match=r"client-02 failed in stage 'train' round 1: .*on_failure is 'stop'"):
        trainer.fit(make_model(), federation, FedAvg())


def mis_shaped(payload: Payload) -> Payload:
    parameters = {**payload.parameters, "convs.0.weight": payload.parameters["convs.0.weight"][..., :-1]}
    return Payload(clients=payload.clients, parameters=parameters, num_examples=payload.num_examples)


def incomplete(payload: Payload) -> Payload:
    kept = {name: tensor for name, tensor in payload.parameters.items() if name != "head.bias"}
    return Payload(clients=payload.clients, parameters=kept, num_examples=payload.num_examples)


def padded_out(payload: Payload) -> Payload:
    return Payload(
        clients=payload.clients,
        parameters=payload.parameters,
        extras={"labels": torch.zeros(len(payload.clients), 3)},
        num_examples=payload.num_examples,
    )


@pytest.mark.parametrize(
    ("change", "name"), [(mis_shaped, "convs.0.weight"), (incomplete, "head.bias"), (padded_out, "labels")]
)
def test_what_is_wrong_for_all_clients_is_an_error_that_names_the_tensor(
    change, name, federation, make_model, make_trainer
) -> None:
    with pytest.raises(ValueError, match=rf"stage 'train': the upload's \['{name}'\] are missing, unexpected or of a"):
        make_trainer(callbacks=Spoils(change)).fit(make_model(), federation, FedAvg())


class Embeds(FedAvg):
    """Asks for an embedding beside the parameters."""

    def client_outputs(self):
        return {"embedding": self.signal}


def odd_shape(client, parameters, batch, context):
    embedding = graph_embedding(client, parameters, batch, context)
    return embedding[:3] if len(batch.y) == 18 else embedding


def odd_value(client, parameters, batch, context):
    return graph_embedding(client, parameters, batch, context) / (batch.example_mask.sum() != 18)


@pytest.mark.parametrize(
    ("executor", "signal", "why"),
    [
        (
            SequentialExecutor,
            odd_shape,
            r"it sent \{'embedding': '\(3,\) float32'\}, most others sent \{'embedding': '\(8,\) float32'\}",
        ),
        (SequentialExecutor, odd_value, "its parameters or its update are not finite"),
        (StackedExecutor, odd_value, "its parameters or its update are not finite"),
    ],
)
def test_a_client_with_an_unusable_output_is_restored(
    executor, signal, why, federation, make_model, make_trainer
) -> None:
    strategy, watch = Embeds(), Watch()
    strategy.signal = signal
    trainer = make_trainer(executor=executor(), callbacks=watch, num_rounds=1)

    with pytest.warns(UserWarning, match=f"client-02 failed in stage 'train' round 0: .*{why}"):
        trainer.fit(make_model(), federation, strategy)

    assert watch.arrived == [(0, 1, 3, 4)]
    for name, start in trainer.run.architectures[0].items():
        assert torch.equal(watch.states[0][name][2], start)


class NeverStarts(ClientModule):
    """Client-02 fails whatever it is asked."""

    def loss(self, output, batch):
        if len(batch.y) == 18 and self.training:
            raise RuntimeError("out of order")
        return super().loss(output, batch)


def test_fedsheafhn_goes_on_without_a_client_that_never_updates(federation, make_model, make_trainer) -> None:
    watch = Watch()
    trainer = make_trainer(executor=SequentialExecutor(), callbacks=watch, num_rounds=2)
    strategy = FedSheafHN(num_epochs=1, init_epochs=1, num_neighbors=2, attention="matrix", refresh_every=1)

    with pytest.warns(
        UserWarning, match="client-02 failed in stage '(initial' before|train') round .* out of order"
    ) as warned:
        result = trainer.fit(make_model(NeverStarts), federation, strategy)

    assert str(warned[0].message).startswith("client-02 failed in stage 'initial' before round 0: RuntimeError")
    assert watch.arrived == [(0, 1, 3, 4)] * 3
    assert 0 < result["gen/train/loss"] < 10


def test_a_round_that_everybody_leaves_changes_nothing(federation, make_model, make_trainer) -> None:
    participation = Participation(num_clients=1, dropout_probability=0.5, max_failed_rounds=6)
    gone = [not participation.draw(range(5), round_idx, 0)[0] for round_idx in range(6)]
    assert 0 < sum(gone) < 6
    watch = Watch()
    trainer = make_trainer(participation=participation, callbacks=watch, num_rounds=6)

    trainer.fit(make_model(), federation, Local())

    for round_idx in range(1, 6):
        before, after = watch.states[round_idx - 1], watch.states[round_idx]
        assert gone[round_idx] == all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert [row["num_participants"] for row in trainer.run.history] == [int(not empty) for empty in gone]
    assert [row["failed_round"] for row in trainer.run.history] == [int(empty) for empty in gone]
    assert watch.dropouts == [int(empty) for empty in gone]
    assert [row["num_dropouts"] for row in trainer.run.history] == watch.dropouts
    assert [row["num_failures"] for row in trainer.run.history] == [0] * 6


# ---------------------------------------------------------------- the loop


class Order(Callback):
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def on_fit_start(self, trainer) -> None:
        self.calls.append(f"{self.name} fit start")

    def on_round_start(self, trainer) -> None:
        self.calls.append(f"{self.name} round {trainer.run.round_idx}")

    def on_send(self, trainer, stage, payload) -> None:
        self.calls.append(f"{self.name} send")

    def on_upload(self, trainer, stage, payload):
        self.calls.append(f"{self.name} upload")
        return payload

    def on_stage_end(self, trainer, stage, payload) -> None:
        self.calls.append(f"{self.name} stage end")

    def on_round_end(self, trainer, metrics) -> None:
        metrics["own"] = 17.0
        self.calls.append(f"{self.name} round end")

    def on_checkpoint_point(self, trainer) -> None:
        self.calls.append(f"{self.name} checkpoint {trainer.run.round_idx}")

    def on_fit_end(self, trainer) -> None:
        self.calls.append(f"{self.name} fit end")


def test_hooks_are_called_in_order(federation, make_model, make_trainer) -> None:
    calls: list[str] = []
    trainer = make_trainer(num_rounds=2, callbacks=[Order("a", calls), Order("b", calls)])

    trainer.fit(make_model(), federation, FedAvg())

    one_round = ["round {}", "send", "upload", "stage end", "round end", "checkpoint {}"]
    expected = ["fit start", *(h.format(0 + (i == 5)) for i, h in enumerate(one_round))]
    expected += [*(h.format(1 + (i == 5)) for i, h in enumerate(one_round)), "fit end"]
    assert calls == [f"{name} {hook}" for hook in expected for name in "ab"]
    assert all(row["own"] == 17.0 for row in trainer.run.history)


def test_rounds_between_evaluations(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=5, evaluate_every=2)
    result = trainer.fit(make_model(), federation, FedAvg())
    assert ["val/acc" in row for row in trainer.run.history] == [False, True, False, True, True]
    assert result["best_round"] in (1, 3, 4)


@pytest.mark.parametrize("hook", ["on_round_start", "on_round_end"])
def test_a_round_that_a_callback_makes_the_last_is_evaluated(hook, federation, make_model, make_trainer) -> None:
    class Stop(Callback):
        def on_round_start(self, trainer) -> None:
            self.stop(trainer, "on_round_start")

        def on_round_end(self, trainer, metrics: dict[str, float]) -> None:
            self.stop(trainer, "on_round_end")

        def stop(self, trainer, here: str) -> None:
            trainer.run.should_stop |= here == hook and trainer.run.round_idx == 1

    participation = Participation(held_out_fraction=0.4)
    trainer = make_trainer(num_rounds=9, evaluate_every=5, callbacks=Stop(), participation=participation)
    result = trainer.fit(make_model(), federation, FedAvg())
    assert ["val/acc" in row for row in trainer.run.history] == [False, True]
    assert result["best_round"] == 1
    assert "unseen/test/acc" in result


def test_a_second_fit_starts_from_nothing(federation, make_model, make_trainer, assert_same) -> None:
    trainer = make_trainer(num_rounds=4)
    trainer.fit(make_model(), federation, Local())
    second = trainer.fit(make_model(), federation, FedAvg())

    assert_same(second, make_trainer(num_rounds=4).fit(make_model(), federation, FedAvg()))
    assert len(trainer.run.history) == 4


def test_sigterm_ends_the_run_after_its_round(federation, make_model, make_trainer) -> None:
    class Terminates(Callback):
        def on_send(self, trainer, stage, payload) -> None:
            if trainer.run.round_idx == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_checkpoint_point(self, trainer) -> None:
            stops.append(trainer.run.should_stop)

    stops: list[bool] = []
    handler = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(num_rounds=9, callbacks=Terminates(), participation=Participation(held_out_fraction=0.2))

    result = trainer.fit(make_model(), federation, FedAvg())

    assert trainer.run.round_idx == len(trainer.run.history) == 2
    assert stops == [False, True]
    assert "unseen/test/acc" not in result  # unseen clients join a trained server, not an interrupted one
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_interrupt_ends_the_run_at_once(federation, make_model, make_trainer) -> None:
    class Interrupts(Callback):
        def on_send(self, trainer, stage, payload) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    trainer = make_trainer(callbacks=[Interrupts(), Interrupts()])

    with pytest.raises(KeyboardInterrupt):
        trainer.fit(make_model(), federation, FedAvg())

    assert trainer.run.round_idx == 0
    assert signal.getsignal(signal.SIGINT) is handler


class Misspelled(Callback):
    def on_round_ends(self, trainer, metrics) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_rounds": 0}, r"trainer\.num_rounds must be at least 1, got 0"),
        ({"evaluate_every": 0}, r"trainer\.evaluate_every must be at least 1, got 0"),
        ({"precision": "16-true"}, r"trainer\.precision must be one of .*bf16-mixed.*got '16-true'"),
        (
            {"callbacks": Misspelled()},
            r"Misspelled defines on_round_ends, which is no hook: did you mean "
            r"on_round_end\?",
        ),
        ({"callbacks": object()}, r"object is not a fl_lightning\.Callback"),
        ({"callbacks": Misspelled}, r"trainer\.callbacks: Misspelled is a class: give an instance, Misspelled\(\)"),
        (
            {"callbacks": ModelCheckpoint()},
            r"Callback: use fl_lightning\.callbacks\.FederatedCheckpoint",
        ),
        ({"monitor": "val/f1"}, r"trainer\.monitor is 'val/f1', but the model is scored by .*val/acc"),
        (
            {"monitor": "test/acc"},
            r"trainer\.monitor is 'test/acc', which is not a validation metric.* Set it to .*val/acc.*, or leave",
        ),
        (
            {"monitor": "trained/train/loss"},
            r"trainer\.monitor is 'trained/train/loss', which is not a validation metric",
        ),
        ({"participation": Participation(min_clients=6)}, "min_clients is 6, but a round has 5 clients, so every"),
        ({"participation": Participation(num_clients=6)}, "num_clients is 6, but only 5 clients train"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_settings_that_do_not_fit(settings, message, federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**settings).fit(make_model(), federation, FedAvg())


def test_data_without_clients_are_named(make_trainer) -> None:
    with pytest.raises(ValueError, match=r"data is LightningDataModule, which has no clients: give data=fl_l"):
        make_trainer().fit(None, LightningDataModule(), FedAvg())


@pytest.mark.parametrize("metrics", [{"f1": object()}, {"f1"}], ids=["mapping", "set"])
def test_metrics_are_a_list(metrics) -> None:
    with pytest.raises(ValueError, match=r"model\.metrics is a (dict|set): give a list of names of metrics"):
        ClientModule(metrics=metrics)


@pytest.mark.parametrize("monitor", ["val/acc", "val/acc_weighted", "val/acc_worst", "trained/val/loss_worst"])
def test_a_summary_over_clients_chooses_the_round(monitor, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=8, monitor=monitor, callbacks=[FederatedCheckpoint(every_seconds=0), RunReport()])
    result = trainer.fit(make_model(), federation, FedAvg())
    values = trainer.history[monitor].to_numpy()
    best = int(values.argmin() if "loss" in monitor else values.argmax())
    assert result["best_round"] == best
    assert result["test/acc"] == trainer.history["test/acc"].iloc[best]
    metric = "trained/test/loss" if "loss" in monitor else "test/acc"
    assert trainer.run.selection.test == metric
    worst = trainer.history[metric].min() if "loss" in monitor else trainer.history[metric].max()
    assert result[f"test/{'min' if 'loss' in monitor else 'max'}_over_rounds"] == worst
    recorded = read(trainer.run.folder)
    assert recorded.monitor == monitor
    assert recorded.test_metric == metric
    assert (trainer.run.folder / "report.html").is_file()
    if monitor.startswith("val/"):
        assert trainer.test()["test/acc"] == pytest.approx(result["test/acc"])


def test_a_summary_that_is_not_there_is_refused(federation, make_model, make_trainer) -> None:
    for monitor in ("val/acc_std", "val/none_worst", "test/acc_worst"):
        with pytest.raises(ValueError, match=rf"trainer\.monitor is '{monitor}'"):
            make_trainer(monitor=monitor).fit(make_model(), federation, FedAvg())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(make_trainer) -> None:
    with pytest.raises(ValueError, match=r"trainer\.accelerator is 'gpu', but there is no GPU here: use cpu or auto"):
        make_trainer(accelerator="gpu")


def test_payloads_of_two_rounds_are_independent(federation, make_model, make_trainer) -> None:
    uploads: list[Payload] = []

    class Keep(Callback):
        def on_upload(self, trainer, stage, payload):
            uploads.append(payload)
            return payload

    make_trainer(callbacks=Keep(), participation=Participation(num_clients=2)).fit(make_model(), federation, FedAvg())

    assert len({tuple(upload.clients) for upload in uploads}) > 1
    first = uploads[0].parameters["head.weight"]
    assert not torch.equal(first, uploads[1].parameters["head.weight"])
    disjoint = [upload for upload in uploads if not set(upload.clients) & set(uploads[0].clients)]
    assert all(len(concatenate([uploads[0], other]).clients) == 4 for other in disjoint)


def test_without_validation_the_last_round_is_reported(make_model, make_trainer, tmp_path) -> None:
    source = PlantedCommunities(num_nodes=60, num_communities=3, num_classes=3, num_features=6)
    splitter = GlobalSplit(train=0.5, val=0.0)
    data = FederatedDataModule(source, GivenPartitioner(), splitter, cache_dir=str(tmp_path), root=str(tmp_path))
    trainer = make_trainer(num_rounds=3)
    with (
        pytest.warns(UserWarning, match="without a val example"),
        pytest.warns(
            UserWarning, match="no client has validation examples, so no best round can be chosen: the last one is"
        ),
    ):
        result = trainer.fit(make_model(), data, FedAvg())
    assert result["best_round"] == 2
    assert result["test/acc"] == trainer.run.history[2]["test/acc"]


def test_a_metric_without_a_value_in_any_round_is_named(make_trainer) -> None:
    """AUROC where the validation examples are of one class."""
    role = torch.arange(12) % 4
    graph = Data(x=torch.rand(12, 3), edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), y=(role == 1).long())
    graph.train_mask, graph.val_mask, graph.test_mask = role < 2, role == 2, role == 3
    data = FederatedDataModule([graph, graph], splitter=GivenSplit())
    trainer = make_trainer(num_rounds=2, monitor="val/auroc")
    with pytest.warns(UserWarning, match=r"val/auroc has no value in any round, so that no best round can be chosen"):
        result = trainer.fit(ClientModule(metrics=["auroc"]), data, FedAvg())
    assert result["best_round"] == 1


def test_precision_is_a_number_too(make_trainer) -> None:
    assert make_trainer(precision=32).precision == "32"
    with pytest.raises(ValueError, match=r"trainer.precision must be one of .*, got '16'"):
        make_trainer(precision=16)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"participation": 0.1}, r"trainer\.participation is 0\.1: give an instance, such as Participation\("),
        ({"executor": "sequential"}, "trainer.executor is 'sequential': give an instance, such as SequentialExecutor"),
        ({"executor": StackedExecutor}, "trainer.executor is <class .*StackedExecutor'>: give an instance"),
        ({"monitor_mode": "maximum"}, "trainer.monitor_mode must be 'max' or 'min', got 'maximum'"),
        ({"max_epochs": 3}, r"FederatedTrainer\(\) got 'max_epochs', .* Lightning's Trainer: give trainer.num_rounds"),
        ({"gradient_clip_val": 1.0}, "'gradient_clip_val', a setting of Lightning's Trainer: give model.gradient_clip"),
        ({"fast_dev_run": True}, "'fast_dev_run', a setting of Lightning's Trainer: set trainer.num_rounds to 1"),
        ({"no_such": 1}, "unexpected keyword argument 'no_such'"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_a_setting_of_another_kind_or_of_lightnings_trainer_is_refused(setting, message) -> None:
    """A mode that was neither took the smallest for the best."""
    with pytest.raises((TypeError, ValueError), match=message):
        FederatedTrainer(**setting)


def test_callbacks_may_be_a_tuple_but_not_names() -> None:
    early = EarlyStopping()
    assert FederatedTrainer(callbacks=(early,), default_callbacks=False).callbacks == [early]
    for name, remedy in (("EarlyStopping", "give instances of fl_lightning.Callback"), (ModelCheckpoint(), "use fl_l")):
        with pytest.raises(ValueError, match=f"is not a fl_lightning.Callback: {remedy}"):
            check_hooks(name)


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        ("on_train_epoch_end", lambda self, trainer, pl_module: None, "is no hook: did you mean on_round_end"),
        ("setup", lambda self, trainer, pl_module, stage: None, "defines setup, which is no hook: did you mean on_fit"),
        ("on_round_end", lambda self, trainer: None, r"called with \(self, trainer, metrics\), but it takes others"),
        ("on_round_end", lambda self, *args: None, None),
    ],
    ids=["of Lightning", "setup", "too few", "any"],
)
def test_hooks_of_a_callback_that_could_not_be_called_are_refused(name, method, message) -> None:
    callback = type("Mine", (Callback,), {name: method})()
    with pytest.raises(ValueError, match=f"callback Mine.*{message}") if message else nullcontext():
        check_hooks(callback)


@pytest.mark.parametrize(
    ("hook", "value", "returned", "message"),
    [
        ("on_upload", Payload(clients=()), None, "Mine.on_upload returned None: return its last argument"),
        ("on_clients", (1, 2, 3), (1, 2), "Mine.on_clients returned 2 clients instead of 3"),
        ("on_clients", (1, 2, 3), None, "Mine.on_clients returned None"),
    ],
    ids=["no update", "few clients", "no clients"],
)
def test_a_hook_that_returns_nothing_is_told_what_to_return(hook, value, returned, message, make_trainer) -> None:
    callback = type("Mine", (Callback,), {hook: lambda self, *args: returned})()
    with pytest.raises(WrongSetting, match=message):
        Hooks(make_trainer(callbacks=[callback])).passed(hook, value)


def test_a_callback_may_stop_a_trainer_as_lightnings_do_and_save_it_by_name(make_trainer, federation, tmp_path) -> None:
    class Stops(Callback):
        def on_checkpoint_point(self, trainer):
            trainer.should_stop = True
            trainer.save_checkpoint(str(tmp_path / "mine.ckpt"))

    trainer = make_trainer(num_rounds=5, callbacks=[Stops()])
    trainer.fit(ClientModule(), federation, FedAvg(num_epochs=1))
    assert (len(trainer.history), trainer.should_stop) == (1, True)
    assert (tmp_path / "mine.ckpt").is_file()


@pytest.mark.parametrize("value", [np.float64(1.0), np.ones(2), Path("a")], ids=["number", "array", "path"])
def test_a_state_that_could_not_be_read_again_is_refused(value, make_trainer, federation) -> None:
    """The checkpoints of the whole run were unreadable."""
    callback = type("Mine", (Callback,), {"state_dict": lambda self: {"seen": [value]}})()
    trainer = make_trainer(callbacks=[callback, FederatedCheckpoint()], num_rounds=1)
    with pytest.raises(WrongSetting, match=r"Mine.state_dict\(\)\['seen'\]\[0\] is \w+\.\w+, which cannot be saved"):
        trainer.fit(ClientModule(), federation, FedAvg(num_epochs=1))
