"""``check_strategy`` finds what a strategy does wrong, and says what to do."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import ClientModule, Payload
from fl_lightning.models import GCN
from fl_lightning.strategies import FedAvg
from fl_lightning.testing import CHECKS, check_strategy
from fl_lightning.testing import checks as c

BROKEN: list[Any] = []


def breaks(check: Any, message: str) -> Any:
    """Note a strategy that a check has to refuse."""

    def note(kind: type[FedAvg]) -> type[FedAvg]:
        BROKEN.append(pytest.param(kind, check, message, id=kind.__name__))
        return kind

    return note


@breaks(c.check_joining_is_as_being_held_out, "cannot join after the training .* has a row for each")
class CountsInOneRow(FedAvg):
    server_state = ("count_1C",)

    def setup(self, federation: Any) -> None:
        super().setup(federation)
        self.count_1C = torch.zeros(2 * federation.num_clients)

    def onboard(self, stage: Any, upload: Payload) -> None:
        self.count_1C[[2 * client + 1 for client in upload.clients]] += 1


@breaks(c.check_settings_stay_as_given, "num_epochs differ after a run: leave settings as they are given")
class ChangesSettings(FedAvg):
    def aggregate(self, stage: Any, upload: Payload) -> None:
        super().aggregate(stage, upload)
        self.num_epochs += 1


@breaks(c.check_settings_stay_as_given, r"share differ after dataclasses\.replace: leave settings")
@dataclass(kw_only=True, eq=False)
class HalvesSettings(FedAvg):
    share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.share = self.share / 2


@breaks(
    c.check_hooks_and_mixing, r"Flat.mixing_matrix returned shape \(\d,\) for \d clients: return .* shape \(1, \d\)"
)
class Flat(FedAvg):
    def mixing_matrix(self, upload: Payload) -> Tensor:
        return super().mixing_matrix(upload)[0]


@breaks(c.check_hooks_and_mixing, r"returned shape \(\d, \d\) .* with personalized = True in the class")
class Square(FedAvg):
    def mixing_matrix(self, upload: Payload) -> Tensor:
        return torch.eye(len(upload.clients))


@breaks(c.check_hooks_and_mixing, "returned rows that sum to .*: divide each row by its sum")
class Unnormalized(FedAvg):
    """It passed, and its parameters grew by a factor in every round."""

    def mixing_matrix(self, upload: Payload) -> Tensor:
        return upload.num_examples[None].double()


@breaks(c.check_hooks_and_mixing, "defines aggregate_fit, which nothing calls: override aggregate")
class Flowers(FedAvg):
    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> None:
        raise AssertionError


@breaks(c.check_hooks_and_mixing, r"defines mixing_matrx, which nothing calls: did you mean mixing_matrix\?")
class Misspelled(FedAvg):
    def mixing_matrx(self, upload: Payload) -> Tensor:
        raise AssertionError


@breaks(c.check_metrics_are_finite_and_models_trained, "server/ratio are not finite in round 0")
class DividesByZero(FedAvg):
    def metrics(self) -> dict[str, float]:
        """A ratio."""
        return {"server/ratio": float("inf")}


def no_loss(client: ClientModule, parameters: Any, batch: Any, context: Any) -> Tensor:
    """Nothing to learn; weight decay moves what is not zero."""
    return 0 * client.loss(client.output(parameters, batch), batch)


@breaks(c.check_metrics_are_finite_and_models_trained, "are the initial ones after 4 rounds: see `trained`")
class NeverMoves(FedAvg):
    def training(self, round_idx: int) -> Any:
        return dataclasses.replace(super().training(round_idx), objective=no_loss)


def padded_loss(client: ClientModule, parameters: Any, batch: Any, context: Any) -> Tensor:
    """Knows how many nodes the largest client of its group has."""
    return client.loss(client.output(parameters, batch), batch) * batch.y.shape[-1]


@breaks(c.check_executors_agree, "must be a pure function of one client")
class KnowsTheGroup(FedAvg):
    def training(self, round_idx: int) -> Any:
        return dataclasses.replace(super().training(round_idx), objective=padded_loss)


class Momentum(FedAvg):
    """The server's model goes on as it moved last."""

    def setup(self, federation: Any) -> None:
        super().setup(federation)
        self.velocity = {name: torch.zeros_like(model) for name, model in self.models.items()}

    def update(self, name: str, before: Tensor, mixed: Tensor) -> Tensor:
        self.velocity[name] = mixed - before + 0.5 * self.velocity[name]
        return before + self.velocity[name]


@breaks(c.check_server_state_is_complete, r"after round 1 .* name in server_state what lives on .*/velocity/convs\.0")
class ForgetsState(Momentum):
    pass


@breaks(c.check_server_state_is_complete, "load_state_dict must copy the tensors")
class SharesState(Momentum):
    server_state = ("velocity",)

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.velocity = dict(state["velocity"])


@breaks(
    c.check_resume_is_exact, "a run that is resumed after round 1 differs: name in server_state .*sent in stage 'train'"
)
class HidesState(FedAvg):
    def setup(self, federation: Any) -> None:
        super().setup(federation)
        self._round = 0

    def update(self, name: str, before: Tensor, mixed: Tensor) -> Tensor:
        self._round += 1
        return before.lerp(mixed, 1 / self._round)


