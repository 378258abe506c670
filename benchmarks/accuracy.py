"""Test accuracy of the round that validation chose, of several strategies on the same partitions and seeds.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/accuracy.py fedsheafhn
    FL_DATA_ROOT=... .venv/bin/python benchmarks/accuracy.py fedaux --cases Cora-10 --seeds 0

Every figure is of one ``fl-train fit`` whose command is in the results. Writes
benchmarks/results/accuracy_<study>.json (what is there of other cases is kept) and the study's table in docs/results.md
between its two markers. A study takes 10 to 20 minutes on 2 cores.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from fl_lightning.cli import FederatedCLI

ROOT = Path(__file__).parent.parent
REPORTED = ("val/", "test/", "gen/test/", "trained/test/", "new/test/", "new/trained/test/", "best_round")
Results = dict[str, dict[str, dict[str, dict[str, float]]]]
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of a table.

    Attributes:
        arguments: What the row adds to the command.
        metric: ``acc``, shown in per cent, or ``mse``, shown in thousandths.
        paper: Published figures to stand beside, as text.
        paper_new: The same for clients that were held out of training.
        overrides: Arguments for single strategies of this row, chosen on validation.
    """

    arguments: tuple[str, ...]
    metric: str = "acc"
    paper: str = ""
    paper_new: str = ""
    overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """Factor to the unit that is shown."""
        return 100.0 if self.metric == "acc" else 1000.0


@dataclass(frozen=True, kw_only=True)
class Study:
    """A table.

    Attributes:
        cases: Its rows by name.
        strategies: Arguments of ``fl-train fit`` by strategy; ``{case}`` is the row's name up to the first dash, in
            lower case.
        columns: The strategy of each column, and which of its figures (``{metric}`` is the row's); every model has its
            own validation's round.
        paired: The two strategies whose difference on each seed is shown; none if empty.
        paper_columns: What the published figures are of.
        new_clients: Whether each row has another below it for clients that were held out of training.
    """

    cases: Mapping[str, Case]
    strategies: Mapping[str, tuple[str, ...]]
    columns: Mapping[str, tuple[str, str]]
    paper_columns: str
    paired: tuple[()] | tuple[str, str] = ()
    new_clients: bool = False


def graph_cases(counts: Mapping[str, tuple[int, ...]], paper: Mapping[str, str]) -> dict[str, Case]:
    """Data sets, each cut into some numbers of clients by METIS."""
    sources = {"Photo": "AmazonSource", "Computers": "AmazonSource"}
    longer = {"Photo": ("--trainer.num_rounds=200", "--strategy.init_args.num_epochs=2")}  # as the papers do
    return {
        f"{dataset}-{count}": Case(
            arguments=(
                *longer.get(dataset, ()),
                f"--data.source={sources.get(dataset, 'PlanetoidSource')}",
                f"--data.source.name={dataset}",
                f"--data.partitioner.init_args.num_clients={count}",
            ),
            paper=paper[f"{dataset}-{count}"],
        )
        for dataset, numbers in counts.items()
        for count in numbers
    }


