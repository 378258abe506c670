import pickle

import pytest
import torch
from torch import Tensor

from fl_lightning.relations.edges import opposite_pairs
from fl_lightning.strategies.hypernetwork.collaboration_graph import knn_graph
from fl_lightning.strategies.hypernetwork.diffusion import GATDiffusion, GCNDiffusion, NoDiffusion
from fl_lightning.strategies.hypernetwork.sheaf import (
    Sheaf,
    SheafDiffusion,
    inverse_square_root,
    rotations,
    sheaf_laplacian,
)

FAMILIES = ["diagonal", "bundle", "general"]
OFFSET = 1e-3


def embeddings(num_clients: int = 7, channels: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(num_clients)
    return torch.randn(num_clients, channels, generator=generator, dtype=torch.float64)


def diffusion(restriction_map: str, stalk_dimension: int = 3, **settings: object) -> SheafDiffusion:
    torch.manual_seed(0)
    return SheafDiffusion(
        6,
        restriction_map=restriction_map,
        stalk_dimension=stalk_dimension,
        hidden_channels=4,
        offset=OFFSET,
        **settings,
    ).double()


def learned_sheaf(restriction_map: str, graph: Tensor, x_CD: Tensor) -> Sheaf:
    model = diffusion(restriction_map)
    return model.learners[0](model.encoder(x_CD), graph, opposite_pairs(graph, len(x_CD)))


def as_matrix(sheaf: Sheaf, num_clients: int, stalk_dimension: int) -> Tensor:
    """Delta as a dense matrix, from its application along the edges to every unit vector."""
    units = torch.eye(num_clients * stalk_dimension, dtype=torch.float64).unflatten(0, (num_clients, stalk_dimension))
    return sheaf.normalized_laplacian(units).flatten(0, 1)


@pytest.mark.parametrize("restriction_map", FAMILIES)
@pytest.mark.parametrize("num_neighbors", [2, 6])
def test_application_along_edges_equals_the_dense_laplacian(restriction_map: str, num_neighbors: int) -> None:
    x = embeddings()
    graph = knn_graph(x, num_neighbors)
    sheaf = learned_sheaf(restriction_map, graph, x)

    laplacian = sheaf_laplacian(sheaf.maps, graph, 7)
    same_client = torch.block_diag(*[torch.ones(3, 3, dtype=torch.float64)] * 7)
    value, vector = torch.linalg.eigh(laplacian * same_client)
    inverse_root = (vector * (value + OFFSET).rsqrt()) @ vector.T

    torch.testing.assert_close(as_matrix(sheaf, 7, 3), inverse_root @ laplacian @ inverse_root, atol=1e-10, rtol=0)


@pytest.mark.parametrize("restriction_map", FAMILIES)
def test_laplacians_are_positive_semidefinite_and_the_normalized_one_is_at_most_2(restriction_map: str) -> None:
    x = embeddings()
    graph = knn_graph(x, 2)
    sheaf = learned_sheaf(restriction_map, graph, x)
    laplacian, normalized = sheaf_laplacian(sheaf.maps, graph, 7), as_matrix(sheaf, 7, 3)

    torch.testing.assert_close(laplacian, laplacian.T, atol=1e-12, rtol=0)
    torch.testing.assert_close(normalized, normalized.T, atol=1e-12, rtol=0)
    assert torch.linalg.eigvalsh(laplacian).min() > -1e-12
    assert torch.linalg.eigvalsh(normalized).min() > -1e-12
    assert torch.linalg.eigvalsh(normalized).max() <= 2


def test_bundle_maps_are_rotations() -> None:
    maps = rotations(embeddings(5, 9).unflatten(1, (3, 3)))

    torch.testing.assert_close(maps.mT @ maps, torch.eye(3, dtype=torch.float64).expand(5, 3, 3))
    torch.testing.assert_close(torch.linalg.det(maps), torch.ones(5, dtype=torch.float64))
    assert (maps - torch.eye(3, dtype=torch.float64)).abs().max() > 0.1


@pytest.mark.parametrize("restriction_map", ["identity", "bundle"])
def test_constant_maps_give_the_normalized_graph_laplacian(restriction_map: str) -> None:
    """On a path of three clients, and for a bundle of one-dimensional stalks, whose only map is 1."""
    graph = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    x = embeddings(3)
    if restriction_map == "identity":
        ones, degree = torch.ones(4, 1, dtype=torch.float64), torch.tensor([[1.0], [2.0], [1.0]], dtype=torch.float64)
        sheaf = Sheaf(ones, graph[0], opposite_pairs(graph, 3), inverse_square_root(degree, 1e-14))
    else:
        model = diffusion("bundle", stalk_dimension=1)
        model.learners[0].offset = 1e-14
        sheaf = model.learners[0](model.encoder(x), graph, opposite_pairs(graph, 3))
    half = 0.5**0.5

    expected = torch.tensor([[1, -half, 0], [-half, 1, -half], [0, -half, 1]], dtype=torch.float64)

    torch.testing.assert_close(as_matrix(sheaf, 3, 1), expected, atol=1e-12, rtol=0)


def test_sections_that_agree_on_every_edge_are_harmonic() -> None:
    """F of n in e = O_n for all its edges makes x_n = O_n^T c agree with all neighbors."""
    graph = knn_graph(embeddings(), 2)
    frame = rotations(embeddings(7, 9).unflatten(1, (3, 3)))
    section = (frame.mT @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)).flatten()
    laplacian = sheaf_laplacian(frame[graph[0]], graph, 7)

    torch.testing.assert_close(laplacian @ section, torch.zeros(21, dtype=torch.float64), atol=1e-12, rtol=0)
    assert torch.linalg.matrix_rank(laplacian) == 18


