"""Which clients a strategy considers similar: pictures, files and scores of its similarity and mixing matrices.

Shape legend: C clients, K known clients (rows without a nan).
"""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.files import whole_file
from fl_lightning.kernels.randomness import generator
from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.round.payload import Payload, flatten
from fl_lightning.round.stage import ClientOutput, Stage
from fl_lightning.run.callback import Callback, Trainer
from fl_lightning.run.processes import gather
from fl_lightning.strategies.client_outputs import FunctionalEmbedding, graph_embedding, proxy_graph

from .pictures import publish

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Matrix = NDArray[np.float64]
#: Name of the matrix that no server could compute, with which others are compared.
POOLED = "pooled embedding"
FUNCTIONAL = "functional embedding"
_INK, _FAINT = "#22272e", "#6b7280"


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """How well a matrix shows the true communities.

    Attributes:
        nmi: Normalized mutual information of its spectral clusters and the communities, in [0, 1].
        neighbors: Share of each client's nearest others that are in its community, for as many others as the community
            has; in [0, 1]; nan if no community has two clients.
        correlation: Pearson correlation of its entries off the diagonal with "same community", in [-1, 1].
    """

    nmi: float
    neighbors: float
    correlation: float


def correlation(first_CC: Matrix, second_CC: Matrix) -> float:
    """Pearson correlation of the entries off the diagonal; nan if one of the matrices is constant or unknown."""
    known_CC = np.isfinite(first_CC) & np.isfinite(second_CC) & ~np.eye(len(first_CC), dtype=bool)
    first, second = first_CC[known_CC], second_CC[known_CC]
    if len(first) < 2 or np.ptp(first) < 1e-12 or np.ptp(second) < 1e-12:
        return float("nan")
    return float(np.corrcoef(first, second)[0, 1])


def recovery(matrix_CC: Matrix, community_C: NDArray[np.int64]) -> Recovery:
    """Compare a matrix of similarities or weights with known communities.

    The clusters are spectral clusters of the symmetric part, whose entries off the diagonal are scaled to [0, 1], as
    many as there are communities; clients with unknown entries are left out.
    """
    same_CC = (community_C[:, None] == community_C).astype(np.float64)
    known_K = np.isfinite(matrix_CC).any(axis=1)
    matrix_KK, community_K = matrix_CC[np.ix_(known_K, known_K)], community_C[known_K]
    num_communities = len(np.unique(community_K))
    off_diagonal_KK = ~np.eye(len(matrix_KK), dtype=bool)
    symmetric_KK = (matrix_KK + matrix_KK.T) / 2
    nmi = float("nan")
    if 1 < num_communities < len(matrix_KK) and np.ptp(symmetric_KK[off_diagonal_KK]) > 1e-12:
        from sklearn.cluster import spectral_clustering
        from sklearn.metrics import normalized_mutual_info_score

        values = symmetric_KK[off_diagonal_KK]
        affinity_KK = (symmetric_KK - values.min()) / np.ptp(values)
        affinity_KK = np.where(off_diagonal_KK, affinity_KK, 1.0) + 1e-3  # no group may be cut off entirely
        found_K = spectral_clustering(
            affinity_KK, n_clusters=num_communities, assign_labels="cluster_qr", random_state=0
        )
        nmi = float(normalized_mutual_info_score(community_K, found_K))
    neighbors = nearest_share(symmetric_KK, community_K)
    return Recovery(nmi=nmi, neighbors=neighbors, correlation=correlation(matrix_CC, same_CC))


def nearest_share(matrix_KK: Matrix, community_K: NDArray[np.int64]) -> float:
    """Mean, over clients whose community has others, of the share of as many nearest clients that belong to it.

    Clients that are equally near count in part, so that a constant matrix has the share expected by chance.

    Example:
        >>> near = np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.2], [0.1, 0.2, 1.0]])
        >>> nearest_share(near, np.array([0, 0, 1])), nearest_share(near, np.array([0, 1, 0]))
        (1.0, 0.0)
    """
    result = []
    for client in range(len(matrix_KK)):
        others = np.arange(len(matrix_KK)) != client
        value, same = matrix_KK[client, others], community_K[others] == community_K[client]
        count = int(same.sum())
        if not count:
            continue
        last = np.sort(value)[-count]
        nearer, tied = value > last + 1e-12, np.abs(value - last) <= 1e-12
        result.append((same[nearer].sum() + (count - nearer.sum()) * same[tied].mean()) / count)
    return float(np.mean(result)) if result else float("nan")


