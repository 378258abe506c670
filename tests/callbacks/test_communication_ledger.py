from pathlib import Path
from typing import Any

import pytest

from fl_lightning import Participation, Payload, Stage
from fl_lightning.callbacks import CommunicationLedger, FederatedCheckpoint
from fl_lightning.strategies import FedAvg, FedPer, FedSheafHN, Local

#: Six features, two convolutions of width 8, three classes; 4 bytes each.
BACKBONE = 4 * (6 * 8 + 8 + 8 * 8 + 8)
HEAD = 4 * (8 * 3 + 3)
EMBEDDING = "embedding: mean of the node embeddings of one graph, (D,)"


class Gossip(Local):
    """Everyone sends its model to two others, the first client to three."""

    def stages(self, round_idx: int) -> list[Stage]:
        return [Stage(name="train", num_epochs=1, upload=tuple(self.federation.parameters))]

    def peer_bytes(self, stage: Stage, upload: Payload) -> list[int]:
        size = upload.num_bytes // len(upload.clients)
        return [3 * size if client == 0 else 2 * size for client in upload.clients]


@pytest.mark.parametrize(
    ("algorithm", "num_bytes"),
    [(FedAvg, BACKBONE + HEAD), (FedPer, BACKBONE), (Local, 0)],
    ids=str,
)
def test_bytes_are_those_of_the_parameters(
    make_trainer: Any, make_model: Any, federation: Any, algorithm: type, num_bytes: int
) -> None:
    trainer = make_trainer(callbacks=CommunicationLedger())
    trainer.fit(make_model(), federation, algorithm(num_epochs=1))
    for number, row in enumerate(trainer.run.history, start=1):
        assert row["comm/bytes_up"] == row["comm/bytes_down"] == 5 * num_bytes
        assert row["comm/bytes_peer"] == 0
        assert row["comm/bytes_total"] == number * 10 * num_bytes


def test_only_participants_count(make_trainer: Any, make_model: Any, federation: Any) -> None:
    trainer = make_trainer(callbacks=CommunicationLedger(), participation=Participation(num_clients=2))
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    assert trainer.run.history[-1]["comm/bytes_total"] == 3 * 2 * 2 * (BACKBONE + HEAD)


def test_stages_before_round_0_count_into_it(
    make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(callbacks=CommunicationLedger(write_stages=True))
    strategy = FedSheafHN(num_epochs=1, init_epochs=1, num_neighbors=2, refresh_every=2)
    trainer.fit(make_model(), federation, strategy)
    embedding = 4 * 8
    first, second, third = trainer.run.history
    assert first["comm/bytes_up"] == 5 * embedding + 5 * BACKBONE
    assert second["comm/bytes_up"] == 5 * (BACKBONE + embedding)
    assert third["comm/bytes_up"] == 5 * BACKBONE
    assert {row["comm/bytes_down"] for row in trainer.run.history} == {5 * BACKBONE}
    lines = (tmp_path / "federation/version_0/communication.csv").read_text().splitlines()
    known = "known beforehand to the clients at both ends, with the indices of their two nodes"
    assert lines[:4] == [
        "round,stage,up,down,peer,leaves",
        f'0,data.cross_edges,0,0,0,"the edges between clients are {known}"',
        f'0,initial,{5 * embedding},0,0,"{EMBEDDING}"',
        f"0,train,{5 * BACKBONE},{5 * BACKBONE},0,the change of all parameters but head.*",
    ]


def test_peers_are_an_account_of_their_own(make_trainer: Any, make_model: Any, federation: Any) -> None:
    trainer = make_trainer(callbacks=CommunicationLedger())
    trainer.fit(make_model(), federation, Gossip())
    row = trainer.run.history[-1]
    assert (row["comm/bytes_up"], row["comm/bytes_down"]) == (0, 0)
    assert row["comm/bytes_peer"] == (3 + 4 * 2) * (BACKBONE + HEAD)
    assert row["comm/bytes_total"] == 3 * row["comm/bytes_peer"]
    assert row["comm/bytes_busiest"] == 3 * 3 * (BACKBONE + HEAD)


def test_total_survives_a_resume_and_the_joining_of_new_clients(
    make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path
) -> None:
    def run(num_rounds: int, ckpt_path: str | None, run_name: str) -> float:
        trainer = make_trainer(
            num_rounds=num_rounds,
            run_name=run_name,
            participation=Participation(held_out_fraction=0.2),
            callbacks=[CommunicationLedger(write_stages=True), FederatedCheckpoint()],
        )
        strategy = FedSheafHN(num_epochs=1, init_epochs=1, num_neighbors=2)
        trainer.fit(make_model(), federation, strategy, ckpt_path=ckpt_path)
        return trainer.run.history[-1]["comm/bytes_total"]

    run(2, None, "broken")
    assert run(4, "last", "broken") == run(4, None, "whole")
    tables = [(tmp_path / name / "version_0/communication.csv").read_text() for name in ("broken", "whole")]
    assert tables[0] == tables[1]


def test_a_new_fit_begins_anew(make_trainer: Any, make_model: Any, federation: Any) -> None:
    ledger = CommunicationLedger()
    totals = []
    for _ in range(2):
        trainer = make_trainer(callbacks=ledger)
        trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
        totals.append(trainer.run.history[-1]["comm/bytes_total"])
    assert totals[0] == totals[1]
