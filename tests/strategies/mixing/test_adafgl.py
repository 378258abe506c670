"""AdaFGL: its modules by hand, what it reduces to, when clients hear what, and clients whose neighbors differ."""

import functools
from typing import Any

import pytest
import torch
from both_executors import both_executors
from one_client import one_client
from path_graph import computed, path_graph
from torch import Tensor

from fl_lightning import Callback, ClientModule, Participation, SequentialExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.data import ClientGraph
from fl_lightning.models import AdaptiveGCN
from fl_lightning.models.adaptive_gcn import HopMLP, corrected_propagation, likeness, relation
from fl_lightning.round.context import Context
from fl_lightning.strategies import AdaFGL, FedAvg
from fl_lightning.strategies.mixing import CoordinateMedian

ADAPTIVE = functools.partial(AdaptiveGCN, hidden_channels=3)
MODEL = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs."""

    def run(strategy, executor=SequentialExecutor, data=None, dropout=0.5, **settings):
        trainer = make_trainer(executor=executor(), **{"seed": 1, **settings})
        trainer.fit(make_model(AdaFGL, dropout=dropout), data or federation, strategy)
        return trainer

    return run


# ------------------------------------------------------------------ the modules


def test_who_is_alike() -> None:
    p_NK = torch.tensor([[0.9, 0.1], [0.88, 0.12], [0.1, 0.9], [0.9, 0.1]])
    real_N = torch.tensor([True, True, True, False])
    assert likeness(p_NK, real_N, 0.999).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0] * 4, [0] * 4]
    assert likeness(p_NK, real_N, 1.0).sum() == 0


@pytest.mark.parametrize("padding", [0, 2])
def test_corrected_propagation(padding) -> None:
    alike_NN = torch.zeros(6, 6).double()
    alike_NN[0, 2] = alike_NN[2, 0] = 1

    def own(batch: Any) -> dict[str, Tensor]:
        alike = alike_NN[: len(batch.y), : len(batch.y)]
        return {"all": corrected_propagation(batch, alike, 1.0), "half": corrected_propagation(batch, alike, 0.5)}

    actual = computed(own, path_graph(), padding=padding)
    links = torch.zeros(4, 4).double()
    for u, v in ((0, 1), (1, 2), (2, 3)):
        links[u, v] = links[v, u] = 1
    loops = links + torch.eye(4)
    scale = loops.sum(1).rsqrt()
    torch.testing.assert_close(actual["all"][:4, :4], scale[:, None] * loops * scale)  # Â
    loops = links / 2 + alike_NN[:4, :4] / 2 + torch.eye(4)
    scale = loops.sum(1).rsqrt()
    torch.testing.assert_close(actual["half"][:4, :4], scale[:, None] * loops * scale)


@pytest.mark.parametrize("sparse", [False, True])
def test_propagated_features_are_never_held(sparse) -> None:
    """What comes out is that of a perceptron on [X, ÃX, Ã²X, Ã³X]."""
    torch.manual_seed(0)
    x_NF = torch.rand(4, 3).double() * (torch.rand(4, 3) < 0.5)
    module = HopMLP(3, (5, 2), num_hops=4, dropout=0.0).double()
    step_NN = torch.rand(4, 4).double()
    graph = path_graph(x_NF.float())
    actual = computed(lambda b: {"": module(b, step_NN, "part").detach()}, graph, sparse=sparse)[""]
    parts = [graph.x_NF.double()]
    for _ in range(3):
        parts.append(step_NN @ parts[-1])
    hidden = torch.cat(parts, dim=1) @ module.weights.detach().flatten(0, 1) + module.bias.detach()
    hidden = torch.where(hidden > 0, hidden, 0.25 * hidden)
    torch.testing.assert_close(actual, module.layers[0](hidden).detach())


def test_relation() -> None:
    e_NK = torch.tensor([[4.0, 0.0], [3.0, 0.0], [0.0, 2.0], [9.0, 9.0]]).double()
    real_N = torch.tensor([True, True, True, False])
    alike_NN = torch.zeros(4, 4).double()
    unit_NK = torch.nn.functional.normalize(e_NK[:3].softmax(dim=1), dim=1)
    q_NN = (unit_NK @ unit_NK.T).fill_diagonal_(0)
    mean = q_NN.mean()
    above = (q_NN - mean) / (q_NN.max() - mean)
    for kind, below in {"ratio": -q_NN / mean, "distance": (q_NN - mean) / mean}.items():
        actual = relation(e_NK, alike_NN, real_N, 0.0, below_mean=kind)
        torch.testing.assert_close(actual[:3, :3], torch.where(q_NN > mean, above, below) + torch.eye(3))
        assert actual[3].tolist() == [0, 0, 0, 1]
        assert actual[:3, :3].diagonal().tolist() == ([1, 1, 1] if kind == "ratio" else [0, 0, 0])
    cosine_NN = torch.zeros(4, 4).double()
    cosine_NN[:3, :3] = q_NN
    first, second = (relation(e_NK, cosine_NN, real_N, share, below_mean="ratio") for share in (0.0, 0.7))
    torch.testing.assert_close(first, second)  # the share is idle where R is the cosine itself


def homophily_of(graph: ClientGraph, padding: int = 0) -> float:
    strategy = AdaFGL()
    strategy.federation = type("Known", (), {"num_outputs": 2, "seed": 0})()  # type: ignore[assignment]

    def own(batch: Any) -> dict[str, Tensor]:
        client_state = {"prediction": torch.zeros(len(batch.y), 2).double()}
        return {"": strategy.homophily(None, {}, batch, Context(client_state=client_state))}  # type: ignore[arg-type]

    return computed(own, graph, padding=padding)[""].item()


@pytest.mark.parametrize("padding", [0, 3])
def test_homophily_of_a_path(padding) -> None:
    assert homophily_of(path_graph(train=(1,)), padding) == 1  # nothing to score
    assert homophily_of(path_graph(train=(0, 1), y=(1, 1, 0, 0)), padding) == 1
    assert homophily_of(path_graph(train=(0, 1), y=(0, 1, 1, 1)), padding) == 0
    assert homophily_of(path_graph(train=(0, 1), y=(1, 1, 1, 0)), padding) == 1  # other labels are not looked at


@pytest.mark.parametrize("blend_modules", ["soft", "hard"])
def test_homophily_chooses_the_module(blend_modules) -> None:
    client, _, (parameters,) = one_client(path_graph(), ADAPTIVE, num_classes=2)
    strategy = AdaFGL(blend_modules=blend_modules, double_softmax=False)
    p_NK = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.3, 0.7]]).double()

    def own(batch: Any) -> dict[str, Tensor]:
        actual = {}
        for h in (-1.0, 0.0, 0.5, 0.95, 1.0):
            context = Context(client_state={"prediction": p_NK, "homophily": torch.tensor(h).double()})
            actual[str(h)] = strategy.blended_modules(client, parameters, batch, context).logits.exp()
        own_NK, others = strategy.modules(client, parameters, batch, context)
        actual["ho"] = (own_NK.softmax(dim=1) + p_NK) / 2
        actual["he"] = torch.stack([each.softmax(dim=1) for each in others]).mean(dim=0)
        actual["gcn"] = client.output(parameters, batch).logits.softmax(dim=1)
        return actual

    actual = computed(own, path_graph())
    torch.testing.assert_close(actual["1.0"], actual["ho"])
    torch.testing.assert_close(actual["0.0"], actual["he"])
    torch.testing.assert_close(actual["-1.0"], actual["gcn"])  # nothing is known of the client yet
    hard = {"0.5": actual["he"], "0.95": actual["ho"]}
    soft = {name: float(name) * actual["ho"] + (1 - float(name)) * actual["he"] for name in hard}
    for name, expected in (hard if blend_modules == "hard" else soft).items():
        torch.testing.assert_close(actual[name], expected)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("consistency", ["logits", "probabilities"])
def test_every_module_is_trained_on_labels_and_the_homophilous_one_on_predictions(consistency, padding) -> None:
    client, _, (parameters,) = one_client(path_graph(), ADAPTIVE, num_classes=2)
    strategy = AdaFGL(consistency=consistency)
    graph = path_graph(train=(0, 2), y=(0, 1, 1, 1))
    p_NK = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.3, 0.7]]).double()

    def own(batch: Any) -> dict[str, Tensor]:
        padded_NK = torch.cat([p_NK, p_NK.new_full((padding, 2), 7.0)])
        context = Context(client_state={"prediction": padded_NK, "homophily": torch.tensor(0.5).double()})
        own_NK, others = strategy.modules(client, parameters, batch, context)
        near_NK = own_NK.softmax(dim=1) if consistency == "probabilities" else own_NK
        expected = (near_NK - padded_NK)[:4].square().mean()
        for logits_NK in (own_NK, *others):
            expected = expected + torch.nn.functional.cross_entropy(logits_NK[[0, 2]], batch.y[[0, 2]])
        return {"found": strategy.objective(client, parameters, batch, context), "expected": expected}

    actual = computed(own, graph, padding=padding)
    torch.testing.assert_close(actual["found"], actual["expected"])


# ------------------------------------------------------------------ the two phases


def test_each_module_is_clipped_by_its_own_norm() -> None:
    client = ClientModule(gradient_clip_val=1.0)
    client.net = AdaptiveGCN(6, 3)
    names = ("convs.0.weight", "homophilous.bias", "heterophilous.slope", "heterophilous.messages.bias")
    clipped = client.clip({name: torch.full((1, 4), 10.0) for name in names})
    norms = [float(clipped[name].norm()) for name in names]
    assert norms == pytest.approx([1, 1, 0.5**0.5, 0.5**0.5])


@both_executors
def test_the_first_phase_is_fedavg(executor, fit, make_model, make_trainer, federation, assert_same) -> None:
    busy = Participation(num_clients=3, dropout_probability=0.2, straggler_probability=0.5)
    actual = fit(AdaFGL(), executor, participation=busy)
    trainer = make_trainer(executor=executor(), participation=busy, seed=1)
    trainer.fit(make_model(dropout=0.5), federation, FedAvg())
    state = trainer.run.executor.state().parameters
    own = {name: tensor for name, tensor in actual.run.executor.state().parameters.items() if name in state}
    for name, tensor in state.items():
        assert own[name].shape == tensor.shape
    assert [name for name in own if not name.startswith(("convs", "head"))] == []
    modules = {n: t for n, t in actual.run.executor.state().parameters.items() if n not in state}
    assert all(torch.equal(t, actual.run.architectures[0][n].expand_as(t)) for n, t in modules.items())
    assert set(actual.run.strategy.shared) == set(state)


@both_executors
def test_the_best_model_is_kept_and_sent_once(executor, fit) -> None:
    strategy = AdaFGL(num_federated_rounds=4)
    history = fit(strategy, executor, num_rounds=7, callbacks=CommunicationLedger()).run.history
    total = [row["comm/bytes_down"] for row in history], [row["comm/bytes_up"] for row in history]
    assert total[0] == [5 * 4 * MODEL] * 5 + [0] * 2
    assert total[1] == [5 * 4 * (MODEL + 2)] * 4 + [0] * 3
    best = max(row["val/acc_weighted"] for row in history[:3])  # the last average is not judged
    assert history[-1]["server/kept_accuracy"] == pytest.approx(best)
    assert history[-1]["global/val/acc_weighted"] == pytest.approx(best)
    assert history[-1]["server/adapting_clients"] == 5


class Models(Callback):
    """Keeps the global model of each round."""

    def __init__(self) -> None:
        self.models = []

    def on_round_end(self, trainer, metrics) -> None:
        self.models.append({name: model.clone() for name, model in trainer.run.strategy.models.items()})


@pytest.mark.filterwarnings("ignore:strategy.aggregation withstands")
@pytest.mark.parametrize("aggregation", [None, CoordinateMedian()], ids=["average", "median"])
def test_later_rounds_leave_the_best_model_as_it_was(aggregation, fit, assert_same) -> None:
    watch = Models()
    strategy = AdaFGL(num_federated_rounds=8, aggregation=aggregation)
    history = fit(strategy, num_rounds=8, callbacks=watch).run.history
    kept = [row["server/kept_accuracy"] for row in history]
    best = kept.index(kept[-1]) - 1  # a model is judged by the round after it
    assert 0 <= best < 7
    assert_same(strategy.best_models, watch.models[best])
    assert not torch.equal(strategy.models["head.weight"], watch.models[best]["head.weight"])


class OneAtATime(Participation):
    """All clients in the first round, one in each other."""

    def draw(self, clients, round_idx, seed):
        return (dict.fromkeys(clients, 1.0) if round_idx == 0 else {round_idx: 1.0}), []


@both_executors
def test_who_is_not_in_the_second_phase_yet_has_the_global_model(executor, fit) -> None:
    strategy = AdaFGL(num_federated_rounds=1)
    scores = fit(strategy, executor, num_rounds=3, participation=OneAtATime()).run.scores
    assert strategy.extracted_C.tolist() == [False, True, True, False, False]
    own, kept = (scores[kind].extras["test/loss"] for kind in ("", "global/"))
    assert torch.equal(own[[0, 3, 4]], kept[[0, 3, 4]])
    assert not torch.equal(own[[1, 2]], kept[[1, 2]])


@both_executors
def test_without_epochs_of_its_own_phase_the_gcn_stays(executor, fit) -> None:
    strategy = AdaFGL(num_federated_rounds=2, keep="last")
    trainer = fit(strategy, executor, num_rounds=4)
    state = trainer.run.executor.state().parameters
    for name, model in strategy.models.items():
        assert torch.equal(state[name], model.expand_as(state[name]))
    assert trainer.run.history[3]["global/test/acc"] == trainer.run.history[1]["test/acc"]
    assert (state["homophilous.bias"] != trainer.run.architectures[0]["homophilous.bias"]).any()


@both_executors
def test_labels_outside_the_training_nodes_are_not_used(executor, relabeled, fit, assert_same) -> None:
    states = []
    for data in relabeled:
        strategy = AdaFGL(num_federated_rounds=2, keep="last")  # the best is by validation
        states.append(dict(fit(strategy, executor, data).run.executor.state().tensors()))
    assert_same(*states)


def heterophilous_clients(num_nodes: int = 60) -> list[ClientGraph]:
    """Features show the class; nodes have many neighbors, of any class."""
    clients = []
    for client in range(4):
        draw = torch.Generator().manual_seed(client)
        y_N = torch.arange(num_nodes) % 3
        x_NF = 1.5 * torch.eye(6)[y_N] + 0.7 * torch.randn(num_nodes, 6, generator=draw)
        linked_NN = (torch.rand(num_nodes, num_nodes, generator=draw) < 0.4).triu(1)
        role_N = torch.randperm(num_nodes, generator=draw) % 4
        clients.append(
            ClientGraph(
                name=f"client-{client}",
                x_NF=x_NF,
                edge_index_2E=(linked_NN | linked_NN.T).nonzero().T,
                y_N=y_N,
                train_mask_N=role_N == 0,
                val_mask_N=role_N == 1,
                test_mask_N=role_N >= 2,
                node_idx_N=torch.arange(num_nodes),
            )
        )
    return clients


@both_executors
def test_heterophilous_clients(executor, given_clients, fit, make_model, make_trainer) -> None:
    data = given_clients(heterophilous_clients())
    actual = fit(AdaFGL(num_federated_rounds=5), executor, data, num_rounds=15)
    trainer = make_trainer(executor=executor(), num_rounds=15, seed=1)
    averaged = trainer.fit(make_model(dropout=0.5), data, FedAvg())
    assert actual.run.selection.result["test/acc"] > averaged["test/acc"] + 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_federated_rounds": 0}, r"strategy\.num_federated_rounds must be at least 1, got 0"),
        ({"threshold": 1.5}, r"strategy\.threshold must be in \[-1, 1\], got 1\.5"),
        ({"edge_share": -0.5}, r"strategy\.edge_share must be in \[0, 1\], got -0\.5"),
        ({"blend_modules": "both"}, r"strategy\.blend_modules must be 'soft' or 'hard', got 'both'"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        AdaFGL(**settings)


def test_a_net_without_modules_is_refused(federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"AdaFGL needs a net with modules beside its GCN: set model\.net to"):
        make_trainer().fit(make_model(), federation, AdaFGL())
