"""The tables at the end of a run."""

import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote

from rich import box
from rich.filesize import decimal

from fl_lightning.counts import count
from fl_lightning.direction import metric_on_test
from fl_lightning.run import result as run_result
from fl_lightning.run.callback import Trainer
from fl_lightning.run.curve import SIGNS
from fl_lightning.run.tables import by_group, models_and_data
from fl_lightning.terminal import PlainTable

#: Descriptions of models by the prefixes of their metrics; other models are named by the prefix itself.
_MODELS = {"gen/": "generated model", "unseen/": "unseen clients", "unseen/gen/": "unseen clients, generated"}


def result_table(trainer: Trainer, clients: Sequence[Sequence[float]]) -> PlainTable:
    """The results of a run.

    Args:
        trainer: The trainer, after its fit.
        clients: Index, validation and test value of each client at the best round.
    """
    table = _new_table(f"{type(trainer.run.strategy).__name__}, {count(len(trainer.run.training_clients), 'client')}")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")  # a path is not cut
    for row in _result_rows(trainer, clients):
        table.add_row(*row)
    if trainer.run.interrupted:
        received = trainer.run.interruption.received
        name = "a signal" if received is None else signal.Signals(received).name  # None: another process has it
        table.caption = f"{name} ended it after {count(trainer.run.round_idx, 'round')}; continue with ckpt_path=last"
    return table


def further_tables(trainer: Trainer) -> list[PlainTable]:
    """Models on local and on global data, and metrics by class and by degree, as far as they were measured."""
    result, names = trainer.run.selection.result, getattr(trainer.datamodule, "class_names", None)  # unknown of sites
    tables = []
    if ways := models_and_data(result, metric_on_test(trainer.run.selection.monitor)):
        table = _new_table(f"{ways[0][1]} of models on data, mean ± std over clients")
        for name in ("model", "local data", "global data"):
            table.add_column(name)
        for model, local, union in ways:
            table.add_row(model, mean_and_std(result, local), mean_and_std(result, union))
        tables.append(table)
    for title, groups in by_group(result).items():
        table = _new_table(f"{title}, mean ± std over clients")
        kind = title.rpartition(" ")[2]
        table.add_column(kind, style="bold")
        for name in ("mean ± std over clients", _weighted(trainer)):
            table.add_column(name, justify="right")
        for group, name in groups:
            called = names[int(group)] if kind == "class" and names and int(group) < len(names) else group
            table.add_row(called, mean_and_std(result, name), number(result[f"{name}_weighted"]))
        tables.append(table)
    for table in tables:
        table.show_header = True
    return tables


def next_steps(trainer: Trainer) -> list[str]:
    """The page of a run, and the command that comes next: to go on if a signal ended it, else to use a model."""
    folder, config = trainer.run.folder, trainer.run.config_file if trainer.run.config else ""  # "" from Python
    lines = [f"report: {folder / 'report.html'}"] if (folder / "report.html").is_file() else []
    if config and trainer.run.interrupted:
        lines.append(f"next: fl-train fit --config {quote(str(folder / config))} --ckpt_path last")
    elif config and (folder / "checkpoints" / "best.ckpt").is_file():
        client = trainer.run.registry.names[trainer.run.training_clients[0]]
        lines.append(f"next: fl-train export {quote(str(folder))} --client {quote(client)} --to model.pt")
    return lines


