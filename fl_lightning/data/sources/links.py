"""The links of a graph as what is learned: any source of a graph, and the graphs of a benchmark.

Source: Zhang, Chen, "Link Prediction Based on Graph Neural Networks" (SEAL), NeurIPS 2018, for the benchmark graphs.

Shape legend: N nodes, F features, U undirected edges, P pairs.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from scipy.io import loadmat
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import is_undirected

from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.pairs import ClientPairs
from fl_lightning.data.allocation import Allocation, Asked, masks_of
from fl_lightning.data.partition.cut import CutGraph, cache_key
from fl_lightning.data.partition.links import (
    Candidates,
    LinkDraws,
    Negatives,
    held_nodes,
    link_record,
    undirected_edges,
)
from fl_lightning.data.partition.partitioners import Partitioner
from fl_lightning.data.partition.record import PartitionRecord
from fl_lightning.data.partition.subgraphs import client_graphs
from fl_lightning.data.partition.table import PartitionTable
from fl_lightning.data.preparation import Preparation, checked_edges, completed, dropped, prepare_graph
from fl_lightning.data.settings import check_size
from fl_lightning.data.sketch import sketch
from fl_lightning.data.sources.array_file import one_line
from fl_lightning.data.sources.base import GraphSource, Source
from fl_lightning.data.split import GlobalSplit, Role, Splitter
from fl_lightning.data.structure import structure_features
from fl_lightning.tasks import LinkPrediction

#: What nodes are described by.
Features = Literal["own", "structure", "identity"]


class Links(Source):
    """The links of a graph: whether two nodes of a client are linked.

    Every undirected edge between two nodes of a client is a link with one role. Messages are sent along the training
    links and no others, in both directions. Pairs of nodes of different clients are no candidates, as no client sees
    both, unless ``candidates`` says so: an edge between clients is then a link of both of them, with one role, and each
    has the other's node without its features.

    A graph needs no labels. It may have ``edge_time``, a number for each edge, by which links are ordered for
    ``ChronologicalSplit``; ``val_edge_index`` and ``test_edge_index`` (2, any number), for ``GivenSplit``: the other
    edges train; and ``edge_type``, the number of each edge's relation, which the decoder ``distmult`` of
    :class:`~fl_lightning.models.LinkGCN` tells apart. What edges carry is then of ``edge_index``, ``val_edge_index``
    and ``test_edge_index``, one after another. An edge that is named several times, in whichever direction, is tested
    on if it is among the tested ones, validated on if among those, and trained on otherwise.

    Args:
        source: The graph.
        features: ``own``, those of the graph; ``structure``, degrees and clustering along the edges of messages
            (:mod:`fl_lightning.data.structure`); ``identity``, a one for the node itself, so that the first layer of a
            net has a learned embedding for each node.
        negatives: How pairs without a link are drawn: ``uniform``, by ``degree``, or ``hard``, with common neighbors.
        num_negatives: Negatives for each link in training, drawn for every step.
        pool_size: Pairs in each of a client's fixed pools for validation and test, at most; none where it has no links
            to compare them with.
        message_fraction: Share of the training links along which messages are sent; below 1 only the others are trained
            on, so that no training link sees itself.
        candidates: ``own``, pairs of a client's own nodes; ``across``, also those of an own node with a node of another
            client to which the client has an edge. Nodes then have the features ``structure`` or ``identity``, as the
            features of other clients' nodes are not known; the splitter must give a link one role for all clients.

    Raises:
        ValueError: A setting is out of range, the source is not of a graph, or the graph is directed.
    """

    def __init__(
        self,
        source: GraphSource,
        features: Features = "own",
        negatives: Negatives = "uniform",
        num_negatives: int = 1,
        pool_size: int = 500,
        message_fraction: float = 1.0,
        candidates: Candidates = "own",
    ) -> None:
        if not isinstance(source, GraphSource):
            raise ValueError(f"Links.source is {type(source).__name__}: give the source of a graph")
        if features not in get_args(Features):
            raise ValueError(f"features must be {' or '.join(get_args(Features))}, got {features!r}")
        self.source, self.features = source, features
        self.draws = LinkDraws(
            negatives=negatives,
            num_negatives=num_negatives,
            pool_size=pool_size,
            message_fraction=message_fraction,
            candidates=candidates,
        )
        if candidates == "across" and features == "own":
            raise ValueError(
                "candidates: across pairs own nodes with those of other clients, whose features are not known: set "
                "features to structure or identity"
            )

    def __str__(self) -> str:
        """With the graph."""
        return f"links of {self.source}"

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return dataclasses.asdict(self.draws)

    def identity(self) -> dict[str, Any]:
        """What the graph depends on, and the settings."""
        return {
            "source": type(self).__name__,
            "graph": self.source.identity(),
            "preparation": self.source.preparation.identity(),
            "features": self.features,
            **self.draws.identity(),
        }

    def partitioner_for(self, given: Partitioner | None) -> Partitioner:
        """That of the graph."""
        return self.source.partitioner_for(given)

    @property
    def default_splitter(self) -> Splitter:
        """85 % of the links train, 5 % validate, 10 % test, unless the graph comes with another split."""
        return self.source.splitter_of_links or GlobalSplit(train=0.85, val=0.05)

    def is_cut_by(self, partitioner: Partitioner | None) -> bool:
        """As for the graph."""
        return self.source.is_cut_by(partitioner)

    def preparation_of(self, client: int) -> Preparation:
        """That of the graph."""
        return self.source.preparation_of(client)

    def described(self, graph: ClientGraph, num_nodes: int) -> ClientGraph:
        """A graph with the features of the setting, along the edges that it has.

        Args:
            graph: The graph, with features of its own.
            num_nodes: Nodes of the global graph.
        """
        if self.features == "own":
            return graph
        if self.features == "structure":
            return dataclasses.replace(graph, x_NF=structure_features(graph.edge_index_2E, graph.num_nodes))
        x_NF = torch.zeros(graph.num_nodes, num_nodes)
        x_NF[torch.arange(graph.num_nodes), graph.node_idx_N] = 1.0
        return dataclasses.replace(graph, x_NF=x_NF)

    def whole_graph(self, asked: Asked) -> Data:
        """The prepared graph, with all links."""
        return self._graph(asked)[1]

    def _graph(self, asked: Asked) -> tuple[Data, Data]:
        """The raw graph and the prepared one."""
        raw = self.source.load(asked.root, asked.cache_dir).clone()
        given = _add_given(raw, str(self))
        raw = completed(raw, ("y",) if self.features == "own" else ("x", "y"))
        prepared = prepare_graph(raw, self.source.what_is_left, str(self), warns=not self.source.benchmark)
        made_undirected = self.source.what_is_left.undirected
        if not made_undirected and not is_undirected(prepared.edge_index, num_nodes=prepared.num_nodes):
            raise ValueError(
                f"{self}: some edges go one way only, but Links is for undirected graphs: set undirected to true on "
                "the source of each graph"
            )
        edge_U2, number = undirected_edges(prepared), raw.num_nodes or 0
        code_U = _codes(prepared.source_idx[edge_U2], number)
        if (time_E := raw.get("edge_time")) is not None:
            prepared.link_time = _first_times(raw, time_E, code_U, str(self))
        if (type_E := raw.get("edge_type")) is not None:
            prepared.link_relation = _relations(raw, type_E, code_U, str(self))
        if given:
            prepared.link_role = torch.full((len(code_U),), Role.TRAIN, dtype=torch.int8)
            for role, edges in given.items():
                prepared.link_role[torch.isin(code_U, _codes(edges.t(), number))] = role
        return raw, prepared

    def prepare(self, asked: Asked) -> CutGraph:
        """The graph, and its partition with roles and pools as they are cached."""
        raw, data = self._graph(asked)
        assert asked.partitioner is not None
        wanted = asked.splitter.link_attributes
        if wanted and all(raw.get(name) is None for name in wanted):
            raise ValueError(
                f"{self}: data.splitter goes by {' or '.join(wanted)} of the graph, which has none: give it one, or "
                "take GlobalSplit"
            )
        if asked.partitioner.needs_classes and data.y.is_floating_point():
            raise ValueError(
                f"{type(asked.partitioner).__name__} shares nodes out by their classes, but these have numbers or "
                "labels: choose another partitioner, such as MetisPartitioner"
            )
        path = asked.cache_dir / "partitions" / f"{cache_key(data, asked, self._identity(asked))}.pt"
        record = PartitionRecord.load(path)
        if record is None:
            record = link_record(data, asked, self.draws)
            record.save(path)
        else:
            linked = (pair_P3[:, 2] > 0 for pair_P3 in record.pairs)
            asked.splitter.say_what_is_lacking([role_P[P] for role_P, P in zip(record.roles, linked, strict=True)])
        relation_U = data.get("link_relation")
        num_relations = 1 if relation_U is None else int(relation_U.max()) + 1
        task = LinkPrediction(num_relations=num_relations, across_clients=self.draws.candidates == "across")
        return CutGraph(data=data, task=task, record=record, dropped=dropped(raw, data, self.source.preparation))

    def _identity(self, asked: Asked) -> dict[str, Any]:
        assert asked.partitioner is not None
        return asked.identity(self.identity(), partitioner=asked.partitioner.identity())

    def allocate(self, asked: Asked, prepared: CutGraph) -> Allocation:
        """The pairs of each client."""
        data, record = prepared.data, prepared.record
        held = held_nodes(record.node_idx, record.cross_edges)
        nobody = tuple(torch.zeros(len(nodes), dtype=torch.int8) for nodes in held)
        user_names = getattr(asked.partitioner, "attribute", None) == self.source.clients_by
        names = self.source.client_names if user_names else None
        cut = dataclasses.replace(record, node_idx=held, roles=nobody, cross_edges=())
        graphs, edges_lost = client_graphs(data, cut, names)
        if record.cross_edges:
            edges_lost = (0,) * len(graphs)
        if self.features == "identity":
            check_size(sum(graph.num_nodes for graph in graphs) * (data.num_nodes or 0), "features: identity")
        clients = tuple(
            self._client(graph, pair_P3, role_P, candidate_M2, data.num_nodes or 0)
            for graph, pair_P3, role_P, candidate_M2 in zip(
                graphs, record.pairs, record.roles, record.candidates, strict=True
            )
        )
        index_N = data.get("own_idx", data.source_idx)
        return Allocation(
            task=prepared.task,
            clients=clients,
            num_outputs=1,
            source_idx=tuple(index_N[each.graph.node_idx_N][each.pair_P2] for each in clients),
            partition_hash=record.content_hash(self._identity(asked)),
            features=sketch(data.x) if self.features == "own" else "",
            groups=record.groups(),
            edges_lost=edges_lost,
            dropped=prepared.dropped,
        )

    def _client(
        self, graph: ClientGraph, pair_P3: Tensor, role_P: Tensor, candidate_M2: Tensor, num_nodes: int
    ) -> ClientPairs:
        linked_P = pair_P3[:, 2] > 0
        message_P = pair_P3[:, 2] == 2
        for role in (Role.VAL, Role.TEST):  # pairs without a link alone measure nothing
            if not bool((role_P[linked_P] == role).any()):
                role_P = torch.where(role_P == role, torch.tensor(Role.UNUSED, dtype=role_P.dtype), role_P)
        edge_E2 = graph.edge_index_2E.sort(dim=0).values.t()
        sends_E = torch.isin(_codes(edge_E2, graph.num_nodes), _codes(pair_P3[message_P, :2], graph.num_nodes))
        sending = dataclasses.replace(
            graph,
            edge_index_2E=graph.edge_index_2E[:, sends_E],
            edge_weight_E=None if graph.edge_weight_E is None else graph.edge_weight_E[sends_E],
            edge_attr_EK=None if graph.edge_attr_EK is None else graph.edge_attr_EK[sends_E],
            y_N=torch.full((graph.num_nodes,), -1),
        )
        return ClientPairs(
            name=graph.name,
            graph=self.described(sending, num_nodes),
            pair_P2=pair_P3[:, :2].contiguous(),
            candidate_M2=candidate_M2,
            relation_P=pair_P3[:, 3].contiguous() if pair_P3.shape[1] > 3 else None,
            y_N=linked_P[:, None].float(),
            **masks_of(role_P),
        )

    def describe(self, allocation: Allocation, *, seed: int, non_iidness: bool) -> PartitionTable:
        """Of links: those along which messages are sent, and those of each role."""
        return PartitionTable.from_links(
            allocation.clients, edges_lost=allocation.edges_lost, dropped=allocation.dropped
        )


def _add_given(raw: Data, name: str) -> dict[Role, Tensor]:
    """Make the edges that a graph names for validation and test edges of it, and return them, int64 (2, E)."""
    if lost := raw.get("not_joined"):
        raise ValueError(
            f"{name} have {', '.join(lost)}, which is lost where graphs are joined: leave it out, or give one graph "
            "with the client of each node as its membership, and GivenPartitioner as data.partitioner"
        )
    number, given, keys = raw.edge_index.shape[1], dict[Role, Tensor](), list[str]()
    for role in (Role.VAL, Role.TEST):
        key = f"{role.name.lower()}_edge_index"
        if raw.get(key) is not None:
            given[role] = checked_edges(raw[key], raw.num_nodes or 0, name, key)
            raw.edge_index = torch.cat([raw.edge_index, given[role]], dim=1)
            keys.append(key)
    for carried in ("edge_weight", "edge_attr", "edge_time", "edge_type"):
        value = raw.get(carried)
        if isinstance(value, Tensor) and len(value) == number < raw.edge_index.shape[1]:
            raise ValueError(f"{name}: {carried} is of edge_index alone: append that of {' and '.join(keys)} to it")
    return given


def _codes(pair_P2: Tensor, num_nodes: int) -> Tensor:
    """A number for each undirected pair of nodes, int64 (P,)."""
    first_P, second_P = pair_P2.long().sort(dim=1).values.unbind(dim=1)
    return first_P * num_nodes + second_P


def _first_times(raw: Data, time_E: Tensor, code_U: Tensor, name: str) -> Tensor:
    """When each undirected edge of the prepared graph first occurs, float64 (U,)."""
    num_edges = raw.edge_index.shape[1]
    if time_E.shape != (num_edges,) or not bool(time_E.double().isfinite().all()):
        raise ValueError(
            f"{name}: edge_time has shape {tuple(time_E.shape)}; give a finite number for each of {num_edges} edges"
        )
    return _least(raw, time_E.double(), code_U)


def _relations(raw: Data, type_E: Tensor, code_U: Tensor, name: str) -> Tensor:
    """The relation of each undirected edge of the prepared graph, int64 (U,)."""
    num_edges = raw.edge_index.shape[1]
    if type_E.shape != (num_edges,) or type_E.is_floating_point() or type_E.is_complex() or bool((type_E < 0).any()):
        raise ValueError(
            f"{name}: edge_type is {type_E.dtype} of shape {tuple(type_E.shape)}; give the number of its relation, an "
            f"integer from 0 on, for each of {num_edges} edges"
        )
    relation_U, greatest_U = _least(raw, type_E.double(), code_U), -_least(raw, -type_E.double(), code_U)
    if bool((differs_U := relation_U != greatest_U).any()):
        code = int(code_U[differs_U][0])
        first, second = divmod(code, raw.num_nodes or 1)
        raise ValueError(
            f"{name}: nodes {first} and {second} have edges of the types {int(relation_U[differs_U][0])} and "
            f"{int(greatest_U[differs_U][0])}, but a pair of nodes has one relation: keep one of them, or number both "
            "together as a type of its own"
        )
    count, occur = int(relation_U.max()) + 1, int((relation_U.sort().values.diff() > 0).sum()) + 1
    if occur < count:
        warnings.warn(
            f"{name}: edge_type goes up to {count - 1}, but {count - occur:,} of the {count:,} relations occur in no "
            "edge, and their weights in nets learn nothing here: number relations from 0 without gaps, unless other "
            "sites have the rest.",
            stacklevel=2,
        )
    return relation_U.long()


def _least(raw: Data, value_E: Tensor, code_U: Tensor) -> Tensor:
    """The least value of the edges between the nodes of each undirected edge, float64 (U,)."""
    code_E, order_E = _codes(raw.edge_index.t(), raw.num_nodes or 0).sort(stable=True)
    distinct, place_E = torch.unique_consecutive(code_E, return_inverse=True)
    start = torch.full((len(distinct),), torch.inf, dtype=torch.float64)
    least = start.scatter_reduce(0, place_E, value_E[order_E], "amin")
    return least[torch.searchsorted(distinct, code_U)]


class SEALSource(GraphSource):
    """One of the link-prediction benchmark graphs of SEAL, which have no features: ``root/links/<name>.mat``.

    Each node has the feature 1; give :class:`Links` the features ``structure`` or ``identity``.

    Args:
        name: ``USAir``, ``NS``, ``PB``, ``Celegans``, ``Power`` or ``Router``.
        largest_component: Keep the largest connected component only.
    """

    benchmark = True
    names = ("USAir", "NS", "PB", "Celegans", "Power", "Router")

    def __init__(self, name: str, largest_component: bool = False) -> None:
        super().__init__(largest_component=largest_component)
        if name not in self.names:
            raise ValueError(f"SEALSource.name is {name!r}: give one of {', '.join(self.names)}")
        self.name = name

    def __str__(self) -> str:
        """The graph's name."""
        return f"SEALSource({self.name})"

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        path = root / "links" / f"{self.name}.mat"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing: put the file {self.name}.mat of SEAL's data there, or set FL_DATA_ROOT"
            )
        try:
            net = loadmat(path)["net"].tocoo()
        except Exception as error:  # there is nothing that a damaged file does not raise
            raise ValueError(f"{path} is not a MATLAB file with a sparse matrix 'net' ({one_line(error)})") from error
        edge_index = torch.from_numpy(np.stack([net.row, net.col]).astype(np.int64))
        return Data(x=torch.ones(net.shape[0], 1), edge_index=edge_index, y=torch.zeros(net.shape[0]).long())

    def identity(self) -> dict[str, Any]:  # noqa: D102
        return {"source": type(self).__name__, "name": self.name}
