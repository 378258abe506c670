"""What a report needs in addition to a run's other files: ``report.json`` in the run's folder.

Metrics of the rounds are in ``metrics.csv``, what the run came to in ``result.json``, its settings in ``config.yaml``.
This file has the rest: the clients, the best round's scores of each of them and its confusions, matrices over the
clients at a few rounds, embeddings, and where the time went. It is small: at most some hundred kilobytes, a megabyte at
:data:`MOST_CLIENTS` clients. Numbers that are not finite are null.

Shape legend: C clients, T training clients, K classes, P points.
"""

import base64
import dataclasses
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.files import whole_file

FILE_NAME = "report.json"
#: Of the file's layout; raised with every change that older files do not have.
FORMAT_VERSION = 1
#: Matrices over more training clients are not kept.
MOST_CLIENTS = 128

Matrix = NDArray[np.float32]


@dataclass(kw_only=True)
class Partition:
    """How the data are shared out.

    Attributes:
        columns: Names of the statistics; the first is the client.
        rows: A row for each client; None for a number that it has not, such as the mean of no targets.
        labels: For each client the labeled nodes or examples of every class, (C, K); empty in a regression.
        heterogeneity: Median Jensen-Shannon distance of two clients' labels, in [0, 0.833]; None where these are
            numbers, or each client's own.
        simulated: What ``data.heterogeneity`` has changed, and the names of the clients that it chose.
    """

    columns: list[str]
    rows: list[list[str | float | None]]
    labels: list[list[int]]
    heterogeneity: float | None
    simulated: list[tuple[str, list[str]]] = field(default_factory=list)


