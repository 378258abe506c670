import gzip
from pathlib import Path

import pytest
import torch

from fl_lightning import Payload
from fl_lightning.federation import Federation
from fl_lightning.relations.topology import (
    BarabasiAlbert,
    Complete,
    EdgeListFile,
    ErdosRenyi,
    Ring,
    Star,
    Topology,
    WattsStrogatz,
)
from fl_lightning.strategies.decentralized.dpsgd import DPSGD, metropolis_hastings


@pytest.mark.parametrize(
    ("topology", "num_edges"),
    [(Ring(), 12), (Complete(), 66), (Star(), 11), (WattsStrogatz(), 24), (BarabasiAlbert(), 20), (ErdosRenyi(), None)],
    ids=lambda value: type(value).__name__ if isinstance(value, Topology) else "",
)
def test_connected_symmetric_and_seeded(topology: Topology, num_edges: int | None) -> None:
    adjacency = topology(12, 0)
    assert torch.equal(adjacency, adjacency.T)
    assert not adjacency.diagonal().any()
    assert num_edges is None or int(adjacency.sum()) == 2 * num_edges
    assert torch.linalg.matrix_power(adjacency.double() + torch.eye(12, dtype=torch.float64), 11).min() > 0
    assert torch.equal(adjacency, topology(12, 0))
    assert any(not torch.equal(adjacency, topology(12, seed)) for seed in range(1, 6)) == (
        isinstance(topology, ErdosRenyi | WattsStrogatz | BarabasiAlbert)
    )


def test_own_seed_goes_before_the_runs() -> None:
    assert torch.equal(ErdosRenyi(seed=3)(10, 0), ErdosRenyi()(10, 3))


def test_file_and_its_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_text("0 1\n1 2\n2 2\n")
    assert EdgeListFile(str(path))(3, 0).int().tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    with pytest.raises(ValueError, match=r"names clients \[2\], but there are 2"):
        EdgeListFile(str(path))(2, 0)
    with pytest.raises(ValueError, match="is not connected"):
        EdgeListFile(str(path))(4, 0)
    with pytest.raises(ValueError, match="is not a file"):
        EdgeListFile(str(tmp_path / "missing.txt"))
    path.write_text("# of networkx\n0 1 {}\n\n1 2 {'weight': 3}  # far\n")
    assert int(EdgeListFile(str(path))(3, 0).sum()) == 4
    (tmp_path / "edges.txt.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert int(EdgeListFile(str(tmp_path / "edges.txt.gz"))(3, 0).sum()) == 4


@pytest.mark.parametrize("line", [b"a b", b"1.5 2", b"-1 2", b"1", b"\xff\xfe 1", "1 \u00b2".encode()])
def test_lines_that_are_no_edges_are_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "edges.txt"
    path.write_bytes(b"0 1\n" + line)
    with pytest.raises(ValueError, match=r"edges\.txt, line 2: .* has not the numbers of two clients"):
        EdgeListFile(str(path))(3, 0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ErdosRenyi(edge_probability=0), "edge_probability must be in"),
        (lambda: WattsStrogatz(num_neighbors=3), "must be even"),
        (lambda: WattsStrogatz()(4, 0), "num_neighbors is 4, but there are 4 clients"),
        (lambda: BarabasiAlbert(num_edges=0), "must be at least 1"),
    ],
)
def test_impossible_settings(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


def test_metropolis_hastings_by_hand() -> None:
    path = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]]).bool()
    expected = torch.tensor([[2, 1, 0], [1, 1, 1], [0, 1, 2]], dtype=torch.float64) / 3
    assert torch.allclose(metropolis_hastings(path), expected)


def test_dpsgd_combines_with_the_neighbors_that_answered() -> None:
    strategy = DPSGD(topology=Ring())
    federation = Federation(
        num_clients=4,
        training_clients=(0, 1, 2, 3),
        num_features=1,
        parameters={"w": torch.zeros(2)},
        seed=0,
        device=torch.device("cpu"),
    )
    strategy.setup(federation)
    stage = strategy.stages(0)[0]
    values = torch.tensor([[3.0, -3.0], [6.0, 0.0], [-9.0, 9.0]])
    upload = Payload(clients=(0, 1, 3), parameters={"flat": values})  # on the ring 0 has both, 1 and 3 only 0
    strategy.aggregate(stage, upload)
    expected = torch.tensor([[0.0, 2.0], [5.0, -1.0], [0.0, 0.0], [-5.0, 5.0]])
    assert torch.allclose(strategy.configure(stage, range(4)).parameters["flat"], expected, atol=1e-6)
    assert strategy.peer_bytes(stage, upload) == [2 * 2 * 4, 2 * 4, 2 * 4]  # two float32 along each directed edge