def _result_rows(trainer: Trainer, clients: Sequence[Sequence[float]]) -> Iterator[tuple[str, str]]:
    result, monitor, rounds = trainer.run.selection.result, trainer.run.selection.monitor, len(trainer.run.history)
    if not result:
        yield "result", "no round was evaluated"
    else:
        test = metric_on_test(monitor)
        best = trainer.run.selection.best_round
        how = f"by {monitor}" if result[monitor] == result[monitor] else "the last, for there is no validation"
        yield "best round", f"{best} of {rounds} (numbered from 0), {how}"
        for name, why in run_result.marks(trainer.run).items():
            yield SIGNS[name].words, why
        yield monitor, number(result[monitor])
        yield from trainer.run.registry.task.notes.items()
        if test in result:
            yield test, f"{mean_and_std(result, test)} over clients"
        if f"{test}_std" in result:
            worst = ranked(trainer, clients)
            who = f" ({trainer.run.registry.names[int(worst[0][0])]})" if worst else ""
            yield "  worst client", f"{number(result.get(f'{test}_worst', float('nan')))}{who}"
            yield f"  {_weighted(trainer)}", f"{number(result[f'{test}_weighted'])}"
        for name in result:
            if name.endswith(f"/{test}") and not name.startswith("union/"):
                prefix = name.removesuffix(test)
                yield f"  {_MODELS.get(prefix, prefix.rstrip('/'))}", mean_and_std(result, name)
        for name, metrics in trainer.run.references.items():
            if (bare := "/".join(test.split("/")[-2:])) in metrics:
                yield f"  {name} (reference)", mean_and_std(metrics, bare)
        if f"{test}_per_client_selection" in result:
            yield "  per-client model selection", f"{number(result[f'{test}_per_client_selection'])}"
        over_rounds = f"{trainer.run.selection.mode}_over_rounds"
        if f"test/{over_rounds}" in result:
            yield (
                f"  {over_rounds.replace('_', ' ')}",
                f"{number(result[f'test/{over_rounds}'])} (for reference only: selected on test data)",
            )
        for name in ("test/acc", *(f"test/{metric}" for metric in trainer.run.model.whole_metrics)):
            if name in result and name != test:
                yield name, f"{mean_and_std(result, name)} over clients"
    if failures := trainer.run.num_failures:
        worst_name = max(failures, key=lambda name: failures[name])
        yield (
            "failures",
            f"{sum(failures.values())} of {count(len(failures), 'client')} ({worst_name}: {failures[worst_name]})",
        )
    if unusual := len(trainer.run.unusual):
        yield "unusual updates", f"of {unusual} client{'' if unusual == 1 else 's'}, aggregated"
    if trainer.run.history:
        if "comm/bytes_total" in trainer.run.history[-1]:
            sums = {way: sum(row.get(f"comm/bytes_{way}", 0) for row in trainer.run.history) for way in _WAYS}
            parts = ", ".join(f"{decimal(int(sums[way]))} {label}" for way, label in _WAYS.items() if sums[way])
            yield "communication", parts or "none"
        yield "seconds a round", f"{statistics.median(row['seconds'] for row in trainer.run.history):.3g} (median)"
    yield "folder", str(trainer.run.folder)


def number(value: float) -> str:
    """Format with four decimals, or four digits if the number is small.

    Example:
        >>> number(0.81234), number(0.0021234)
        ('0.8123', '0.002123')
    """
    return f"{value:.4f}" if abs(value) >= 0.01 or value == 0 else f"{value:.4g}"


_WAYS = {"up": "up", "down": "down", "peer": "between clients"}


def client_table(trainer: Trainer, clients: Sequence[Sequence[float]], num_rows: int) -> PlainTable:
    """The worst clients at the best round; ``clients`` as in :func:`result_table`."""
    table = _new_table(f"Worst {min(num_rows, len(clients))} of {count(len(clients), 'client')}")
    table.add_column("client", style="bold")
    for name in ("size", trainer.run.selection.monitor, metric_on_test(trainer.run.selection.monitor)):
        table.add_column(name, justify="right")
    table.show_header = True
    for client, val, test in ranked(trainer, clients)[:num_rows]:
        size = trainer.run.registry.sizes[int(client)]
        table.add_row(trainer.run.registry.names[int(client)], str(size), number(val), number(test))
    return table


def evaluation_table(trainer: Trainer, metrics: Mapping[str, float]) -> PlainTable:
    """The metrics of ``validate`` or ``test``."""
    run = trainer.run
    table = _new_table(f"{type(run.strategy).__name__} after {count(run.round_idx, 'round')}: {run.folder}")
    table.add_column("metric", style="bold")
    for name in ("mean ± std over clients", "worst", _weighted(trainer)):
        table.add_column(name, justify="right")
    table.show_header = True
    for name in metrics:
        if f"{name}_weighted" in metrics:
            kinds = [f"{name}_{kind}" for kind in ("worst", "weighted")]
            others = (number(metrics[kind]) if kind in metrics else "" for kind in kinds)
            table.add_row(name, mean_and_std(metrics, name), *others)
    return table


def _weighted(trainer: Trainer) -> str:
    """The name of the mean that counts every example once."""
    return f"weighted by {trainer.run.registry.task.examples}"


def mean_and_std(metrics: Mapping[str, float], name: str) -> str:
    """A metric's mean and standard deviation over clients; only the mean if clients reveal only sums."""
    mean, std = number(metrics[name]), metrics.get(f"{name}_std")
    return mean if std is None else f"{mean} ± {number(std)}"


def ranked(trainer: Trainer, clients: Sequence[Sequence[float]]) -> list[Sequence[float]]:
    """Clients by their test value, worst first; those without test examples are left out."""
    return sorted((row for row in clients if row[2] == row[2]), key=lambda row: trainer.run.selection.sign * row[2])


def _new_table(title: str) -> PlainTable:
    return PlainTable(
        title=title,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=False,
    )
