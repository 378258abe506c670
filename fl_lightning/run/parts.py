"""The three parts of a run, client, data and strategy: as given, the strategy's default, or those of the last run."""

import warnings

from lightning import LightningDataModule

from fl_lightning.data import FederatedDataModule
from fl_lightning.executors.hooks import check_is_client
from fl_lightning.round.client import ClientModule
from fl_lightning.run.assembly import Run
from fl_lightning.strategies import Strategy
from fl_lightning.strategies.hooks import refuse_misnamed_hooks

#: The parts as passed to a verb; None for a missing one.
Parts = tuple[ClientModule | None, FederatedDataModule | None, Strategy | None]


def complete(
    client: ClientModule | None,
    data: FederatedDataModule | None,
    strategy: Strategy | None,
    last: Run | None = None,
) -> tuple[ClientModule, FederatedDataModule, Strategy]:
    """Replace None by the part of the last run, if there is one, and otherwise the client by the strategy's.

    Raises:
        ValueError: The data or the strategy are missing or of a wrong type, or the strategy has a misnamed hook.
    """
    if last is not None:
        client, data, strategy = client or last.model, data or last.datamodule, strategy or last.strategy
    if client is not None:
        check_is_client(client)
    kinds = {
        "data": (data, LightningDataModule, "fl_lightning.FederatedDataModule(source, partitioner)"),
        "strategy": (strategy, Strategy, "fl_lightning.strategies.FedAvg()"),
    }
    for name, (given, kind, example) in kinds.items():
        if given is None:
            raise ValueError(f"{name} is missing: give {name}, for example {name}={example}")
        if not isinstance(given, kind):
            called = given.__name__ if isinstance(given, type) else type(given).__name__
            raise ValueError(f"{name} is {called}, which is no {kind.__name__}: give {name}={example}")
    if not hasattr(data, "collator"):
        raise ValueError(
            f"data is {type(data).__name__}, which has no clients: give data={kinds['data'][2]}, with a source such as "
            "fl_lightning.data.FileSource('graph.pt')"
        )
    assert data is not None
    assert strategy is not None
    refuse_misnamed_hooks(strategy)
    return client or strategy.default_client(), data, strategy


def kept_models_of(run: Run, ckpt_path: str | None) -> str | None:
    """The checkpoint of a finished run; None for the models as its last round left them.

    Args:
        run: The run.
        ckpt_path: A path, ``last``, ``best``, or None for the best checkpoint, if one was written.
    """
    best = run.folder / "checkpoints" / "best.ckpt"
    if ckpt_path is None and not best.is_file():
        warnings.warn("no checkpoint was written: these are the models of the last round", stacklevel=4)
        return None
    return str(best) if ckpt_path in (None, "best") else ckpt_path