@breaks(c.check_state_replaces_a_later_one, "the server still uses what it had: forget there what is computed")
class KeepsWhatItComputed(FedAvg):
    def setup(self, federation: Any) -> None:
        super().setup(federation)
        self._sent: dict[str, Tensor] | None = None

    def configure(self, stage: Any, clients: Sequence[int]) -> Payload:
        if self._sent is None:
            self._sent = {name: 1 * model for name, model in self.models.items()}
        parameters = {name: model.expand(len(clients), *model.shape[1:]) for name, model in self._sent.items()}
        return Payload(clients=tuple(clients), parameters=parameters)

    def aggregate(self, stage: Any, upload: Payload) -> None:
        super().aggregate(stage, upload)
        self._sent = None

    def evaluations(self, clients: Sequence[int]) -> Any:
        self.configure(self.stages(0)[0], clients)
        return super().evaluations(clients)


@breaks(c.check_same_seed_gives_the_same, "draw random numbers from keys")
class DrawsFromTheGlobalGenerator(FedAvg):
    def update(self, name: str, before: Tensor, mixed: Tensor) -> Tensor:
        return mixed + 0.01 * torch.randn_like(mixed)


@breaks(
    c.check_payloads_are_not_written_to, r"aggregate writes into .*p/head\.bias.* in stage 'train' of round 0: copy"
)
class WritesIntoUploads(FedAvg):
    def aggregate(self, stage: Any, upload: Payload) -> None:
        super().aggregate(stage, upload)
        upload.parameters["head.bias"].zero_()


@breaks(
    c.check_communication_is_described, "stage 'train' sends size, and nothing says what that is: give the function"
)
class SendsWithoutWords(FedAvg):
    def client_outputs(self) -> Any:
        return {"size": lambda client, parameters, batch, context: batch.example_mask.sum()}


@breaks(c.check_server_metrics_are_named, r"metrics\(\) returns 'drift': begin its name with server/")
class NamesFiguresAnyhow(FedAvg):
    def metrics(self) -> dict[str, float]:
        """A drift."""
        return {"drift": 0.0}


@breaks(c.check_main_evaluation_is_of_the_models_for_the_clients, "do not agree whose models are the result")
class EvaluatesOthers(FedAvg):
    def model_for(self, clients: Sequence[int]) -> None:
        return None

    def evaluations(self, clients: Sequence[int]) -> Any:
        return FedAvg.evaluations(self, clients) | {"": FedAvg.blended(self, clients) or self._mixed(clients)}

    def _mixed(self, clients: Sequence[int]) -> Any:
        from fl_lightning import Evaluation

        return Evaluation(payload=self.mixed_models(clients))


@breaks(c.check_evaluation_changes_nothing, "an evaluation must not change the state")
class CountsEvaluations(FedAvg):
    server_state = ("count",)
    count = 0

    def evaluations(self, clients: Sequence[int]) -> Any:
        self.count += 1
        return super().evaluations(clients)


@breaks(c.check_checkpoint_scores_as_reported, "a checkpoint does not score as the run that wrote it")
class ScoresByMemory(FedAvg):
    def setup(self, federation: Any) -> None:
        super().setup(federation)
        self._is_trained = False

    def aggregate(self, stage: Any, upload: Payload) -> None:
        super().aggregate(stage, upload)
        self._is_trained = True

    def model_for(self, clients: Sequence[int]) -> Any:
        models = self.mixed_models(clients)
        return models if self._is_trained else Payload(clients=models.clients, parameters=self._opposite(models))

    def _opposite(self, models: Payload) -> dict[str, Tensor]:
        return {name: -tensor for name, tensor in models.parameters.items()}


@breaks(
    c.check_unseen_clients_do_not_train_the_server, "what the server knows of others changed when unseen clients joined"
)
class TrainsOnNewClients(FedAvg):
    def onboard(self, stage: Any, upload: Payload) -> None:
        self.aggregate(stage, upload)


@pytest.mark.parametrize(("kind", "check", "message"), BROKEN)
def test_what_is_wrong_is_reported(kind: type[FedAvg], check: Any, message: str, federation: Any) -> None:
    client = ClientModule([lambda *sizes: GCN(*sizes, hidden_channels=8)])
    with pytest.raises(AssertionError, match=rf"^{kind.__name__} on data: {check.__name__}: .*{message}"):
        check_strategy(kind(num_epochs=1), client=client, data=federation, checks=[check])


def test_every_check_is_listed_once() -> None:
    own = [function for name, function in vars(c).items() if name.startswith("check_")]
    assert sorted(own, key=id) == sorted(CHECKS, key=id)
    assert len(CHECKS) == len(set(CHECKS)) >= 15
    assert all(check.__doc__ for check in CHECKS)


def test_settings_that_a_strategy_refuses_are_not_a_failed_check(federation: Any) -> None:
    client = ClientModule([lambda *sizes: GCN(*sizes, hidden_channels=8)])
    with pytest.raises(ValueError, match="matches none of the model's parameters"):
        check_strategy(FedAvg(num_epochs=1, personal=["nothing"]), client=client, data=federation)
