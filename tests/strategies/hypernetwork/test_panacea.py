"""pFedHN and Panacea: heads, server steps by hand, the graph generator, clients held out of training."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Adam

from fl_lightning.federation import Federation
from fl_lightning.round.payload import Payload, flatten, unflatten
from fl_lightning.strategies import Panacea, PFedHN
from fl_lightning.strategies.hypernetwork.heads import ChunkedHead, FactoredHead, FullHead
from fl_lightning.strategies.hypernetwork.panacea import mean_aggregation, reconstruction_loss

SHAPES = {"body.weight": (2, 3), "body.bias": (3,), "head.weight": (4, 3)}
HEADS = [FullHead, functools.partial(FactoredHead, rank=3), functools.partial(ChunkedHead, chunk_size=4)]
each_head = pytest.mark.parametrize("head", HEADS, ids=["full", "factored", "chunked"])
#: Three tight clients and one that only client 2 knows, with unequal weights.
RELATION = [[0.0, 1.0, 0.5, 0.0], [1.0, 0.0, 2.0, 0.0], [0.5, 2.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]


def federation_of(relation=RELATION, training=None, order=None, names=True, **settings) -> Federation:
    """Four clients (with a graph) or as many as it has rows, permuted by ``order``."""
    draw = torch.Generator().manual_seed(0)
    relation_CC = None if relation is None else torch.tensor(relation)
    num_clients = 4 if relation_CC is None else len(relation_CC)
    order = list(range(num_clients)) if order is None else order
    return Federation(
        num_clients=num_clients,
        num_features=2,
        training_clients=tuple(range(num_clients)) if training is None else training,
        parameters={n: torch.randn(shape, generator=draw, dtype=torch.float64) for n, shape in SHAPES.items()},
        seed=3,
        device=torch.device("cpu"),
        relation_CC=None if relation_CC is None else relation_CC[order][:, order],
        client_names=tuple(f"client-{client}" for client in order) if names else (),
        **settings,
    )


def tiny(kind=Panacea, federation=None, **settings):
    small = {"embedding_channels": 5, "hidden_channels": 6, "head": functools.partial(FullHead, output_scale=1.0)}
    strategy = kind(**{**small, **settings})
    strategy.setup(federation or federation_of())
    return strategy


def update(strategy, clients, seed: int = 1) -> Payload:
    draw = torch.Generator().manual_seed(seed)
    size = sum(shape.numel() for shape in strategy.shapes.values())
    rows = torch.stack([torch.randn(size, generator=draw.manual_seed(seed * 100 + c)) for c in clients])
    return Payload(clients=tuple(clients), parameters=unflatten(rows.to(strategy.dtype), strategy.shapes))


def play(strategy, clients, answered=None, seed: int = 1) -> Tensor:
    """One round; the models that were sent."""
    stage = strategy.stages(0)[0]
    sent = flatten(strategy.configure(stage, tuple(clients)).parameters)
    strategy.aggregate(stage, update(strategy, clients if answered is None else answered, seed))
    return sent


def generated(strategy, clients) -> Tensor:
    return flatten(strategy.generate_for_evaluation(tuple(clients)).parameters)


def sgd(lr: float):
    return functools.partial(SGD, lr=lr)


def adam(lr: float):
    return functools.partial(Adam, lr=lr)


# ---------------------------------------------------------------------------------------------------------- heads


@each_head
def test_heads_start_near_the_given_parameters_and_learn_with_all_of_theirs(head) -> None:
    torch.manual_seed(0)
    layer, x_CD, start_P = head(7, 11), torch.randn(5, 7), torch.randn(11)
    layer.start_from(start_P)

    out_CP = layer(x_CD)
    (out_CP * torch.linspace(-1, 1, 55).view(5, 11)).sum().backward()

    assert out_CP.shape == (5, 11)
    assert 0 < (out_CP - start_P).abs().max() < 0.05
    assert torch.pdist(out_CP).min() > 0
    assert all(parameter.grad.abs().max() > 0 for parameter in layer.parameters())
    assert torch.equal(head(7, 11, output_scale=0.0)(x_CD), torch.zeros(5, 11))


@pytest.mark.parametrize(("chunk_size", "num_chunks"), [(4, 3), (11, 1), (100, 1), (1, 11)])
def test_chunks_are_those_of_the_joined_embeddings(chunk_size, num_chunks) -> None:
    layer = ChunkedHead(3, 11, chunk_size=chunk_size, chunk_channels=2, hidden_channels=4)
    x_CD = torch.randn(2, 3)
    layer.start_from(torch.randn(11))

    assert len(layer.chunks_KE) == num_chunks
    for row, x_D in zip(layer(x_CD), x_CD, strict=True):
        pieces = [layer.weight_OH @ layer.hidden(torch.cat([x_D, chunk_E])).relu() for chunk_E in layer.chunks_KE]
        torch.testing.assert_close(row, layer.start_P + torch.cat(pieces)[:11])


def test_factored_heads_differ_along_few_directions() -> None:
    torch.manual_seed(0)
    layer = FactoredHead(6, 20, rank=2).double()
    assert torch.linalg.matrix_rank(layer(torch.randn(9, 6).double())) == 2


@pytest.mark.parametrize(
    ("head", "sizes"),
    [
        (FullHead, {63_000: 6_300_000, 212_000: 21_200_000}),
        (FactoredHead, {63_000: 1_009_600, 212_000: 3_393_600}),
        (ChunkedHead, {63_000: 117_684, 212_000: 122_356}),
    ],
)
def test_sizes_of_the_table(head, sizes) -> None:
    with torch.device("meta"):
        for num_outputs, weights in sizes.items():
            assert sum(p.numel() for p in head(100, num_outputs).parameters()) == num_outputs + weights


def test_heads_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"every size of a FactoredHead must be at least 1.*'rank': 0"):
        FactoredHead(3, 4, rank=0)
    with pytest.raises(ValueError, match=r"generates 4 parameters and cannot start from a tensor of shape \(5,\)"):
        FullHead(3, 4).start_from(torch.zeros(5))


# ---------------------------------------------------------------------------------------------------- server steps


@each_head
@pytest.mark.parametrize("kind", [PFedHN, Panacea])
def test_models_start_near_the_clients_own(kind, head) -> None:
    strategy = tiny(kind, head=head)
    start_P = flatten({name: tensor[None] for name, tensor in strategy.federation.parameters.items()})

    rows_CP = generated(strategy, range(4))

    assert list(strategy.shapes) == list(SHAPES)  # everything is generated
    assert (rows_CP - start_P).abs().max() < 0.05
    assert torch.pdist(rows_CP).min() > 0


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("answered", [(0, 2, 3), (2,)])
def test_linear_hypernetwork_by_hand(answered, num_steps) -> None:
    """θ_i = W v_i + s: the vector-Jacobian products of Δθ can be written down."""
    lr = 0.05
    strategy = tiny(PFedHN, num_encoder_layers=0, num_layers=1, server_optimizer=sgd(lr), num_server_steps=num_steps)
    weight, start, v = (
        t.detach().clone()
        for t in (strategy.last_layer.weight_PD, strategy.last_layer.start_P, strategy.embedding.weight)
    )
    rows = list(answered)

    sent = play(strategy, (0, 2, 3), answered)

    torch.testing.assert_close(sent, v[[0, 2, 3]] @ weight.T + start)
    target = v[rows] @ weight.T + start + flatten(update(strategy, answered).parameters)
    for _ in range(num_steps):
        displacement = target - (v[rows] @ weight.T + start)  # Δθ at the first step
        d_weight, d_start = displacement.T @ v[rows], displacement.sum(dim=0)
        v[rows] += lr / len(rows) * displacement @ weight
        weight, start = weight + lr / len(rows) * d_weight, start + lr / len(rows) * d_start
    torch.testing.assert_close(strategy.last_layer.weight_PD.detach(), weight, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(strategy.last_layer.start_P.detach(), start, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(strategy.embedding.weight.detach(), v, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("answered", [(0, 2), (2,)])
def test_objective_of_panacea_written_out(answered) -> None:
    """One SGD step on eqs. 3 to 5, with loops for sums, Ĝ before W and all ordered pairs."""
    settings = {"server_optimizer": sgd(0.1), "num_server_steps": 1, "relation_weight": 0.7}
    strategy = tiny(num_encoder_layers=2, num_layers=2, **settings)
    parameters = {n: p.detach().clone().requires_grad_() for n, p in strategy.generator.named_parameters()}
    play(strategy, (0, 2), answered)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]

    relation = torch.tensor(RELATION, dtype=torch.float64)
    z = [parameters["embedding.weight"][i] for i in range(4)]
    for layer in range(2):
        mean = [(z[i] + sum(relation[i, j] * z[j] for j in range(4))) / (1 + relation[i].sum()) for i in range(4)]
        z = [linear(f"encoder.{layer}", row).relu() for row in mean]
    loss = torch.zeros((), dtype=torch.float64)
    for i, delta in zip(answered, flatten(update(strategy, answered).parameters), strict=True):
        theta = parameters["head.weight_PD"] @ linear("mlp.0", z[i]).relu() + parameters["head.start_P"]
        loss = loss + (theta.detach() + delta - theta).square().sum() / (2 * len(answered))
    hat = [linear("graph_generator.2", linear("graph_generator.0", row).relu()) for row in z]
    pairs = [(u, v) for u in range(4) for v in range(4) if u != v]
    entropy = [
        -F.logsigmoid(hat[u] @ hat[v]) if relation[u, v] > 0 else -F.logsigmoid(-(hat[u] @ hat[v])) for u, v in pairs
    ]
    reconstruction = sum(entropy) / len(pairs)
    (loss + 0.7 * reconstruction).backward()

    assert strategy.metrics()["server/relation_loss"] == pytest.approx(float(reconstruction.detach()))
    for name, parameter in strategy.generator.named_parameters():
        before = parameters[name]
        torch.testing.assert_close(parameter.detach(), (before - 0.1 * before.grad).detach(), rtol=1e-10, atol=1e-12)
        assert before.grad.abs().max() > 1e-6, name
    assert (strategy.embedding.weight[3] != parameters["embedding.weight"][3]).any()  # moved by its neighbor's update


@each_head
@pytest.mark.parametrize("kind", [PFedHN, Panacea])
def test_a_small_step_brings_the_generated_nearer_to_the_trained(kind, head) -> None:
    strategy = tiny(kind, head=head, server_optimizer=sgd(1e-3), num_server_steps=1)
    before = generated(strategy, range(4))
    trained = before + flatten(update(strategy, range(4)).parameters)

    play(strategy, range(4))

    now = generated(strategy, range(4))
    assert ((trained - now).norm(dim=1) < (trained - before).norm(dim=1)).all()
    assert ((trained - now).norm(dim=1) > 0.9 * (trained - before).norm(dim=1)).all()


def test_more_server_steps_come_nearer_and_do_not_pass_the_trained() -> None:
    distances = []
    for num_steps in (1, 10, 300):
        strategy = tiny(
            num_server_steps=num_steps, relation_weight=0.0, hidden_channels=32, server_optimizer=adam(0.003)
        )
        trained = generated(strategy, range(4)) + flatten(update(strategy, range(4)).parameters)
        play(strategy, range(4))
        assert strategy.num_steps == num_steps
        distances.append(float((trained - generated(strategy, range(4))).norm()))
    assert distances[2] < 0.1 < 0.5 < distances[1] < distances[0]


def test_without_edges_and_generator_panacea_is_pfedhn() -> None:
    federation = federation_of([[0.0] * 4] * 4, training=(0, 1, 3))
    panacea = tiny(Panacea, federation, relation_weight=0.0)
    pfedhn = tiny(PFedHN, federation_of(None, training=(0, 1, 3)))

    def assert_equal(tolerance: float) -> None:
        expected = dict(pfedhn.generator.named_parameters())
        for name, parameter in panacea.generator.named_parameters():
            torch.testing.assert_close(parameter, expected.pop(name), rtol=tolerance, atol=tolerance)
        assert not expected
        torch.testing.assert_close(generated(panacea, range(4)), generated(pfedhn, range(4)), rtol=1e-11, atol=1e-11)

    assert_equal(0.0)
    for round_idx, clients in enumerate([(0, 1, 3), (0, 1, 3), (0, 3), (1,)]):
        for strategy in (panacea, pfedhn):
            play(strategy, clients, seed=round_idx)
        # bit for bit while everyone takes part; then Panacea's sums over all clients have zeros that pFedHN's have not
        assert_equal(0.0 if round_idx < 2 else 1e-12)
    assert list(pfedhn.metrics()) == list(panacea.metrics())


def test_an_encoder_that_is_an_mlp_does_not_look_at_the_graph() -> None:
    settings = {"encoder": "mlp", "relation_weight": 0.0}
    blind, pfedhn, seeing = tiny(**settings), tiny(PFedHN), tiny(relation_weight=0.0)
    assert torch.equal(generated(blind, range(4)), generated(pfedhn, range(4)))
    assert not torch.allclose(generated(seeing, range(4)), generated(blind, range(4)))


# ------------------------------------------------------------------------------------------------- graph generator


@pytest.mark.parametrize("num_pairs", [None, 5])
def test_the_graph_generator_trains_the_encoder_and_not_the_mlp(num_pairs) -> None:
    strategy = tiny(relation_weight=0.3, num_pairs=num_pairs)
    strategy.generate(range(4))

    (loss,) = strategy.extra_losses()
    loss.backward()

    for name, parameter in strategy.generator.named_parameters():
        if name.startswith(("mlp", "head")):
            assert parameter.grad is None, name
        else:
            assert parameter.grad.abs().max() > 0, name
    assert float(loss.detach()) == pytest.approx(0.3 * strategy.metrics()["server/relation_loss"])


def test_reconstruction_by_hand() -> None:
    z_TD = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [-1.0, 1.0]])
    logits = {(0, 1): 2.0, (0, 2): 0.0, (0, 3): -1.0, (1, 2): 0.0, (1, 3): -2.0, (2, 3): 3.0}
    related = {(0, 1), (0, 2), (1, 2), (2, 3)}
    loss = {p: math.log1p(math.exp(-x if p in related else x)) for p, x in logits.items()}
    relation = torch.tensor(RELATION)

    assert float(reconstruction_loss(z_TD, relation)) == pytest.approx(sum(loss.values()) / 6)
    pairs = torch.tensor([[3, 0, 0], [1, 3, 3]])
    expected = (loss[1, 3] + 2 * loss[0, 3]) / 3
    assert float(reconstruction_loss(z_TD, relation, pairs)) == pytest.approx(expected)


def test_a_trained_generator_tells_related_clients() -> None:
    strategy = tiny(relation_weight=1.0, num_server_steps=300, hidden_channels=16)
    play(strategy, range(4))
    assert strategy.metrics()["server/relation_loss"] < 0.3


def test_pairs_are_drawn_by_seed_and_step_and_never_of_one_client() -> None:
    strategy = tiny(num_pairs=2000)
    first = strategy._draw_pairs(4)
    assert torch.equal(strategy._draw_pairs(4), first)
    strategy.num_steps = 1
    assert not torch.equal(strategy._draw_pairs(4), first)
    counts = torch.zeros(4, 4).index_put_(tuple(first), torch.ones(2000), accumulate=True)
    assert not counts.diagonal().any()
    assert counts[~torch.eye(4, dtype=torch.bool)].min() > 120  # 167 expected


def test_mean_aggregation_keeps_isolated_clients() -> None:
    torch.testing.assert_close(mean_aggregation(torch.zeros(3, 3)), torch.eye(3))
    torch.testing.assert_close(mean_aggregation(torch.tensor(RELATION)).sum(dim=1), torch.ones(4))


# ---------------------------------------------------------------------------------------------- clients and results


@pytest.mark.parametrize("kind", [PFedHN, Panacea])
def test_new_clients_enter_with_their_own_draw_and_their_edges(kind) -> None:
    everyone = tiny(kind)
    untrained = everyone.embedding.weight.detach().clone()
    strategy = tiny(
        kind, federation_of(training=(0, 1, 2)), server_optimizer=functools.partial(SGD, lr=0.1, weight_decay=0.1)
    )
    for seed in range(3):
        play(strategy, (0, 1, 2), seed=seed)
    state = {name: tensor.clone() for name, tensor in strategy.generator.state_dict().items()}

    unseen_client = flatten(strategy.configure(strategy.onboarding_stages()[0], (3,)).parameters)
    strategy.onboard(strategy.onboarding_stages()[0], update(strategy, (3,)))

    assert all(torch.equal(tensor, state[name]) for name, tensor in strategy.generator.state_dict().items())
    assert torch.equal(strategy.client_embeddings([3])[0], untrained[3])
    assert not torch.allclose(strategy.embedding.weight, untrained[:3])
    assert torch.equal(generated(strategy, [3, 0])[0], unseen_client[0])

    for name, relation in {
        "none": [[0.0] * 4] * 4,
        "training": [[*row[:3], 0.0] for row in RELATION[:3]] + [[0.0] * 4],
    }.items():
        other = tiny(kind, federation_of(relation, training=(0, 1, 2)))
        other.generator.load_state_dict(state)
        same_training = torch.equal(generated(other, [0, 1, 2]), generated(strategy, [0, 1, 2]))
        assert same_training == (
            kind is PFedHN or name == "training"
        )  # edges to unseen clients do not reach the others
        assert torch.equal(generated(other, [3]), generated(strategy, [3])) == (kind is PFedHN)


@pytest.mark.parametrize("kind", [PFedHN, Panacea])
def test_new_clients_may_enter_as_the_mean_of_their_neighbors(kind) -> None:
    relation = [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 3.0, 0.0], [1.0, 3.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    strategy = tiny(kind, federation_of(relation, training=(0, 1)), unseen_embedding="mean")
    trained = strategy.embedding.weight

    x_CD = strategy.client_embeddings([3, 1, 2])

    torch.testing.assert_close(
        x_CD, torch.stack([trained.mean(dim=0), trained[1], trained[0] / 4 + 3 * trained[1] / 4])
    )
    blind = tiny(PFedHN, federation_of(None, training=(0, 1)), unseen_embedding="mean")
    torch.testing.assert_close(blind.client_embeddings([2])[0], blind.embedding.weight.mean(dim=0))


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("kind", [PFedHN, Panacea])
def test_embeddings_belong_to_names_and_not_to_places(kind, names) -> None:
    order = [2, 0, 3, 1]
    plain, permuted = (tiny(kind, federation_of(order=o, names=names)) for o in (None, order))
    torch.testing.assert_close(permuted.embedding.weight, plain.embedding.weight[order]) if names else None
    for seed in range(2):
        sent = play(plain, range(4), seed=seed)
        rows = flatten(update(plain, range(4), seed).parameters)[order]
        stage = permuted.stages(0)[0]
        moved = flatten(permuted.configure(stage, range(4)).parameters)
        assert torch.allclose(moved, sent[order], rtol=1e-9, atol=1e-9) == names
        permuted.aggregate(stage, Payload(clients=(0, 1, 2, 3), parameters=unflatten(rows, permuted.shapes)))


@pytest.mark.parametrize("kind", [PFedHN, Panacea, functools.partial(Panacea, num_pairs=3)])
def test_state_round_trip(kind) -> None:
    strategy, resumed = tiny(kind), tiny(kind)
    play(strategy, (0, 1, 3))
    resumed.load_state_dict(copy.deepcopy(strategy.state_dict()))
    assert resumed.state_dict().keys() == strategy.state_dict().keys()
    assert resumed.metrics() == strategy.metrics()

    for other in (strategy, resumed):
        play(other, (0, 2), seed=2)

    assert torch.equal(generated(strategy, range(4)), generated(resumed, range(4)))
    assert resumed.metrics() == strategy.metrics()


def test_the_generated_model_is_the_result() -> None:
    strategy = tiny()
    evaluations = strategy.evaluations((0, 2))
    assert list(evaluations) == ["", "trained/"]
    assert torch.equal(flatten(evaluations[""].payload.parameters), generated(strategy, (0, 2)))
    assert evaluations["trained/"].prefer_trained
    assert list(tiny(personal=("head.*",)).shapes) == ["body.weight", "body.bias"]


def test_who_never_trained_trains_first() -> None:
    """Only of clients that took part is the own model what local training made; unseen clients train when they join."""
    strategy = tiny(federation=federation_of(training=(0, 2, 3)))
    play(strategy, (0, 2, 3), answered=(2,))
    trained = strategy.evaluations((0, 2, 3))["trained/"]
    assert sorted(trained.others) == [0, 3]
    (first,) = {id(each): each for each in trained.others.values()}.values()
    assert first.payload.clients == (0, 3)
    assert first.tuning.num_epochs == strategy.num_epochs
    assert [clients for _, clients in trained.ways((0, 2, 3))] == [[0, 3], [2]]
    assert not strategy.evaluations((1,))["trained/"].others
    play(strategy, (0, 3))
    assert not strategy.evaluations((0, 2, 3))["trained/"].others


def test_matrices_show_embeddings_and_relations() -> None:
    strategy = tiny(federation=federation_of(training=(0, 2, 3)))
    matrices = strategy.matrices()
    assert list(matrices) == ["embedding", "relation"]
    assert list(tiny(PFedHN).matrices()) == ["embedding"]
    torch.testing.assert_close(matrices["embedding"].diagonal(), torch.ones(3, dtype=torch.float64))
    assert not matrices["embedding"].requires_grad
    torch.testing.assert_close(matrices["relation"][2], torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))


def test_evaluating_between_sending_and_answering_changes_nothing() -> None:
    results = []
    for evaluate in (False, True):
        strategy = tiny()
        stage = strategy.stages(0)[0]
        strategy.configure(stage, (0, 1))
        if evaluate:
            strategy.matrices()
            generated(strategy, range(4))
        strategy.aggregate(stage, update(strategy, (0, 1)))
        results.append(generated(strategy, range(4)))
    assert torch.equal(*results)


def test_a_missing_relation_graph_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"Panacea needs a client relation graph.*set data.relation_graph.*PFedHN"):
        tiny(federation=federation_of(None))
    with pytest.raises(ValueError, match=r"strategy.relation_weight needs pairs"):
        tiny(federation=federation_of(training=(1,)))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (PFedHN, {"num_layers": 0}, "strategy.num_layers must be at least 1"),
        (PFedHN, {"num_encoder_layers": -1}, "strategy.num_encoder_layers must not be negative"),
        (Panacea, {"num_encoder_layers": 0}, "strategy.num_encoder_layers must be at least 1"),
        (Panacea, {"relation_weight": -1.0}, "strategy.relation_weight must not be negative"),
        (Panacea, {"num_pairs": 0}, "strategy.num_pairs is 0"),
        (Panacea, {"num_pairs": 3, "relation_weight": 0.0}, "leaves no pairs to draw"),
    ],
)
def test_settings_out_of_range(kind, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)
