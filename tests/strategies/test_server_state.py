"""What ``server_state`` names is saved and loaded, whatever it is made of."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import Adam

from fl_lightning.strategies import FedAvg, Strategy
from fl_lightning.strategies.server_state import ServerState


class Server(ServerState):
    """Everything that can be saved."""

    server_state = ("table", "net", "optimizer", "by_name", "recorded_metrics")
    server_state += ("who", "pair", "label", "nothing", "weight")

    def __init__(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.table = torch.randn(3, 2, generator=draw, dtype=torch.float64)
        self.weight = torch.randn(4, generator=draw).requires_grad_()
        self.net = nn.Linear(2, 2)
        self.optimizer = Adam([self.weight, *self.net.parameters()])
        self.by_name = {"m": torch.randn(2, generator=draw), "optimizers": {"net": Adam(self.net.parameters())}}
        self.recorded_metrics = {"server/loss": float(seed)}
        self.who, self.pair = {seed, seed + 1}, (seed, [torch.tensor(seed)])
        self.label, self.nothing = "abc"[seed], None

    def learn(self) -> None:
        """Make states of the optimizers."""
        for optimizer in (self.optimizer, self.by_name["optimizers"]["net"]):
            optimizer.zero_grad()
            (self.net(self.table.float()).square().sum() + self.weight.square().sum()).backward()
            optimizer.step()


class Longer(Server):
    server_state = ("rounds",)
    rounds = 0


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_all_kinds_of_state_come_back_from_a_file(assert_same) -> None:
    server, other = Server(1), Server(2)
    server.learn()
    server.table = torch.ones(5, 2, dtype=torch.float64)  # it grew
    saved = through_a_file(server.state_dict())

    other.load_state_dict(saved)

    assert_same(other.state_dict(), server.state_dict())
    assert (other.who, other.pair[0], other.label, other.nothing) == ({1, 2}, 1, "b", None)
    assert other.table.dtype == torch.float64
    server.learn(), other.learn()
    assert_same(other.state_dict(), server.state_dict())  # the optimizer still steps what the server has
    assert other.optimizer.param_groups[0]["params"][0] is other.weight


def test_what_was_loaded_is_a_copy() -> None:
    server, other = Server(1), Server(2)
    server.learn()
    state = server.state_dict()
    before = copy.deepcopy(state)

    other.load_state_dict(state)
    other.learn()
    other.table.zero_(), other.by_name["m"].zero_(), other.pair[1][0].zero_()
    other.who.add(9)

    assert str(server.state_dict()) == str(before)


def test_what_is_the_same_for_all_clients_stays_held_once() -> None:
    server = Server(1)
    server.table = torch.ones(2, dtype=torch.float64).expand(100, 2)
    other = Server(2)
    other.load_state_dict(server.state_dict())
    assert other.table.stride() == (0, 1)


def test_names_of_all_classes_are_joined() -> None:
    assert Longer.state_names() == (*Server.server_state, "rounds")
    assert FedAvg.state_names() == ("models", "breadth")
    assert Strategy.state_names() == ()


def test_a_misspelled_name_is_refused_before_anything_is_trained(federation, make_model, make_trainer) -> None:
    class Misspelled(FedAvg):
        server_state = ("modles",)

    message = r"Misspelled\.server_state names modles, which Misspelled does not have after setup: correct the name"
    with pytest.raises(ValueError, match=message):
        make_trainer(num_rounds=1).fit(make_model(), federation, Misspelled())


def test_a_string_is_no_tuple_of_names() -> None:
    class Forgot(FedAvg):
        server_state = "models"

    with pytest.raises(ValueError, match=r"Forgot\.server_state is the string 'models': write \('models',\)"):
        Forgot.state_names()


def test_a_state_of_another_strategy_is_refused() -> None:
    server = Longer(1)
    state = server.state_dict()
    del state["table"], state["rounds"]
    with pytest.raises(
        ValueError, match="the state to load into Longer lacks table, rounds: it is of another strategy"
    ):
        server.load_state_dict(state)
    state = server.state_dict()
    state["by_name"]["optimizers"].clear()
    with pytest.raises(ValueError, match=r"the state to load into Longer\.by_name\['optimizers'\] lacks net"):
        server.load_state_dict(state)


def test_what_cannot_be_saved_is_named() -> None:
    server = Server(1)
    server.by_name["m"] = [object()]
    message = r"Server\.by_name\['m'\]\[0\] is object, which cannot be saved in a checkpoint: give tensors"
    with pytest.raises(ValueError, match=message):
        server.state_dict()
