import pytest
import torch

from fl_lightning.round.payload import Payload, concatenate, finite_rows, flatten, unflatten


def payload(*clients: int, **extras: torch.Tensor) -> Payload:
    column = torch.tensor(clients, dtype=torch.float64)
    return Payload(
        clients=clients,
        parameters={"w": column[:, None, None] * torch.ones(2, 3, dtype=torch.float64), "b": -column},
        extras=extras,
        num_examples=torch.tensor(clients) * 10,
    )


def test_attached_tensors_are_refused() -> None:
    weight = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match=r"'convs.0.weight' is attached to a graph; detach it"):
        Payload(clients=(0, 1), parameters={"convs.0.weight": weight * 2})
    with pytest.raises(ValueError, match="'embedding' is attached"):
        Payload(clients=(0, 1), extras={"embedding": weight})


def test_bytes_on_the_wire() -> None:
    sent = payload(1, 2, embedding=torch.zeros(2, 5, dtype=torch.float16))

    assert sent.num_bytes == 2 * (6 * 8 + 8 + 5 * 2)
    assert Payload(clients=()).num_bytes == 0


def test_rows_follow_the_clients_asked_for() -> None:
    sent = payload(1, 4, 6, moments=torch.tensor([10.0, 40.0, 60.0]))

    picked = sent.rows([6, 1])

    assert picked.clients == (6, 1)
    assert picked.parameters["b"].tolist() == [-6, -1]
    assert picked.parameters["w"][:, 1, 2].tolist() == [6, 1]
    assert picked.extras["moments"].tolist() == [60, 10]
    assert picked.num_examples.tolist() == [60, 10]
    assert sent.rows((1, 4, 6)) is sent
    with pytest.raises(KeyError):
        sent.rows([2])


def test_rows_of_what_all_clients_share_are_not_copied() -> None:
    model = torch.arange(3.0)
    sent = Payload(clients=(2, 5, 7), parameters={"w": model.expand(3, 3)})

    picked = sent.rows([7, 2]).parameters["w"]

    assert picked.shape == (2, 3)
    assert picked.untyped_storage().data_ptr() == model.untyped_storage().data_ptr()


def test_a_single_part_out_of_order_is_put_in_order() -> None:
    joined = concatenate([payload(5, 1)])
    assert joined.clients == (1, 5)
    assert joined.parameters["b"].tolist() == [-1, -5]


def test_parts_are_collected_as_they_come() -> None:
    shapes = []

    def allocate(shape, dtype, device):
        shapes.append(tuple(shape))
        return torch.zeros(*shape, dtype=dtype, device=device)

    parts = [payload(8, 3, moments=torch.tensor([8.0, 3.0])), payload(5, moments=torch.tensor([5.0]))]
    whole = Payload.collect(iter(parts), (3, 4, 5, 8), allocate)

    assert shapes == [(4, 2, 3), (4,), (4,), (4,)]
    assert whole.clients == (3, 5, 8)  # client 4 failed
    assert whole.parameters["b"].tolist() == [-3, -5, -8]
    assert whole.extras["moments"].tolist() == [3, 5, 8]
    assert whole.num_examples.tolist() == [30, 50, 80]
    assert Payload.collect([parts[1]], (5,), allocate) is parts[1]
    assert Payload.collect([], (5,), allocate).clients == ()


def test_concatenation_sorts_clients_and_matches_by_name() -> None:
    left = payload(3, 8, moments=torch.tensor([3.0, 8.0]))
    right = payload(1, 5, moments=torch.tensor([1.0, 5.0]))
    swapped = Payload(
        clients=right.clients,
        parameters=dict(reversed(right.parameters.items())),
        extras=right.extras,
        num_examples=right.num_examples,
    )

    joined = concatenate([left, Payload(clients=()), swapped])

    assert joined.clients == (1, 3, 5, 8)
    assert joined.parameters["b"].tolist() == [-1, -3, -5, -8]
    assert joined.parameters["w"].shape == (4, 2, 3)
    assert joined.extras["moments"].tolist() == [1, 3, 5, 8]
    assert joined.num_examples.tolist() == [10, 30, 50, 80]
    assert concatenate([]).clients == ()


def test_concatenation_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"\['moments'\] are not in all"):
        concatenate([payload(0), payload(1, moments=torch.ones(1))])


def test_flatten_lays_each_client_in_a_row() -> None:
    sent = payload(1, 2)

    matrix = flatten(sent.parameters)
    back = unflatten(matrix, {"w": torch.Size([2, 3]), "b": torch.Size([])})

    assert matrix.tolist() == [[1.0] * 6 + [-1.0], [2.0] * 6 + [-2.0]]
    assert all(torch.equal(back[name], tensor) for name, tensor in sent.parameters.items())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_finite_rows(bad) -> None:
    matrix, scalars = torch.ones(4, 2, 3), torch.ones(4)
    matrix[1, 0, 2] = bad
    scalars[3] = bad
    both_signs = torch.ones(4, 2)
    both_signs[0] = torch.tensor([torch.inf, -torch.inf])

    assert finite_rows([matrix, scalars]).tolist() == [True, False, True, False]
    assert finite_rows([both_signs]).tolist() == [False, True, True, True]
    assert finite_rows([torch.tensor([1, 2])]).tolist() == [True, True]


def test_outputs_of_different_shapes_are_named() -> None:
    parts = [Payload(clients=(c,), extras={"prototypes": torch.zeros(1, 3, width)}) for c, width in ((0, 8), (1, 16))]
    with pytest.raises(ValueError, match=r"clients sent 'prototypes' in different shapes, \(3, 8\), \(3, 16\)"):
        concatenate(parts)


def test_a_output_may_not_hide_a_parameter() -> None:
    with pytest.raises(ValueError, match=r"\['weight'\] name parameters and client outputs"):
        Payload(clients=(0,), parameters={"weight": torch.ones(1)}, extras={"weight": torch.zeros(1)})
    both = {"weight": torch.ones(1)}
    assert Payload(clients=(0,), parameters=both, extras=both).num_bytes == 4
