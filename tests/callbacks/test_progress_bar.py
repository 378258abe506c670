import io
import re
import signal
from typing import Any

import pytest
from rich.console import Console

from fl_lightning import Callback, Participation
from fl_lightning.callbacks import (
    CommunicationLedger,
    FederatedCheckpoint,
    RoundProgressBar,
    RunReport,
    default_callbacks,
)
from fl_lightning.strategies import FedAvg, FedSheafHN


def bar_on(terminal: bool, width: int = 100, **settings: Any) -> tuple[RoundProgressBar, io.StringIO]:
    bar, output = RoundProgressBar(**settings), io.StringIO()
    bar.console = Console(file=output, force_terminal=terminal, width=width, legacy_windows=False)
    return bar, output


def rows(output: io.StringIO) -> dict[str, str]:
    pairs = (line.strip().split("  ", 1) for line in output.getvalue().splitlines() if "  " in line.strip())
    return {name: value.strip() for name, value in pairs}


def test_defaults_in_the_order_they_are_called() -> None:
    names = [type(callback).__name__ for callback in default_callbacks()]
    assert names == ["CommunicationLedger", "FederatedCheckpoint", "RunReport", "RoundProgressBar"]


def test_lines_where_there_is_no_terminal(make_trainer: Any, make_model: Any, federation: Any) -> None:
    bar, output = bar_on(False, line_seconds=0)
    make_trainer(callbacks=bar).fit(make_model(), federation, FedAvg(num_epochs=1))
    lines = [line for line in output.getvalue().splitlines() if "s/round" in line]
    assert [line.split("  ")[0] for line in lines] == ["round 1/3", "round 2/3", "round 3/3"]
    assert all("val/acc 0." in line and "test/acc 0." in line for line in lines)
    assert "\x1b" not in output.getvalue()

    quiet, output = bar_on(False)
    make_trainer(callbacks=quiet).fit(make_model(), federation, FedAvg(num_epochs=1))
    assert "s/round" not in output.getvalue()


def test_table_of_results(make_trainer: Any, make_model: Any, federation: Any) -> None:
    bar, output = bar_on(False, worst_clients=2)
    trainer = make_trainer(
        callbacks=[CommunicationLedger(), bar], participation=Participation(held_out_fraction=0.2), num_rounds=4
    )
    trainer.fit(make_model(), federation, FedSheafHN(init_epochs=2, num_neighbors=2))
    result, actual = trainer.run.selection.result, rows(output)
    assert actual["best round"] == f"{trainer.run.selection.best_round} of 4 (numbered from 0), by val/acc"
    assert actual["val/acc"] == f"{result['val/acc']:.4f}"
    assert actual["test/acc"] == f"{result['test/acc']:.4f} ± {result['test/acc_std']:.4f} over clients"
    assert actual["generated model"] == f"{result['gen/test/acc']:.4f} ± {result['gen/test/acc_std']:.4f}"
    assert actual["unseen clients"].startswith(f"{result['unseen/test/acc']:.4f}")
    assert actual["weighted by nodes"] == f"{result['test/acc_weighted']:.4f}"
    assert actual["per-client model selection"] == f"{result['test/acc_per_client_selection']:.4f}"
    assert actual["max over rounds"].endswith("(for reference only: selected on test data)")
    assert "kB up, " in actual["communication"]
    assert actual["seconds a round"].endswith("(median)")
    worst = min(row[2] for row in bar.clients if row[2] == row[2])
    names = [trainer.run.registry.names[int(row[0])] for row in bar.clients if row[2] == worst]
    assert actual["worst client"] in [f"{worst:.4f} ({name})" for name in names]
    assert "Worst 2 of 4 clients" in output.getvalue()


