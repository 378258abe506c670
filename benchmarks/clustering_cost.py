"""Time and memory of finding similar clients in FedAux, FED-PUB and GCFL (clustering, FedAux's Figure 5).

    .venv/bin/python benchmarks/clustering_cost.py

The models are those of configs/papers/fedaux_cora.yaml (a masked GCN of width 256 on Cora's 1,433 features). FedAux
has the cosines of vectors of 256 numbers. FED-PUB runs a proxy graph of 500 nodes through every model first; here
clients do that, in the released code the server. GCFL cuts the graph of the updates' cosines in two by Stoer and
Wagner's algorithm, GCFL+ that of the distances between series of five lengths. Vectors, models and updates are drawn
at random, as only their shapes matter. Seconds are of the CPU, with one thread, the median of five; memory is what
the process needs in addition at its peak. Every case has a process of its own. Writes
benchmarks/results/clustering_cost.md.
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

RESULT = Path(__file__).parent / "results" / "clustering_cost.md"
CLIENTS = (5, 10, 20, 50, 100)
METHODS = ("FedAux", "FED-PUB", "GCFL", "GCFL+")
NUM_FEATURES, NUM_CLASSES, WIDTH, SERIES, REPEATS = 1433, 7, 256, 5, 5


def step(method: str, num_clients: int) -> Callable[[], Any]:
    """What finds the similar clients, once what it reads is there."""
    import torch

    from fl_lightning import ClientModule
    from fl_lightning.models import MaskedGCN
    from fl_lightning.relations.minimum_cut import minimum_cut
    from fl_lightning.relations.similarity import cosine_similarity, softmax_mixing
    from fl_lightning.relations.time_warping import time_warping
    from fl_lightning.round.context import Context
    from fl_lightning.strategies.client_outputs import FunctionalEmbedding, proxy_graph

    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)

    def mixing(signature_CD: torch.Tensor) -> torch.Tensor:
        return softmax_mixing(cosine_similarity(signature_CD), 10.0)

    if method == "FedAux":
        return functools.partial(mixing, torch.randn(num_clients, WIDTH, generator=random))
    client = ClientModule(functools.partial(MaskedGCN, hidden_channels=WIDTH))
    client.build(NUM_FEATURES, NUM_CLASSES)
    client.eval()
    initial = {name: parameter.detach() for name, parameter in client.net.named_parameters()}
    if method == "FED-PUB":
        models = [
            {name: tensor + 0.01 * torch.randn(tensor.shape, generator=random) for name, tensor in initial.items()}
            for _ in range(num_clients)
        ]
        embedding = FunctionalEmbedding.on(proxy_graph(NUM_FEATURES, random), next(iter(initial.values())))

        def by_function() -> torch.Tensor:
            with torch.no_grad():
                own = [embedding(client, model, embedding.proxy, Context()) for model in models]
            return mixing(torch.stack(own))

        return by_function
    if method == "GCFL":
        size = sum(tensor.numel() for name, tensor in initial.items() if "mask" not in name)
        updates = torch.randn(num_clients, size, generator=random)
        return lambda: minimum_cut(cosine_similarity(updates) + 1)
    series = torch.rand(num_clients, SERIES, generator=random)

    def by_lengths() -> torch.Tensor:
        distance = time_warping(series)
        return minimum_cut(distance.max() - distance)

    return by_lengths


def measure(method: str, num_clients: int) -> dict[str, float]:
    """CPU milliseconds, and the memory in MiB by which the process grows."""
    compute = step(method, num_clients)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    compute()
    mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        compute()
        seconds.append(time.process_time() - start)
    return {"ms": 1e3 * statistics.median(seconds), "mib": mib}


def main() -> None:
    """Measure every case in a process of its own, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=2, metavar=("METHOD", "CLIENTS"), help="print the metrics of one case")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case[0], int(options.case[1]))))
        return
    lines = [
        "Written by `benchmarks/clustering_cost.py`: milliseconds of the CPU to find the similar clients, and in "
        "brackets the MiB that this needs.\n",
        f"| method | {' | '.join(f'{number} clients' for number in CLIENTS)} |",
        f"|---|{'---|' * len(CLIENTS)}",
    ]
    for method in METHODS:
        cells = []
        for number in CLIENTS:
            command = [sys.executable, __file__, "--case", method, str(number)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            result = json.loads(done.stdout.splitlines()[-1])
            ms = float(f"{result['ms']:.2g}")
            cells.append(f"{ms:g} ({result['mib']:.0f})")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