@dataclass(kw_only=True)
class BestRound:
    """The round that validation chose.

    Attributes:
        round: Its number, from 0.
        clients: Indices of the clients that were scored.
        scores: Each client's value by kind of model (``""`` is the result, ``"trained/"``, ...) and metric.
        examples: How many examples each of these values is a mean of.
        confusion: Test examples of each class (row) that were taken for each class (column), (K, K).
        label_counts: The same of having and lacking each of several labels, (K, 2, 2).
        predicted: Target and prediction of test examples in a regression, (P, 2).
        scored: Of pairs of nodes whether each is linked, with its score, (P, 2).
        own: By client its ``confusion`` or ``label_counts``, where classes or labels are each client's own.
    """

    round: int
    clients: list[int]
    scores: dict[str, dict[str, list[float | None]]]
    examples: dict[str, dict[str, list[int]]]
    confusion: list[list[int]] | None = None
    label_counts: list[list[list[int]]] | None = None
    predicted: list[list[float | None]] | None = None
    scored: list[list[float | None]] | None = None
    own: dict[str, list[Any]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Snapshot:
    """A matrix over the training clients after a round.

    Attributes:
        round: The round's number.
        name: Of the matrix: ``adjacency``, ``mixing``, ...
        size: T.
        values: float32, little-endian, row by row, in base 64; nan where it is unknown.
    """

    round: int
    name: str
    size: int
    values: str

    @classmethod
    def of(cls, round_idx: int, name: str, matrix: Matrix) -> "Snapshot":
        """Pack a matrix (T, T)."""
        packed = base64.b64encode(np.ascontiguousarray(matrix, dtype="<f4").tobytes()).decode()
        return cls(round=round_idx, name=name, size=len(matrix), values=packed)

    def matrix(self) -> Matrix:
        """Unpack it, (T, T)."""
        flat = np.frombuffer(base64.b64decode(self.values), dtype="<f4")
        return flat.reshape(self.size, self.size).astype(np.float32)


@dataclass(kw_only=True)
class Points:
    """Embeddings of a sample of nodes or examples, projected on their first two principal components.

    Attributes:
        round: Of the last training of the models that embed them.
        x: First coordinate.
        y: Second coordinate.
        client: Index of the client that holds the point.
        label: Its class or first target; None where it is unknown.
        explained: Share of the variance that either component explains.
        total: Nodes or examples of which these are a sample.
    """

    round: int
    x: list[float]
    y: list[float]
    client: list[int]
    label: list[float | None]
    explained: list[float]
    total: int


@dataclass(kw_only=True)
class ExampleGraph:
    """A graph that is an example, to be drawn.

    Attributes:
        client: Index of the client that has it.
        num_nodes: Its nodes.
        edges: The nodes that each edge joins, once.
        kinds: A number for each node, from 0; nodes of one kind have the same.
        target: Its class or its numbers, in words.
    """

    client: int
    num_nodes: int
    edges: list[list[int]]
    kinds: list[int]
    target: str


@dataclass(kw_only=True)
class Timing:
    """Where the time of the rounds went.

    Attributes:
        first_round: The first that was timed; above 0 after a resume.
        num_rounds: How many were timed.
        seconds: Of each part of the rounds; ``other`` belongs to none.
    """

    first_round: int
    num_rounds: int
    seconds: dict[str, float]


@dataclass(kw_only=True)
class RunRecord:
    """The file.

    Attributes:
        strategy: Name of the strategy's class.
        task: What is learned: its name and its settings.
        examples: What the examples are called: nodes, graphs, ...
        monitor: The validation metric that chooses the round.
        mode: Whether ``max`` or ``min`` of it is best.
        planned_rounds: Rounds that were asked for.
        names: Of all clients, by index.
        sizes: Their examples.
        training: Indices of those that take part in the rounds.
        regression: Whether targets are no classes.
        class_names: What the classes are called; empty where that is not known.
        own_outputs: For each client how many of the outputs are its own; empty if outputs mean the same for all.
        reference: Mean metrics of the training clients if each told all its examples the same (its largest class, its
            labels' shares, its mean); empty where the data lie elsewhere.
        seed: Root of the training's draws.
        partition_hash: Of data, partition and split.
        settings: What can be told of the settings of a run that has no configuration file.
        machine: Device, precision, processes and threads.
        partition: How the data are shared out; None where they lie elsewhere.
        best: The best round; None before one was evaluated.
        unseen_clients: Scores of the clients that joined at the end, by metric.
        snapshots: Matrices over the training clients.
        unkept: Why there are no matrices, embeddings or predictions; empty where nothing is missing.
        points: Embeddings of nodes or examples.
        graphs: A few graphs of some clients, client by client, where graphs are the examples.
        failures: Round, client and cause of the first failures.
        timing: Where the time went; None before the first round was over.
    """

    strategy: str
    task: dict[str, Any]
    examples: str
    monitor: str
    mode: Literal["max", "min"]
    planned_rounds: int
    names: list[str]
    sizes: list[int]
    training: list[int]
    regression: bool | None
    seed: int
    partition_hash: str
    class_names: list[str] = field(default_factory=list)
    own_outputs: list[int] = field(default_factory=list)
    reference: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, str] = field(default_factory=dict)
    partition: Partition | None = None
    best: BestRound | None = None
    unseen_clients: dict[str, dict[str, float | None]] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    unkept: list[str] = field(default_factory=list)
    points: Points | None = None
    graphs: list[ExampleGraph] = field(default_factory=list)
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    timing: Timing | None = None

    def class_name(self, label: int) -> str:
        """What a class is called, or its number."""
        return self.class_names[label] if label < len(self.class_names) else f"class {label}"

    def left_out(self, *words: str) -> list[str]:
        """Sentences on what was not kept and has one of the words in its reason."""
        return [f"Left out: {why}." for why in self.unkept if any(word in why for word in words)]

    def write(self, folder: Path) -> None:
        """Write the file into a run's folder, whole."""
        content = {"format_version": FORMAT_VERSION, **dataclasses.asdict(self)}
        with whole_file(folder / FILE_NAME) as temporary:
            temporary.write_text(json.dumps(_plain(content), separators=(",", ":"), allow_nan=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "RunRecord | None":
        """Read the file of a run; None if the run has none.

        Raises:
            ValueError: It is damaged, or of another format.
        """
        path = folder / FILE_NAME
        if not path.is_file():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error}): train the run again for a full report") from error
        result = content.pop("format_version", None) if isinstance(content, dict) else None
        if result != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format version {result}, this version of fl_lightning reads {FORMAT_VERSION}: use the "
                "version that wrote it"
            )
        if (former := content.pop("kind", None)) is not None:  # as it was before tasks
            content |= {"task": {}, "examples": {"graphs": "nodes"}.get(former, former)}
        from pydantic import TypeAdapter, ValidationError

        try:
            record = TypeAdapter(cls).validate_python(content)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(map(str, first["loc"]))
            raise ValueError(f"{path} is damaged ({location}: {first['msg']}): train the run again") from error
        if not set(record.training) <= set(range(len(record.names))) or len(record.sizes) != len(record.names):
            raise ValueError(
                f"{path} is damaged (training: there are {len(record.names)} clients): train the run again"
            )
        for number, graph in enumerate(record.graphs):
            places = {place for edge in graph.edges for place in edge}
            if len(graph.kinds) != graph.num_nodes or not places <= set(range(len(graph.kinds))):
                raise ValueError(
                    f"{path} is damaged (graphs.{number}: it has {graph.num_nodes} nodes and {len(graph.kinds)} kinds, "
                    "or an edge of other nodes): train the run again"
                )
        return record


def _plain(value: Any) -> Any:
    """Numbers with six digits, and null for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