def test_worst_client_is_the_chosen_rounds_after_a_resume(make_trainer: Any, make_model: Any, federation: Any) -> None:
    outputs = []
    for run_name, lengths in {"broken": (2, 5), "whole": (5,)}.items():
        for num_rounds in lengths:
            bar, output = bar_on(False, worst_clients=4)
            trainer = make_trainer(num_rounds=num_rounds, run_name=run_name, callbacks=[FederatedCheckpoint(), bar])
            resume = "last" if num_rounds == 5 and len(lengths) > 1 else None
            trainer.fit(make_model(), federation, FedAvg(), ckpt_path=resume)
        outputs.append(
            {name: value for name, value in rows(output).items() if name not in ("folder", "seconds a round")}
        )
    assert outputs[0] == outputs[1]


def test_bar_on_a_terminal(make_trainer: Any, make_model: Any, federation: Any) -> None:
    bar, output = bar_on(True, refresh_seconds=0.01)
    make_trainer(callbacks=bar).fit(make_model(), federation, FedAvg())
    text = output.getvalue()
    assert "train" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden and shown again
    assert "best round" in text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_round_time_left_and_monitored_metric_are_shown_at_any_width(
    width: int, make_trainer: Any, make_model: Any, federation: Any
) -> None:
    bar, output = bar_on(True, width, refresh_seconds=0.01)
    trainer = make_trainer(num_rounds=12, callbacks=bar)
    trainer.fit(make_model(), federation, FedAvg())
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue()))
    whole = re.compile(r"round 1[0-2]/12 \S+ \d+:\d\d left  val/acc 0\.\d{4} ")
    assert any(whole.match(line) for line in lines), lines
    assert max(len(line) for line in lines if line.startswith("round")) <= width
    assert "…" not in output.getvalue()  # six characters where a terminal lacks it


def test_metrics_that_were_asked_for_and_what_comes_next(make_trainer: Any, make_model: Any, federation: Any) -> None:
    bar, output = bar_on(False, 60)
    model = make_model()
    model.metrics = ("f1", "auroc")
    trainer = make_trainer(callbacks=[FederatedCheckpoint(every_seconds=0), RunReport(), bar])
    trainer.config = "seed_everything: 0"  # as of the command line
    trainer.fit(model, federation, FedAvg())
    result, actual = trainer.run.selection.result, rows(output)
    for name in ("test/f1", "test/auroc"):
        assert actual[name].startswith(f"{result[name]:.4f} ± {result[f'{name}_std']:.4f}")
    *_, report, following = output.getvalue().splitlines()
    assert report == f"report: {trainer.run.folder / 'report.html'}"
    assert following == f"next: fl-train export {trainer.run.folder} --client client-00 --to model.pt"


def test_failure_leaves_the_terminal_in_order(make_trainer: Any, make_model: Any, federation: Any) -> None:
    class Fails(Callback):
        def on_round_end(self, trainer: Any, metrics: dict[str, float]) -> None:
            raise OSError("disk is full")

    bar, output = bar_on(True)
    with pytest.raises(OSError, match="disk is full"):
        make_trainer(callbacks=[Fails(), bar]).fit(make_model(), federation, FedAvg())
    assert output.getvalue().count("\x1b[?25h") == 1


def test_interruption_is_said(make_trainer: Any, make_model: Any, federation: Any) -> None:
    class Interrupt(Callback):
        def on_round_end(self, trainer: Any, metrics: dict[str, float]) -> None:
            trainer.run.interruption.received = signal.SIGINT

    bar, output = bar_on(False)
    make_trainer(callbacks=[Interrupt(), bar]).fit(make_model(), federation, FedAvg())
    assert "SIGINT ended it after 1 round; continue with ckpt_path=last" in output.getvalue()


def test_table_after_test(make_trainer: Any, make_model: Any, federation: Any) -> None:
    make_trainer(callbacks=FederatedCheckpoint()).fit(make_model(), federation, FedAvg())
    bar, output = bar_on(False)
    metrics = make_trainer(callbacks=bar).test(make_model(), federation, FedAvg())
    assert rows(output)["test/acc"].startswith(f"{metrics['test/acc']:.4f} ± {metrics['test/acc_std']:.4f}")


@pytest.mark.parametrize("settings", [{"refresh_seconds": 0.0}, {"line_seconds": -1.0}, {"worst_clients": -1}])
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        RoundProgressBar(**settings)