def draw_matrices(
    matrices: Mapping[str, Matrix],
    names: Sequence[str],
    *,
    title: str,
    captions: Mapping[str, str] | None = None,
    community_C: NDArray[np.int64] | None = None,
) -> "Figure":
    """Heat maps side by side, clients of a community next to each other.

    Each has its own scale, that of its entries off the diagonal, so that the structure is visible even if all entries
    are similar; the diagonal of similarities, always one, is then above the scale.

    Args:
        matrices: Square matrices over the clients, by name.
        names: Names of the clients.
        title: Title of the picture.
        captions: Captions under the names of the matrices.
        community_C: Community of each client.
    """
    from matplotlib.figure import Figure

    wrapped = {name: textwrap.fill(caption, 50) for name, caption in (captions or {}).items()}
    num_lines = max((caption.count("\n") + 1 for caption in wrapped.values()), default=0)
    order_C = np.arange(len(names)) if community_C is None else np.argsort(community_C, kind="stable")
    count = len(matrices)
    num_columns = count if count <= 4 else -(-count // 2)
    num_rows = -(-count // num_columns)
    figure = Figure(figsize=(3.6 * num_columns, 3.75 * num_rows + 0.3), dpi=150)
    figure.set_layout_engine("constrained", h_pad=0.12)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=_INK)
    for panel, (name, matrix_CC) in enumerate(matrices.items()):
        axes = figure.add_subplot(num_rows, num_columns, panel + 1)
        _draw(axes, matrix_CC[np.ix_(order_C, order_C)], "weight" if name == "mixing" else "similarity")
        _label(axes, [names[client] for client in order_C], rows=panel % num_columns == 0)
        if community_C is not None:
            _outline(axes, community_C[order_C])
        axes.set_title(name, loc="left", fontsize=9.5, color=_INK, pad=6 + 11 * num_lines)
        if name in wrapped:
            caption = axes.annotate(wrapped[name], (0, 1), (0, 6), "axes fraction", "offset points")
            caption.set(fontsize=7.5, color=_FAINT, in_layout=False)  # a long line must not push the panels apart
    return figure


def _draw(axes: "Axes", matrix_CC: Matrix, unit: str) -> None:
    off_diagonal = matrix_CC[~np.eye(len(matrix_CC), dtype=bool) & np.isfinite(matrix_CC)]
    low, high = (float(off_diagonal.min()), float(off_diagonal.max())) if len(off_diagonal) else (0.0, 1.0)
    diagonal = np.diagonal(matrix_CC)[np.isfinite(np.diagonal(matrix_CC))]
    above, below = bool((diagonal > high + 1e-9).any()), bool((diagonal < low - 1e-9).any())
    image = axes.imshow(np.ma.masked_invalid(matrix_CC), cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
    axes.set_facecolor("#e5e7eb")  # unknown entries stay empty
    extend = {(True, True): "both", (True, False): "max", (False, True): "min"}.get((above, below), "neither")
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03, extend=extend)
    bar.ax.tick_params(labelsize=6.5, length=2, color=_FAINT, labelcolor=_FAINT)
    bar.set_label(unit, fontsize=7, color=_FAINT)
    bar.outline.set_visible(False)


def _label(axes: "Axes", names: Sequence[str], *, rows: bool) -> None:
    """Label at most about ten clients with the numbers at the end of their names."""
    step = max(1, -(-len(names) // 10))
    ticks = list(range(0, len(names), step))
    short = [names[tick].rpartition("-")[2] for tick in ticks]
    axes.set_xticks(ticks, short)
    axes.set_yticks(ticks, short if rows else [""] * len(ticks))
    axes.tick_params(labelsize=6.5, length=0, labelcolor=_FAINT, pad=2)
    axes.set_xlabel("client", fontsize=7.5, color=_FAINT, labelpad=2)
    if rows:
        axes.set_ylabel("client", fontsize=7.5, color=_FAINT, labelpad=2)
    axes.spines[:].set_visible(False)


def _outline(axes: "Axes", community_C: NDArray[np.int64]) -> None:
    """A white frame around each community's block."""
    from matplotlib.patches import Rectangle

    for value in np.unique(community_C):
        members = np.flatnonzero(community_C == value)
        low, size = members[0] - 0.5, len(members)
        axes.add_patch(Rectangle((low, low), size, size, fill=False, edgecolor="white", linewidth=1.2))


def cosines_among(members: Sequence[int], clients: Sequence[int], rows_CP: Tensor) -> Tensor:
    """Cosines of some members' vectors in a matrix over all members, nan elsewhere.

    Args:
        members: All members.
        clients: The members with vectors, in order.
        rows_CP: The vectors.
    """
    cosines = cosine_similarity(rows_CP)
    row = torch.tensor([members.index(client) for client in clients], device=cosines.device)
    whole = torch.full((len(members), len(members)), torch.nan, dtype=cosines.dtype, device=cosines.device)
    whole[row[:, None], row] = cosines
    return whole


class SimilarityLogger(Callback):
    """Draws, saves and scores the similarity of clients at given rounds.

    The matrices are the strategy's own (``Strategy.matrices``: similarity of signatures, mixing weights, adjacency),
    and the cosines of what the clients sent: all parameters together (or updates), and only the read-out weights. They
    are sent as one picture to the loggers that accept pictures, and written to ``similarity/round_0099.png`` and
    ``.npz`` in the run's folder (arrays by name, with ``clients`` and, if given, ``communities``).

    With known communities each matrix is scored, among the round's metrics: ``similarity/<name>_nmi`` (clusters against
    communities), ``similarity/<name>_neighbors`` (share of a client's nearest that are of its own community) and
    ``similarity/<name>_correlation``.

    Args:
        every_n_rounds: Rounds between logs; None to log only ``rounds``.
        rounds: Rounds to log, counted from 0; negative ones from the end, so -1 is the last.
        readout: Shell-style patterns of the read-out's parameters; if the clients send none of these, there is no such
            matrix.
        ground_truth: Also log the cosines of the clients' mean node embeddings. As no server may see them, this is for
            studies only.
        functional_embedding: Also log the cosines of FED-PUB's functional embeddings, whatever the strategy.
        communities: Node attribute of the graph with the true groups; a client belongs to that of most of its nodes.
            None for the groups of the partition, if several clients draw from one part.

    Raises:
        ValueError: No round is chosen.
    """

    needs_data = True
    invents_stages = True

    def __init__(
        self,
        *,
        every_n_rounds: int | None = None,
        rounds: Sequence[int] = (-1,),
        readout: Sequence[str] = ("head.*",),
        ground_truth: bool = False,
        functional_embedding: bool = False,
        communities: str | None = None,
    ) -> None:
        if every_n_rounds is not None and every_n_rounds < 1:
            raise ValueError(f"SimilarityLogger.every_n_rounds must be at least 1, got {every_n_rounds}")
        if every_n_rounds is None and not rounds:
            raise ValueError("SimilarityLogger: choose rounds, or every_n_rounds")
        self.every_n_rounds = every_n_rounds
        self.rounds = tuple(rounds)
        self.readout = tuple(readout)
        self.ground_truth = ground_truth
        self.functional_embedding = functional_embedding
        self.communities = communities
        self.community_C: NDArray[np.int64] | None = None
        self._sent: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        """Determine the clients' communities: those that are set, else the groups of the partition, if any."""
        self.community_C = None
        if self.communities is None:
            if groups := trainer.run.registry.groups:
                self.community_C = np.array([groups[client] for client in trainer.run.training_clients], dtype=np.int64)
            return
        community_N = trainer.run.datamodule.node_attribute(self.communities)
        graphs = [trainer.run.datamodule.clients[client] for client in trainer.run.training_clients]
        majority = [int(community_N[graph.node_idx_N].mode().values) for graph in graphs]
        self.community_C = np.array(majority, dtype=np.int64)

    def on_round_start(self, trainer: Trainer) -> None:
        """Discard the uploads of the last round."""
        self._sent = {}

    def on_stage_end(self, trainer: Trainer, stage: Stage, payload: Payload) -> None:
        """Keep the cosines of what was sent, not the parameters themselves."""
        if not self._due(trainer) or not payload.parameters or not payload.clients:
            return
        members = trainer.run.training_clients
        if not set(payload.clients) <= set(members):  # unseen clients, or sums of several updates
            return
        names = list(payload.parameters)
        readout = [name for name in names if any(fnmatch(name, pattern) for pattern in self.readout)]
        parts = {"updates" if stage.as_update else "parameters": names, "read-out": readout}
        for name, chosen in parts.items():
            if chosen:
                rows_CP = flatten({part: payload.parameters[part].float() for part in chosen})
                self._sent[name] = cosines_among(members, payload.clients, rows_CP)

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Draw, save and score."""
        if not self._due(trainer):
            return
        asked: dict[str, ClientOutput] = {POOLED: graph_embedding} if self.ground_truth else {}
        if self.functional_embedding:
            graph = proxy_graph(trainer.run.registry.num_features, generator(trainer.run.seed, "proxy graph"))
            asked[FUNCTIONAL] = FunctionalEmbedding.on(graph, next(iter(trainer.run.architectures[0].values())))
        result = self._ask(trainer, asked) | dict(trainer.run.strategy.matrices()) | self._sent
        matrices = {name: matrix.double().cpu().numpy() for name, matrix in result.items()}
        if not matrices:
            return
        captions: dict[str, list[str]] = {name: [] for name in matrices}
        for name, matrix in matrices.items():
            if self.community_C is not None:
                score = recovery(matrix, self.community_C)
                self._note(metrics, f"{name}_nmi", score.nmi)
                self._note(metrics, f"{name}_neighbors", score.neighbors)
                self._note(metrics, f"{name}_correlation", score.correlation)
                captions[name] += [
                    f"NMI {score.nmi:.2f}",
                    f"{score.neighbors:.2f} of the nearest",
                    f"r {score.correlation:.2f} to communities",
                ]
            if self.ground_truth and name != POOLED:
                agreement = correlation(matrix, matrices[POOLED])
                self._note(metrics, f"{name}_ground_truth", agreement)
                captions[name] += [f"{agreement:.2f} to {POOLED}"]
        if trainer.fabric.is_global_zero:
            lines = {name: ", ".join(parts) for name, parts in captions.items() if parts}
            self._write(trainer, matrices, lines)

    def _due(self, trainer: Trainer) -> bool:
        now, every = trainer.run.round_idx, self.every_n_rounds
        is_chosen = now in self.rounds or now - trainer.num_rounds in self.rounds
        return is_chosen or (every is not None and (now + 1) % every == 0)

    def _ask(self, trainer: Trainer, client_outputs: Mapping[str, ClientOutput]) -> dict[str, Tensor]:
        """Cosines of the outputs of every client, without training it or sending it anything."""
        if not client_outputs:
            return {}
        stage, run, clients = (
            Stage(name="similarity", client_outputs=client_outputs),
            trainer.run,
            trainer.run.training_clients,
        )
        upload = gather(
            trainer.fabric, run.executor.ask(stage, clients, run.round_idx, run.strategy.model_for(clients))
        )
        return {
            name: cosines_among(trainer.run.training_clients, upload.clients, output.float())
            for name, output in upload.extras.items()
        }

    def _note(self, metrics: dict[str, float], name: str, value: float) -> None:
        if value == value:
            metrics[f"similarity/{name.replace(' ', '_')}"] = value

    def _write(self, trainer: Trainer, matrices: Mapping[str, Matrix], captions: Mapping[str, str]) -> None:
        names = [trainer.run.registry.names[client] for client in trainer.run.training_clients]
        title = f"{type(trainer.run.strategy).__name__}, round {trainer.run.round_idx}"
        figure = draw_matrices(matrices, names, title=title, captions=captions, community_C=self.community_C)
        path = trainer.run.folder / "similarity" / f"round_{trainer.run.round_idx:04d}.png"
        publish(trainer, figure, path, "similarity", trainer.run.round_idx)
        about: dict[str, NDArray[np.generic]] = {"clients": np.array(names)}
        if self.community_C is not None:
            about["communities"] = self.community_C
        with whole_file(path.with_suffix(".npz")) as temporary:
            np.savez(temporary, **about, **matrices)  # type: ignore[arg-type]
