"""Counts the bytes that are communicated, from the payloads themselves."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from fl_lightning.round.disclosure import CROSS_EDGES, what_leaves
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Stage
from fl_lightning.run.callback import Callback, Trainer
from fl_lightning.run.loggers import RoundTable


@runtime_checkable
class PeerToPeer(Protocol):
    """A strategy whose clients exchange messages with each other: none of its bytes count as upload or download."""

    def peer_bytes(self, stage: Stage, upload: Payload) -> Sequence[int]:
        """Bytes that each client of the upload sends to other clients in a stage, counted once for each receiver."""
        ...


class CommunicationLedger(Callback):
    """Adds to each round's metrics what it sent: ``comm/bytes_up``, ``comm/bytes_down``, ``comm/bytes_peer``.

    ``comm/bytes_total`` is the total since the beginning; if clients exchange messages with each other,
    ``comm/bytes_busiest`` is the total of the client that has sent the most. Stages before round 0 count toward round
    0; the onboarding of unseen clients after the last round is not counted. Uploads of clients that failed are not
    counted, as they were never sent.

    Args:
        write_stages: Also write ``communication.csv`` to the run's folder: round, stage, bytes up, down and peer, and
            what leaves a client; first, if the edges between clients are kept, what these reveal.
    """

    def __init__(self, *, write_stages: bool = False) -> None:
        self.write_stages = write_stages
        self.total = 0
        self.by_client: Counter[int] = Counter()
        self.stages: list[dict[str, Any]] = []

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start counting, or continue from the totals in the checkpoint."""
        self.stages = []
        if trainer.run.round_idx == 0:
            self.total, self.by_client = 0, Counter()
        if self.write_stages and trainer.fabric.is_global_zero:
            self.table = RoundTable(trainer.run.folder / "communication.csv")
            self.table.keep_before(trainer.run.round_idx)
            if trainer.run.round_idx == 0 and trainer.run.registry.has_cross_edges:
                nothing = {"round": 0, "stage": "data.cross_edges", "up": 0, "down": 0, "peer": 0}
                self.table.append([{**nothing, "leaves": f"the edges between clients are {CROSS_EDGES}"}])

    def on_send(self, trainer: Trainer, stage: Stage, payload: Payload | None) -> None:
        """Count the bytes of a download."""
        down = 0 if payload is None or isinstance(trainer.run.strategy, PeerToPeer) else payload.num_bytes
        row = {"round": trainer.run.round_idx, "stage": stage.name, "up": 0, "down": down, "peer": 0}
        leaves = what_leaves(stage, list(trainer.run.architectures[0])) if self.write_stages else []
        self.stages.append({**row, "leaves": "; ".join(leaves) or "nothing"})

    def on_upload(self, trainer: Trainer, stage: Stage, payload: Payload) -> Payload:
        """Count the bytes of an upload, or of messages to other clients."""
        if isinstance(trainer.run.strategy, PeerToPeer):
            sent_C = trainer.run.strategy.peer_bytes(stage, payload)
            self.stages[-1]["peer"] = sum(sent_C)
            self.by_client.update(dict(zip(payload.clients, sent_C, strict=True)))
        else:
            self.stages[-1]["up"] = payload.num_bytes
        return payload

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add the bytes of the round to its metrics."""
        for way in ("up", "down", "peer"):
            metrics[f"comm/bytes_{way}"] = sum(stage[way] for stage in self.stages)
            self.total += sum(stage[way] for stage in self.stages)
        metrics["comm/bytes_total"] = self.total
        if self.by_client:
            metrics["comm/bytes_busiest"] = max(self.by_client.values())
        if self.write_stages and trainer.fabric.is_global_zero:
            self.table.append(self.stages)
        self.stages = []

    def state_dict(self) -> dict[str, Any]:
        """The totals up to the last complete round."""
        return {"total": self.total, "by_client": dict(self.by_client)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.total = state["total"]
        self.by_client = Counter(state.get("by_client", {}))  # older checkpoints have none
