"""Time and memory of FedSheafHN's server for 20 to 200 clients (the paper's Table 6), and of our SheafRidge's.

    .venv/bin/python benchmarks/server_scaling.py

The models are those of configs/papers/fedsheafhn_arxiv.yaml (a GCN of width 128 for ogbn-arxiv), and so are the
server's settings; SheafRidge has its closed form, the same sheaf and neither attention nor trials. Clients' updates and
embeddings are drawn at random, as only their shapes matter. A round is what the server sends and what it does with the
answer; with embeddings that are due every five rounds. Seconds are of the CPU, with one thread, the mean of ten rounds;
memory is the largest that the process had, with its libraries. Every case has a process of its own, which come in turn.
Writes benchmarks/results/server_scaling.json and .md.
"""

import argparse
import functools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CLIENTS = (20, 50, 100, 200)
NUM_FEATURES, NUM_CLASSES, WIDTH, ROUNDS, WARM_UP = 128, 40, 128, 10, 5
#: Rows of the paper's table: their time in seconds, for 20 clients or for the number in brackets.
PRINTED = {"FedAvg": "0.130", "FedSheafHN": "0.588 (50: 0.590, 100: 0.614)"}
PRINTED |= {"FedSheafHN without diffusion": "0.559", "FedSheafHN with a GCN": "0.580"}


def strategies() -> dict[str, Callable[[], Any]]:
    """What is measured, by name."""
    from fl_lightning.strategies import FedAvg, FedSheafHN, SheafRidge
    from fl_lightning.strategies.hypernetwork import GCNDiffusion, NoDiffusion, SheafDiffusion

    sheaf = functools.partial(
        SheafDiffusion, num_layers=4, stalk_dimension=1, hidden_channels=20, restriction_map="diagonal"
    )
    printed = functools.partial(FedSheafHN, num_neighbors=5, refresh_every=5, attention="qkv", hidden_channels=128)
    return {
        "FedAvg": FedAvg,
        "FedSheafHN without diffusion": functools.partial(printed, diffusion=NoDiffusion),
        "FedSheafHN with a GCN": functools.partial(printed, diffusion=GCNDiffusion),
        "FedSheafHN": functools.partial(printed, diffusion=sheaf),
        "SheafRidge": functools.partial(
            SheafRidge, diffusion=sheaf, personal=["head.*"], embedding_model="own", refresh_every=5
        ),
    }


def measure(name: str, num_clients: int) -> dict[str, float]:
    """CPU seconds of a round, and the largest memory in MiB."""
    import torch
    from torch import Tensor

    from fl_lightning.federation import Federation
    from fl_lightning.models import GCN
    from fl_lightning.round.payload import Payload
    from fl_lightning.round.stage import Stage

    torch.set_num_threads(1)
    torch.manual_seed(0)
    parameters = {n: p.detach() for n, p in GCN(NUM_FEATURES, NUM_CLASSES, hidden_channels=WIDTH).named_parameters()}
    strategy, everyone = strategies()[name](), tuple(range(num_clients))
    strategy.setup(
        Federation(
            num_clients=num_clients,
            training_clients=everyone,
            num_features=NUM_FEATURES,
            num_outputs=NUM_CLASSES,
            parameters=parameters,
            seed=0,
            device=torch.device("cpu"),
        )
    )

    def answer(stage: Stage) -> Payload:
        sent = {n: torch.randn(num_clients, *parameters[n].shape) * 1e-3 for n in stage.upload}
        extras: dict[str, Tensor] = {n: torch.randn(num_clients, WIDTH) for n in stage.client_outputs}
        ones = torch.ones(num_clients)
        return Payload(clients=everyone, parameters=sent, extras=extras, num_examples=ones)

    for stage in strategy.initial_stages():
        strategy.configure(stage, everyone)
        strategy.aggregate(stage, answer(stage))
    seconds = []
    for round_idx in range(WARM_UP + ROUNDS):
        for stage in strategy.stages(round_idx):
            upload = answer(stage)
            start = time.process_time()
            strategy.configure(stage, everyone)
            strategy.aggregate(stage, upload)
            seconds.append(time.process_time() - start)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"seconds": statistics.mean(seconds[WARM_UP:]), "mib": memory}


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Time by clients, as milliseconds and as a multiple of 20 clients', and memory."""
    lines = [
        "Written by `benchmarks/server_scaling.py`: milliseconds of the CPU that the server takes for a round, behind "
        "the stroke as a multiple of those for 20 clients; the largest memory of the process at 20 and at 200 clients. "
        "The last column is the paper's Table 6, seconds on its GPU.\n",
        f"| strategy | {' | '.join(f'{number} clients' for number in CLIENTS)} | memory, MiB | printed, s |",
        f"|---|{'---|' * len(CLIENTS)}---|---|",
    ]
    for name, of_clients in results.items():
        first = of_clients[str(CLIENTS[0])]["seconds"]
        cells = [
            f"{1e3 * of_clients[str(number)]['seconds']:.1f} / {of_clients[str(number)]['seconds'] / first:.2f}"
            for number in CLIENTS
        ]
        memory = [f"{of_clients[str(number)]['mib']:,.0f}" for number in (CLIENTS[0], CLIENTS[-1])]
        lines.append(f"| {name} | {' | '.join(cells)} | {' to '.join(memory)} | {PRINTED.get(name, '')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every case in a process of its own, and write file and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=2, metavar=("NAME", "CLIENTS"), help="print the metrics of one case")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case[0], int(options.case[1]))))
        return
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in strategies():
        for number in CLIENTS:
            command = [sys.executable, __file__, "--case", name, str(number)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            results.setdefault(name, {})[str(number)] = json.loads(done.stdout)
    (RESULTS / "server_scaling.json").write_text(json.dumps(results, indent=2) + "\n")
    (RESULTS / "server_scaling.md").write_text(table(results))


if __name__ == "__main__":
    main()
