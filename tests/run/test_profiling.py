"""Where the time of a round goes."""

import csv
import json
import os

import pytest

from fl_lightning.run.profiling import PARTS, RoundClock, _without_own_messages
from fl_lightning.strategies import FedAvg


def test_parts_add_up(monkeypatch) -> None:
    now = iter([0.0, 1.0, 1.0, 3.0, 5.0, 5.5])
    monkeypatch.setattr("fl_lightning.run.profiling.time.perf_counter", lambda: next(now))
    clock = RoundClock()
    for name in ("clients", "server", "clients"):
        with clock.part(name):
            pass
    clock.end_round(3.0)
    clock.end_round(2.0)

    rows = {name: (milliseconds, share) for name, milliseconds, share in clock.rows()}

    assert rows["clients"] == (750.0, pytest.approx(0.3))
    assert rows["server"] == (1000.0, pytest.approx(0.4))
    assert rows["other"] == (750.0, pytest.approx(0.3))
    assert sum(share for _, share in rows.values()) == pytest.approx(1.0)


def test_a_profiled_run_writes_its_trace_and_its_table(federation, make_model, make_trainer, capfd) -> None:
    trainer = make_trainer(num_rounds=4)

    trainer.fit(make_model(), federation, FedAvg(), profile=True)

    assert "rofiler" not in capfd.readouterr().err
    trace = json.loads((trainer.run.folder / "trace.json").read_text())
    names = {event["name"] for event in trace["traceEvents"]}
    assert {"clients", "server", "evaluation", "payloads"} <= names
    with (trainer.run.folder / "profile.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["part"] for row in rows] == [*PARTS, "other"]
    assert trainer.run.clock.num_rounds == 4
    assert float(rows[0]["milliseconds_a_round"]) > 0


def test_only_the_messages_of_the_profiler_itself_are_kept_off_the_terminal(capfd) -> None:
    with _without_own_messages():
        os.write(2, b"USDT:2026-01-31 12:00:00 17:17 SyncActivityProfilerHandler.cpp:52] profiler_start\na warning\n")
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "a warning\nlater\n"


def test_nothing_is_written_unasked(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=3)
    trainer.fit(make_model(), federation, FedAvg())
    assert not (trainer.run.folder / "trace.json").exists()
    assert trainer.run.trace is None


def test_a_short_run_has_a_trace_too(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=2)
    trainer.fit(make_model(), federation, FedAvg(), profile=True)
    assert (trainer.run.folder / "trace.json").stat().st_size > 0