def client_lr(rates: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """The clients' learning rate by strategy, as arguments."""
    return {name: (f"--model.init_args.optimizer.init_args.lr={rate}",) for name, rate in rates.items()}


_START = ("--strategy.embedding_scale=0.01", "--strategy.new_embedding=mean")
_WITHIN = ("--data.splitter=ClientSplit", "--data.splitter.train=0.2", "--data.splitter.val=0.4")
_ONE_EPOCH = ("--strategy.init_args.num_epochs=1", "--model.init_args.optimizer.init_args.lr=0.05")
_NO_DECAY = "--model.init_args.optimizer.init_args.weight_decay=0"
_UNMIXED = ("--strategy.init_args.personalised=false", "--strategy.init_args.mask_sparsity_weight=0")
STUDIES = {
    "fedsheafhn": Study(
        cases=graph_cases(
            {"Cora": (10, 20), "CiteSeer": (10, 20)},
            {
                "Cora-10": "83.49 / 71.26",
                "Cora-20": "82.35 / 74.65",
                "CiteSeer-10": "75.27 / 67.82",
                "CiteSeer-20": "72.20 / 65.98",
            },
        ),
        strategies={
            "FedSheafHN": ("--config=configs/fedsheafhn_{case}.yaml",),
            "Local": ("--config=configs/local_cora.yaml",),
            "FedAvg": ("--config=configs/fedavg_cora.yaml",),
            "FedPer": ("--config=configs/fedper_cora.yaml",),
        },
        columns={
            "FedSheafHN": ("FedSheafHN", "test/{metric}"),
            "its generated model": ("FedSheafHN", "gen/test/{metric}_own_choice"),
            "Local": ("Local", "test/{metric}"),
            "FedAvg": ("FedAvg", "test/{metric}"),
            "FedAvg, trained locally": ("FedAvg", "trained/test/{metric}_own_choice"),
            "FedPer": ("FedPer", "test/{metric}"),
            "FedPer, trained locally": ("FedPer", "trained/test/{metric}_own_choice"),
        },
        paired=("FedSheafHN", "Local"),
        paper_columns="FedSheafHN / Local",
    ),
    "fedaux": Study(
        cases=graph_cases(
            {"Cora": (5, 10, 20), "CiteSeer": (5, 10, 20), "Photo": (10,)},
            {
                "Cora-5": "84.57 / 83.72",
                "Cora-10": "82.05 / 81.45",
                "Cora-20": "81.60 / 81.10",
                "CiteSeer-5": "72.99 / 72.40",
                "CiteSeer-10": "73.16 / 71.83",
                "CiteSeer-20": "68.10 / 66.89",
                "Photo-10": "92.30 / 92.46",
            },
        ),
        strategies={
            "FedAux": ("--config=configs/fedaux_{case}.yaml",),
            "FED-PUB": ("--config=configs/fedpub_cora.yaml",),
            "FedAvg-mask": ("--config=configs/fedaux_{case}.yaml", *_UNMIXED),
            "Local": ("--config=configs/local_cora.yaml", *_WITHIN, *_ONE_EPOCH),
            "FedAvg": ("--config=configs/fedavg_cora.yaml", *_WITHIN, *_ONE_EPOCH, _NO_DECAY),
        },
        columns={
            "FedAux": ("FedAux", "test/{metric}"),
            "FED-PUB": ("FED-PUB", "test/{metric}"),
            "FedAvg-mask": ("FedAvg-mask", "test/{metric}"),
            "Local": ("Local", "test/{metric}"),
            "FedAvg": ("FedAvg", "test/{metric}"),
            "FedAvg, trained locally": ("FedAvg", "trained/test/{metric}_own_choice"),
        },
        paired=("FedAux", "Local"),
        paper_columns="FedAux / FED-PUB",
    ),
    "panacea": Study(
        cases={
            "FL60": Case(
                arguments=(),
                paper="100.0 / 84.4 / 97.9 / 100.0",
                paper_new="100.0 / 80.0 / 99.2 / 100.0",
                overrides=client_lr({"FedAvg": 0.03, "FedAvg-finetune": 0.03, "Local": 0.1}),
            ),
            "DG60": Case(
                arguments=(),
                paper="(as FL-60)",
                paper_new="(as FL-60)",
                overrides=client_lr({"FedAvg": 0.1, "FedAvg-finetune": 0.1, "Local": 0.1}),
            ),
            "TPT48": Case(
                arguments=(),
                metric="mse",
                paper="2.6 / 2.7 / 2.6 / 2.6",
                paper_new="2.8 / 3.0 / 2.8 / 2.8",
                overrides={
                    "pFedHN": (
                        "--model.init_args.optimizer.init_args.lr=0.1",
                        "--strategy.server_optimizer.init_args.lr=0.0003",
                    )
                },
            ),
            "METRLA": Case(
                arguments=(),
                metric="mse",
                paper="1.0 / 67.3 / 112.4 / 20.0",
                paper_new="1.0 / 64.5 / 109.7 / 19.7",
                overrides=client_lr({"FedAvg-finetune": 0.1, "Local": 0.1}),
            ),
        },
        strategies={
            name: ("--config=configs/panacea_{case}.yaml", "--trainer.participation.held_out_fraction=0.2", *arguments)
            for name, arguments in {
                "Panacea": (),
                "pFedHN": ("--strategy=PFedHN", "--strategy.num_epochs=1", *_START),
                "FedAvg": ("--strategy=FedAvg", "--strategy.num_epochs=1"),
                "FedAvg-finetune": (
                    "--strategy=FedAvgFinetune",
                    "--strategy.num_epochs=1",
                    "--strategy.num_finetune_epochs=1",
                ),
                "Local": ("--strategy=Local", "--strategy.num_epochs=1"),
            }.items()
        },
        columns={
            "Panacea": ("Panacea", "test/{metric}"),
            "Panacea, trained locally": ("Panacea", "trained/test/{metric}"),
            "pFedHN": ("pFedHN", "test/{metric}"),
            "pFedHN, trained locally": ("pFedHN", "trained/test/{metric}"),
            "FedAvg": ("FedAvg", "test/{metric}"),
            "FedAvg-finetune": ("FedAvg-finetune", "test/{metric}"),
            "Local": ("Local", "test/{metric}"),
        },
        paper_columns="Panacea / pFedHN / FedAvg / FedAvg-finetune",
        new_clients=True,
    ),
}


def command(study: Study, case: str, strategy: str, seed: int) -> list[str]:
    """The arguments of ``fl-train`` for one figure."""
    row = study.cases[case]
    return [
        "fit",
        *(argument.format(case=case.split("-")[0].lower()) for argument in study.strategies[strategy]),
        *row.arguments,
        *row.overrides.get(strategy, ()),
        f"--data.seed={seed}",
        f"--seed_everything={seed}",
    ]


def run(arguments: list[str]) -> dict[str, float]:
    """Train once, in a process of its own; return the chosen round's figures."""
    return in_process(_train, arguments)


def in_process(function: Callable[[list[str]], Found], arguments: list[str]) -> Found:
    """What a function returns in a process of its own, which gives all its memory back."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, arguments).result()


def _train(arguments: list[str]) -> dict[str, float]:
    """Train once, without logs and checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        cli = FederatedCLI([*arguments, f"--trainer.default_root_dir={folder}", "--trainer.logger=false"])
        return dict(cli.trainer.run.selection.result)


def table(study: Study, results: Results) -> str:
    """The results as Markdown: mean and standard deviation over seeds, and a paired difference."""
    heads = [*study.columns, *([f"{' - '.join(study.paired)}, by seed"] if study.paired else [])]
    heads += [f"paper: {study.paper_columns}"]
    lines = ["| case | " + " | ".join(heads) + " |", "|" + "---|" * (len(heads) + 1)]
    rows = [(name, case, prefix) for name, case in study.cases.items() for prefix in ("", "new/")]
    for name, case, prefix in rows:
        if name not in results or (prefix and not study.new_clients):
            continue
        cells = []
        for strategy, figure in study.columns.values():
            found = results[name].get(strategy, {}).values()
            key = prefix + figure.format(metric=case.metric)
            if any(key not in figures for figures in found):  # not a second model
                cells.append("is the result")
                continue
            values = [case.scale * figures[key] for figures in found]
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            shown = f"{statistics.mean(values):.1f}{spread}" if values and max(values) < 1e5 else "diverges"
            cells.append(shown if values else "")
        if study.paired:
            ours, theirs = (results[name].get(strategy, {}) for strategy in study.paired)
            key = f"{prefix}test/{case.metric}"
            gains = [case.scale * (ours[seed][key] - theirs[seed][key]) for seed in ours if seed in theirs]
            cells.append(", ".join(f"{gain:+.1f}" for gain in gains))
        unit = "" if case.metric == "acc" else ", MSE·1e3"
        title = f"{name}{unit}{', new clients' if prefix else ''}"
        lines.append(f"| {title} | " + " | ".join([*cells, case.paper_new if prefix else case.paper]) + " |")
    return "\n".join(lines)


def write_table(name: str, text: str) -> None:
    """Rewrite the README's table between the two markers of a name."""
    readme = ROOT / "docs" / "results.md"
    before, _, rest = readme.read_text().partition(f"<!-- {name} -->")
    _, _, after = rest.partition(f"<!-- /{name} -->")
    readme.write_text(f"{before}<!-- {name} -->\n{text}\n<!-- /{name} -->{after}")


def main() -> None:
    """Run what was asked for and rewrite file and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--strategies", nargs="*")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    study = STUDIES[options.study]
    path = ROOT / "benchmarks" / "results" / f"accuracy_{options.study}.json"
    results: Results = json.loads(path.read_text()) if path.exists() else {}
    for case in options.cases or study.cases:
        for strategy in options.strategies or study.strategies:
            for seed in options.seeds:
                arguments = command(study, case, strategy, seed)
                figures = run(arguments)
                kept = {name: value for name, value in figures.items() if name.startswith(REPORTED)}
                entry = {"command": " ".join(["fl-train", *arguments]), **kept}
                results = json.loads(path.read_text()) if path.exists() else {}  # another process may write to it
                results.setdefault(case, {}).setdefault(strategy, {})[str(seed)] = entry
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps(results, indent=1) + "\n")
    write_table(options.study, table(study, results))


if __name__ == "__main__":
    main()
