"""What a federation of a million clients costs, beside one of a thousand.

    .venv/bin/python benchmarks/many_clients.py [--clients 1000 1000000] [--rounds 30] [--strategies FedAvg ...]

Every round trains 100 clients of an MLP of 5,634 parameters on generated data, which are made when they are needed
(``GeneratedClients``); 100 clients are evaluated. Each case is a process of its own: the seconds from the call of
``fit`` to its first round, the largest memory of the process, the median time of a round and of the processor in it
(without the first five), the state of the clients, and whether a run that is resumed halfway ends with the same
metrics and the same server, bit for bit. Writes benchmarks/results/many_clients.json and .md.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fl_lightning.run.callback import Callback, Trainer

RESULTS = Path(__file__).parent / "results"
STRATEGIES = ("FedAvg", "FedOpt", "SCAFFOLD", "Ditto", "FedPer")
CLIENTS_A_ROUND, EVALUATED, FIRST = 100, 100, 5


class Times(Callback):
    """Notes when rounds begin, by the clock and by the processor."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_round_start(self, trainer: Trainer) -> None:
        """Note it."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())

    def median(self, noted: list[float]) -> float:
        """Median of the differences, without those of the first rounds."""
        pairs = zip(noted[FIRST:], noted[FIRST + 1 :], strict=False)
        return statistics.median(after - before for before, after in pairs)


def measure(strategy: str, num_clients: int, num_rounds: int) -> dict[str, Any]:
    """One case, in this process."""
    import torch

    import fl_lightning as fl
    from fl_lightning import strategies
    from fl_lightning.data import FederatedDataModule, GeneratedClients
    from fl_lightning.executors import StackedExecutor
    from fl_lightning.models import MLP
    from fl_lightning.run.allocator import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(1)

    def trainer(folder: str, rounds: int, *more: Callback) -> fl.FederatedTrainer:
        return fl.FederatedTrainer(
            num_rounds=rounds,
            executor=StackedExecutor(storage="disk", storage_folder=folder),
            participation=fl.Participation(num_clients=CLIENTS_A_ROUND, evaluation_clients=EVALUATED),
            accelerator="cpu",
            callbacks=list(more),
            default_callbacks=False,
            logger=False,
            default_root_dir=folder,
        )

    def parts() -> tuple[Any, ...]:
        net = lambda *shape: MLP(*shape, hidden_channels=64)  # noqa: E731
        client = fl.ClientModule(net, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        return client, FederatedDataModule(GeneratedClients(num_clients=num_clients)), getattr(strategies, strategy)()

    with tempfile.TemporaryDirectory() as folder:
        times, begin = Times(), time.perf_counter()
        whole = trainer(folder, num_rounds, times)
        result = whole.fit(*parts())
        store = whole.run.executor.lasting_state()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        checkpoint = Path(folder) / "half.ckpt"
        half = trainer(folder, num_rounds // 2)
        half.fit(*parts())
        half.save_checkpoint(checkpoint)
        resumed = trainer(folder, num_rounds)
        again = resumed.fit(*parts(), ckpt_path=str(checkpoint))
        same = again == result and _equal(resumed.run.strategy.state_dict(), whole.run.strategy.state_dict())
        return {
            "strategy": strategy,
            "clients": num_clients,
            "rounds": num_rounds,
            "setup_seconds": times.wall[0] - begin,
            "peak_mib": peak,
            "round_ms": 1000 * times.median(times.wall),
            "round_cpu_ms": 1000 * times.median(times.cpu),
            "store_mib": sum(t.nbytes for t in (*store.parameters.values(), *store.extras.values())) / 2**20,
            "checkpoint_mib": checkpoint.stat().st_size / 2**20,
            "resume_is_exact": same,
            "test/acc": result["test/acc"],
        }


def _equal(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other)


def table(cases: list[dict[str, Any]]) -> str:
    """The table, as Markdown."""
    fewest = min(case["clients"] for case in cases)
    base = {case["strategy"]: case for case in cases if case["clients"] == fewest}
    names = "strategy | clients | set-up, s | memory, MiB | round, ms | processor, ms | ratio | clients' state, MiB | "
    lines = [
        "`python benchmarks/many_clients.py`",
        "",
        f"{CLIENTS_A_ROUND} clients a round, an MLP of 5,634 parameters, {cases[0]['rounds']} rounds. *Ratio*: "
        f"processor time of a round, to that of {fewest:,} clients.",
        "",
        f"| {names}checkpoint, MiB | resume exact |",
        f"|{'---|' * 10}",
    ]
    for case in cases:
        ratio = case["round_cpu_ms"] / base[case["strategy"]]["round_cpu_ms"]
        lines.append(
            f"| {case['strategy']} | {case['clients']:,} | {case['setup_seconds']:.1f} | {case['peak_mib']:,.0f} | "
            f"{case['round_ms']:.0f} | {case['round_cpu_ms']:.0f} | {ratio:.2f} | {case['store_mib']:,.0f} | "
            f"{case['checkpoint_mib']:,.0f} | {'yes' if case['resume_is_exact'] else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--strategies", nargs="+", default=STRATEGIES)
    parser.add_argument("--one", action="store_true", help="measure the one case in this process, and print it")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.strategies[0], options.clients[0], options.rounds)))
        return
    cases = []
    for strategy in options.strategies:
        for clients in options.clients:
            given = ["--one", f"--rounds={options.rounds}", f"--clients={clients}", f"--strategies={strategy}"]
            done = subprocess.run([sys.executable, __file__, *given], check=True, capture_output=True, text=True)
            cases.append(json.loads(done.stdout.splitlines()[-1]))
            print(cases[-1], flush=True)
    (RESULTS / "many_clients.json").write_text(json.dumps(cases, indent=1) + "\n")
    (RESULTS / "many_clients.md").write_text(table(cases))


if __name__ == "__main__":
    main()
