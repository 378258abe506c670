"""What needs no neural network on Panacea's regression tasks: mean squared errors to read the study's table by.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/references.py

On the clients, splits and seeds of ``studies/panacea.yaml``: the last reading repeated; the ridge regression
of the targets on the inputs with one set of coefficients for all, fitted to the training clients; and with one for each
client, fitted to that client (new ones as well). The penalty is chosen on validation. Writes
benchmarks/results/references.json and .md.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fl_lightning import FederatedDataModule, Participation
from fl_lightning.cli import FederatedCLI
from fl_lightning.data import ClientExamples

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
CASES = {"TPT48": "configs/panacea_tpt48.yaml", "METRLA": "configs/panacea_metrla.yaml"}
PENALTIES = [0.1, 1.0, 10.0, 100.0]
SEEDS = [0, 1, 2]


def inputs(client: ClientExamples) -> Tensor:
    """The inputs of each example and a one, (N, D + 1)."""
    x_ND = client.x_NX.flatten(1).double()
    return torch.cat([x_ND, torch.ones(len(x_ND), 1, dtype=torch.float64)], dim=1)


def fit(clients: Sequence[ClientExamples], penalty: float) -> Tensor:
    """Coefficients (D + 1, targets) of the ridge regression on the training examples of some clients."""
    x_ND = torch.cat([inputs(client)[client.train_mask_N] for client in clients])
    y_NT = torch.cat([client.y_N[client.train_mask_N] for client in clients]).double()
    return torch.linalg.solve(x_ND.T @ x_ND + penalty * torch.eye(x_ND.shape[1]).to(x_ND), x_ND.T @ y_NT)


def error(client: ClientExamples, coefficients: Tensor | None, split: str) -> float:
    """Mean squared error on a split; without coefficients, of the last reading."""
    mask_N = getattr(client, f"{split}_mask_N")
    x_ND, y_NT = inputs(client)[mask_N], client.y_N[mask_N].double()
    predicted_NT = x_ND[:, -2:-1] if coefficients is None else x_ND @ coefficients
    return float((predicted_NT - y_NT).square().mean())


def mean_error(clients: Sequence[ClientExamples], coefficients: Sequence[Tensor | None], split: str) -> float:
    """Mean over clients."""
    return statistics.mean(error(client, one, split) for client, one in zip(clients, coefficients, strict=True))


def one_for_all(clients: Sequence[ClientExamples]) -> Tensor:
    """The coefficients fitted to all of them, with the penalty that is best on their validation."""
    candidates = [fit(clients, penalty) for penalty in PENALTIES]
    return min(candidates, key=lambda common: mean_error(clients, [common] * len(clients), "val"))


def one_each(clients: Sequence[ClientExamples]) -> list[Tensor]:
    """The coefficients fitted to each of them, with the penalty, one for all, that is best on their validation."""
    candidates = [[fit([client], penalty) for client in clients] for penalty in PENALTIES]
    return min(candidates, key=lambda fitted: mean_error(clients, fitted, "val"))


def references(data: FederatedDataModule, seed: int) -> dict[str, dict[str, float]]:
    """Test errors by predictor, of training and of unseen clients."""
    everyone = [client for client in data.clients if isinstance(client, ClientExamples)]
    chosen = Participation(held_out_fraction=0.2).training_clients(len(everyone), seed)
    training = [everyone[client] for client in chosen]
    groups = {"": training, "unseen/": [client for index, client in enumerate(everyone) if index not in chosen]}
    common = one_for_all(training)
    result: dict[str, dict[str, float]] = {}
    for group, clients in groups.items():
        predictors: dict[str, Sequence[Tensor | None]] = {
            "the last reading": [None] * len(clients),
            "linear, one for all": [common] * len(clients),
            "linear, one each": one_each(clients),
        }
        for name, coefficients in predictors.items():
            result.setdefault(name, {})[f"{group}test/mse"] = mean_error(clients, coefficients, "test")
    return result


def data_of(config: str, seed: int) -> FederatedDataModule:
    """The data module of a configuration, set up."""
    command = ["data", f"--config={ROOT / config}", f"--data.seed={seed}"]
    data: FederatedDataModule = FederatedCLI(command).datamodule
    return data


def table(results: dict[str, dict[str, dict[str, dict[str, float]]]]) -> str:
    """Markdown: mean and standard deviation over seeds, × 10⁻³."""
    predictors = list(results["TPT48"]["0"])
    lines = ["| MSE·1e3 | " + " | ".join(predictors) + " |", "|" + "---|" * (len(predictors) + 1)]
    for case, by_seed in results.items():
        for group, title in (("", case), ("unseen/", f"{case}, unseen clients")):
            values = [[1000 * result[name][f"{group}test/mse"] for result in by_seed.values()] for name in predictors]
            runs = [f"{statistics.mean(value):.1f} ± {statistics.stdev(value):.1f}" for value in values]
            lines.append(f"| {title} | " + " | ".join(runs) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit everything and write."""
    results = {
        case: {str(seed): references(data_of(config, seed), seed) for seed in SEEDS} for case, config in CASES.items()
    }
    (RESULTS / "references.json").write_text(json.dumps(results, indent=1) + "\n")
    (RESULTS / "references.md").write_text(f"`python benchmarks/references.py`\n\n{table(results)}")
    print(table(results))


if __name__ == "__main__":
    main()