@pytest.mark.parametrize("degenerate", [False, True])
def test_inverse_square_root_has_exact_gradients(degenerate: bool) -> None:
    if degenerate:  # eigenvalues (4, 4, 4), (1, 1, 9) and, from rank one, (0, 0, 1)
        plain = torch.stack(
            [2 * torch.eye(3), torch.diag(torch.tensor([1.0, 1, 3])), torch.eye(3)[0].outer(torch.ones(3))]
        )
        factor = plain.double()
    else:
        factor = embeddings(4, 9).unflatten(1, (3, 3))
    factor.requires_grad_()
    root = inverse_square_root(factor.mT @ factor, 0.3)
    shifted = factor.mT @ factor + 0.3 * torch.eye(3, dtype=torch.float64)

    torch.testing.assert_close(root @ shifted @ root, torch.eye(3, dtype=torch.float64).expand_as(root))
    assert torch.autograd.gradcheck(lambda block: inverse_square_root(block.mT @ block, 0.3), (factor,))


@pytest.mark.parametrize("restriction_map", FAMILIES)
def test_diffusion_has_exact_gradients(restriction_map: str) -> None:
    x = embeddings(4).requires_grad_()
    graph, model = knn_graph(x, 2), diffusion(restriction_map, stalk_dimension=2)

    assert torch.autograd.gradcheck(lambda x_CD: model(x_CD, graph), (x,))


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize(("restriction_map", "stalk_dimension"), [("diagonal", 1), *((name, 2) for name in FAMILIES)])
def test_every_parameter_learns(restriction_map: str, stalk_dimension: int, linear: bool) -> None:
    x = embeddings()
    model = diffusion(restriction_map, stalk_dimension, linear=linear, num_layers=3, out_channels=5)

    output = model(x, knn_graph(x, 3))
    (output * embeddings(7, 5)).sum().backward()

    assert output.shape == (7, 5)
    assert len(model.learners) == (1 if linear else 3)
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.abs().max() > 1e-8] == []


@pytest.mark.parametrize("restriction_map", FAMILIES)
def test_one_layer_is_the_printed_equation(restriction_map: str) -> None:
    x = embeddings()
    graph, model = knn_graph(x, 2), diffusion(restriction_map, num_layers=1)
    layer = model.layers[0]
    torch.nn.init.normal_(layer.stalk_mixing_SS)
    torch.nn.init.constant_(layer.gain_S1, 0.5)
    x_0 = model.encoder(x)
    delta = as_matrix(learned_sheaf(restriction_map, graph, x), 7, 3)

    kronecker = torch.kron(torch.eye(7, dtype=torch.float64), layer.stalk_mixing_SS)
    moved = torch.nn.functional.elu(delta @ kronecker @ x_0.flatten(0, 1) @ layer.channel_mixing_HH)
    expected = model.decoder((1.4621171572600098 * x_0.flatten(0, 1) - moved).view(7, -1))  # 1 + tanh(0.5)

    torch.testing.assert_close(model(x, graph), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("restriction_map", FAMILIES)
def test_permuting_clients_permutes_the_result(restriction_map: str) -> None:
    x = embeddings()
    graph, model = knn_graph(x, 2), diffusion(restriction_map)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(3))

    permuted = model(x[order], order.argsort()[graph])

    torch.testing.assert_close(permuted, model(x, graph)[order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("restriction_map", FAMILIES)
def test_a_client_without_edges_stays_where_it_is(restriction_map: str) -> None:
    x = embeddings(3)
    graph, model = torch.tensor([[0, 1], [1, 0]]), diffusion(restriction_map)

    output = model(x, graph)
    output.sum().backward()

    torch.testing.assert_close(output[2], model.decoder(model.encoder(x)[2].flatten()))
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert torch.equal(model(x, graph[:, :0])[2], output[2])


@pytest.mark.parametrize("restriction_map", FAMILIES)
def test_a_pickled_copy_computes_the_same(restriction_map: str) -> None:
    x = embeddings()
    graph, model = knn_graph(x, 2), diffusion(restriction_map)

    assert torch.equal(pickle.loads(pickle.dumps(model))(x, graph), model(x, graph))


def test_maps_of_zero_have_finite_gradients() -> None:
    model, x = diffusion("general"), embeddings()
    for learner in model.learners:
        torch.nn.init.zeros_(learner.numbers.weight)
        torch.nn.init.zeros_(learner.numbers.bias)

    model(x, knn_graph(x, 2)).sum().backward()

    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match=r"restriction_map='dense' is unknown. Choose one of \['bundle'"):
        diffusion("dense")
    with pytest.raises(ValueError, match="'stalk_dimension': 0"):
        diffusion("diagonal", stalk_dimension=0)
    with pytest.raises(ValueError, match="undirected"):
        diffusion("diagonal")(embeddings(3), torch.tensor([[0], [1]]))


@pytest.mark.parametrize("ablation", [GCNDiffusion, GATDiffusion])
def test_convolutions_take_the_place_of_the_sheaf(ablation: type[GCNDiffusion] | type[GATDiffusion]) -> None:
    torch.manual_seed(0)
    x = embeddings()
    graph, model = knn_graph(x, 2), ablation(6, hidden_channels=4, out_channels=5).double()

    output = model(x, graph)
    (output * embeddings(7, 5)).sum().backward()

    assert output.shape == (7, 5)
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
    with pytest.raises(ValueError, match="num_layers"):
        ablation(num_layers=0)


def test_no_diffusion_ignores_the_graph() -> None:
    x = embeddings()

    assert NoDiffusion(6)(x, knn_graph(x, 2)) is x
    assert NoDiffusion(6, out_channels=5).double()(x, knn_graph(x, 2)).shape == (7, 5)
