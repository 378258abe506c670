"""FedBN: which parameters stay, and clients whose inputs are of different scales."""

import functools

import torch
from learning import learned, quadrants

from fl_lightning import ClientModule
from fl_lightning.models import MLP, NormalizedGCN
from fl_lightning.strategies import FedAvg, FedBN


def test_normalization_layers_stay(federation, make_model, make_trainer) -> None:
    trainer = make_trainer()
    trainer.fit(make_model(FedBN), federation, FedBN(personal=["head.bias"]))
    assert set(trainer.run.strategy.models) == {"convs.0.weight", "convs.1.weight", "head.weight"}
    state = trainer.run.executor.state().parameters
    for name in ("norms.0.weight", "norms.0.bias", "norms.0.running_mean", "norms.1.running_var", "head.bias"):
        assert not torch.equal(state[name][0], state[name][1])
    assert list(trainer.run.strategy.personal) == ["head.bias"]


def test_without_normalization_layers_being_personal_it_is_fedavg(federation, make_trainer, assert_same) -> None:
    class Shared(FedBN):
        def kept_patterns(self, federation):
            return self.personal

    runs = []
    for strategy in (Shared(), FedAvg()):
        trainer = make_trainer()
        trainer.fit(ClientModule(functools.partial(NormalizedGCN, hidden_channels=8)), federation, strategy)
        runs.append((dict(strategy.models), trainer.run.history))
    assert_same(runs[0], runs[1])


def test_clients_that_see_on_different_scales() -> None:
    clients = quadrants(6, num_train=20, inputs=lambda client, x_NF: x_NF * 4.0**client / 32 + client)
    net = functools.partial(MLP, batch_norm=True)
    settings = {"num_rounds": 20, "lr": 0.1}
    local = learned(FedBN(num_epochs=5), clients, net=net, **settings)
    shared = learned(FedAvg(num_epochs=5), clients, net=net, running_statistics="shared", **settings)
    without = learned(FedAvg(num_epochs=5), clients, **settings)
    assert local > max(shared, without) + 0.05
