"""Records what a report needs about a run, and writes the report at its end.

Shape legend: C clients, T training clients, N nodes or examples, D width of an embedding, K classes, P sampled points.
"""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import fl_lightning.report
from fl_lightning.batches.base import Batch
from fl_lightning.kernels.randomness import generator
from fl_lightning.report.record import (
    MOST_CLIENTS,
    BestRound,
    RunRecord,
    Snapshot,
)
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload, flatten
from fl_lightning.round.stage import Rows, Stage
from fl_lightning.run import result
from fl_lightning.run.callback import Callback, Trainer
from fl_lightning.run.processes import gather_objects

from .report_graphs import example_graphs
from .report_parts import best_round, data_of, describe, project, scores_of_unseen, timing
from .similarity import cosines_among

Kept = TypeVar("Kept")

#: Points of an embedding, and of predictions of a regression.
_MOST_POINTS = 1500
#: Nodes or examples in all; embeddings of more would be gathered for a sample's sake.
_MOST_EXAMPLES = 50_000
#: Numbers that the clients of a stage sent; the cosines of more are left out.
_MOST_NUMBERS = 2**24
_MOST_FAILURES = 100


class RunReport(Callback):
    """Writes ``report.html``, a self-contained page, and ``report.json`` to the run's folder when training ends.

    ``fl-train report RUN`` regenerates the page from the files of the folder. ``report.json`` has what no other file of
    the run has (:mod:`fl_lightning.report.record`); unlike the page, it is also written when an error ends the run.

    The confusions (or predictions of a regression) are those of the best round: whenever a round is the best so far,
    the clients predict their test examples once more. Errors here cause a warning and do not end the run. If the
    clients' data are elsewhere, partition, predictions and embeddings are left out.

    Args:
        page: Write the page; ``report.json`` is always written.
        predictions: Record confusions or predictions of the best round.
        embeddings: Embed a sample of nodes or examples with the clients' own models after the last round.
        num_snapshots: Number of rounds, evenly from the first to the last, at which matrices over the clients are
            recorded.
        against: Folder of a run (of ``Local``, for example) to compare each client with; the partitions must be equal.

    Raises:
        ValueError: A value is out of range, or ``against`` is not a run with a ``report.json``.
    """

    def __init__(
        self,
        *,
        page: bool = True,
        predictions: bool = True,
        embeddings: bool = True,
        num_snapshots: int = 4,
        against: str | None = None,
    ) -> None:
        if num_snapshots < 0:
            raise ValueError(f"RunReport.num_snapshots must not be negative, got {num_snapshots}")
        if against is not None and RunRecord.read(Path(against)) is None:
            raise ValueError(f"RunReport.against: {against} has no report.json: give the folder of a run that has")
        self.page = page
        self.predictions = predictions
        self.embeddings = embeddings
        self.num_snapshots = num_snapshots
        self.against = against
        self._forget()

    def _forget(self) -> None:
        self.best: BestRound | None = None
        self.snapshots: list[Snapshot] = []
        self.failures: list[tuple[int, str, str]] = []
        self.unkept: dict[str, None] = {}
        self._record: RunRecord | None = None

    # ------------------------------------------------------------------ hooks

    def on_fit_start(self, trainer: Trainer) -> None:
        """Describe the clients."""
        if trainer.run.round_idx == 0:
            self._forget()
        self._first_round = trainer.run.round_idx
        self._samples: dict[int, NDArray[np.int64]] = {}
        self._sent: dict[str, Tensor] = {}
        self._warned: set[str] = set()
        self._record = self._attempt("the description of the clients", lambda: describe(trainer))
        if self._record and (clients := data_of(trainer)):
            mine, registry = [clients[client] for client in trainer.run.training_clients], trainer.run.registry
            summary = self._attempt("the reference", lambda: registry.task.reference(mine, registry.num_outputs))
            self._record.reference = summary or {}
            if registry.task.has_graph_examples:
                graphs = self._attempt("the drawn graphs", lambda: example_graphs(trainer, clients))
                self._record.graphs = graphs or []
        self._save(trainer)

    def on_round_start(self, trainer: Trainer) -> None:
        """Discard the uploads of the last round."""
        self._sent = {}

    def on_stage_end(self, trainer: Trainer, stage: Stage, payload: Payload) -> None:
        """Record the similarity of the clients' updates, in the rounds of the snapshots."""
        if self._due(trainer) and payload.parameters and payload.clients:
            self._attempt("the cosines of what clients sent", lambda: self._compare_responses(trainer, stage, payload))

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Keep the round's scores and predictions if it is the best so far, and the matrices if they are due."""
        run = trainer.run
        for name, why in run.failures.items():
            if len(self.failures) < _MOST_FAILURES:
                self.failures.append((run.round_idx, name, why))
        if run.selection.best_round == run.round_idx and run.selection.monitor in metrics:
            wanted = self.predictions and data_of(trainer) is not None
            mine = self._attempt("the predictions", lambda: self._predict(trainer)) if wanted else None
            tallies: dict[int, NDArray[Any]] = {}
            for part in gather_objects(trainer.fabric, mine):
                tallies |= part or {}
            self.best = self._attempt("the scores", lambda: best_round(trainer, tallies))
        if self._due(trainer):
            self._attempt("the matrices", lambda: self._snap(trainer, run.round_idx))

    def on_fit_end(self, trainer: Trainer) -> None:
        """Write the files."""
        run = trainer.run
        last = run.round_idx - 1
        if self.num_snapshots and last >= 0 and last not in _snapshot_rounds(trainer, self.num_snapshots):
            self._attempt("the matrices", lambda: self._snap(trainer, last))
        parts: list[Any] = []
        if self.embeddings and data_of(trainer) is not None and self._can_embed(trainer):
            parts = gather_objects(trainer.fabric, self._attempt("the embeddings", lambda: self._embed(trainer)))
        if not trainer.fabric.is_global_zero or self._record is None:
            return
        result = [part for part in parts if part is not None]
        self._record.points = self._attempt("the embeddings", lambda: project(trainer, result)) if result else None
        self._record.unseen_clients = scores_of_unseen(trainer)
        self._save(trainer)
        if self.page:
            self._attempt("report.html", lambda: self._write_page(trainer))

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Save what was recorded for ``fl-train report``."""
        self._save(trainer)

    def state_dict(self) -> dict[str, Any]:
        """What was recorded up to the last complete round."""
        return {
            "best": None if self.best is None else dataclasses.asdict(self.best),
            "snapshots": [dataclasses.asdict(each) for each in self.snapshots],
            "failures": [list(each) for each in self.failures],
            "unkept": list(self.unkept),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._forget()
        self.best = None if state["best"] is None else BestRound(**state["best"])
        self.snapshots = [Snapshot(**each) for each in state["snapshots"]]
        self.failures = [(round_idx, name, why) for round_idx, name, why in state["failures"]]
        self.unkept = dict.fromkeys(state["unkept"])

    # ------------------------------------------------------------------ recording

    def _attempt(self, what: str, make: Callable[[], Kept]) -> Kept | None:
        """The result of ``make``; None if it fails, with one warning for each kind of thing."""
        try:
            return make()
        except Exception as error:  # user code may raise anything, and a run must not end because of its report
            if what not in self._warned:
                self._warned.add(what)
                warnings.warn(f"report: {what} failed and is left out ({type(error).__name__}: {error})", stacklevel=3)
            self.unkept[f"{what} failed ({type(error).__name__}: {error})"] = None
            return None

    def _save(self, trainer: Trainer) -> None:
        """Write ``report.json``."""
        record = self._record
        if record is None or not trainer.fabric.is_global_zero:
            return
        record.best, record.snapshots, record.failures = self.best, self.snapshots, self.failures
        record.unkept, record.timing = list(self.unkept), timing(trainer, self._first_round)
        self._attempt("report.json", lambda: record.write(trainer.run.folder))

    def _write_page(self, trainer: Trainer) -> None:
        came_to = result.summary(trainer.run)
        fl_lightning.report.write(trainer.run.folder, against=self.against, result=came_to)

    def _due(self, trainer: Trainer) -> bool:
        return trainer.run.round_idx in _snapshot_rounds(trainer, self.num_snapshots)

    def _compare_responses(self, trainer: Trainer, stage: Stage, payload: Payload) -> None:
        """Cosines of the clients' parameters, or of their updates."""
        members = trainer.run.training_clients
        numbers = sum(tensor.numel() for tensor in payload.parameters.values())
        if len(trainer.run.architectures) > 1 or len(members) > MOST_CLIENTS or numbers > _MOST_NUMBERS:
            return
        if 2 * len(payload.clients) < len(members):  # most entries would be unknown
            return
        if not set(payload.clients) <= set(members):  # unseen clients, or sums of several updates
            return
        rows_CP = flatten({name: tensor.float() for name, tensor in payload.parameters.items()})
        what = "cosines of updates" if stage.as_update else "cosines of parameters"
        self._sent[what] = cosines_among(members, payload.clients, rows_CP)

    def _snap(self, trainer: Trainer, round_idx: int) -> None:
        """Keep the strategy's matrices and the cosines of what was sent, as far as they have changed."""
        result = dict(trainer.run.strategy.matrices()) | self._sent
        if result and len(trainer.run.training_clients) > MOST_CLIENTS:
            self.unkept[f"matrices are kept for at most {MOST_CLIENTS} training clients"] = None
            return
        for name, matrix in result.items():
            new = Snapshot.of(round_idx, name, matrix.detach().float().cpu().numpy())
            last = next((each for each in reversed(self.snapshots) if each.name == name), None)
            if last is None or not np.array_equal(last.matrix(), new.matrix(), equal_nan=True):
                self.snapshots.append(new)

    def _sample(self, trainer: Trainer, client: int, among_N: Tensor, total: int) -> NDArray[np.int64]:
        """A client's share of the points, drawn by the run's seed among some of its examples, ascending."""
        if client not in self._samples:
            among = among_N.nonzero().flatten()
            number = min(len(among), max(1, _MOST_POINTS * len(among) // max(total, 1)))
            draw = generator(trainer.run.seed, "report", trainer.run.registry.names[client])
            order = torch.randperm(len(among), generator=draw)[:number]
            self._samples[client] = among[order].sort().values.numpy()
        return self._samples[client]

    def _predict(self, trainer: Trainer) -> dict[int, NDArray[Any]]:
        """By client of this process the task's tally of the test examples; for numbers and links a sample (P, 2)."""
        run, clients = trainer.run, data_of(trainer)
        assert clients is not None
        evaluation = dataclasses.replace(run.strategy.evaluations(run.training_clients)[""], training_examples=False)
        predicted = run.executor.predict(evaluation, run.training_clients, run.scored_round)
        target = run.registry.task.target
        total = sum(int(clients[client].test_mask_N.sum()) for client in run.training_clients)
        result: dict[int, NDArray[Any]] = {}
        for client, predicted_NK in predicted.items():
            own = clients[client]
            chosen: Any = own.test_mask_N
            if target.tally_is_of_examples:
                chosen = self._sample(trainer, client, chosen, total)
            if len(predicted_NK) < own.size:  # those for training examples were left out
                given_MK, predicted_NK = predicted_NK, predicted_NK.new_zeros(own.size, predicted_NK.shape[1])
                predicted_NK[own.val_mask_N | own.test_mask_N] = given_MK
            predicted_PK, y_P = predicted_NK.cpu()[chosen], own.y_N[chosen]
            if run.registry.own_outputs:
                count = run.registry.own_outputs[client]
                predicted_PK, y_P = predicted_PK[:, :count], y_P if y_P.dim() == 1 else y_P[:, :count]
            result[client] = target.tally(y_P, predicted_PK).numpy()
        return result

    def _can_embed(self, trainer: Trainer) -> bool:
        run = trainer.run
        if run.model.privacy is not None:
            self.unkept["embeddings are of single examples, which model.privacy hides"] = None
            return False
        total = sum(run.registry.sizes[client] for client in run.training_clients)
        if total > _MOST_EXAMPLES:
            self.unkept[f"embeddings are kept for at most {_MOST_EXAMPLES:,} nodes or examples"] = None
        return total <= _MOST_EXAMPLES and len(run.architectures) == 1 and run.round_idx > 0

    def _embed(self, trainer: Trainer) -> tuple[list[int], NDArray[np.float32], list[float | None]]:
        """Clients, embeddings (P, D) and labels of this process's sample, by the clients' own models."""
        run, clients = trainer.run, data_of(trainer)
        assert clients is not None
        stage = Stage(name="report", client_outputs={"embedding": _embedding}, rows={"embedding": Rows(of="example")})
        models = run.strategy.model_for(run.training_clients)
        upload = run.executor.ask(stage, run.training_clients, run.scored_round, models)
        self._samples = {}
        total = sum(run.registry.sizes[client] for client in run.training_clients)
        owner: list[int] = []
        rows, labels = [np.empty((0, 0), dtype=np.float32)], list[float | None]()
        for row, client in enumerate(upload.clients):
            client_data = clients[client].seen()
            chosen = self._sample(trainer, client, torch.ones(client_data.size, dtype=torch.bool), total)
            owner += [client] * len(chosen)
            rows.append(upload.extras["embedding"][row].float().cpu().numpy()[chosen])
            label = client_data.y_N[chosen]
            first = label[:, 0] if label.dim() > 1 else label
            unknown = first.isnan() if label.is_floating_point() else first < 0
            labels += [None if no else value for no, value in zip(unknown.tolist(), first.tolist(), strict=True)]
        return owner, np.concatenate(rows[1:]) if rows[1:] else rows[0], labels


def _embedding(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """Of every node or example, (N, D)."""
    return client.output(parameters, batch).embedding


def _snapshot_rounds(trainer: Trainer, number: int) -> set[int]:
    """Evenly from the first round to the last."""
    return {round(index * (trainer.num_rounds - 1) / max(1, number - 1)) for index in range(number)}
