"""What is done for :class:`~fl_lightning.strategies.Pooled` before its run: the clients' data are brought together."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fl_lightning.data import FederatedDataModule
from fl_lightning.data.pool import pool_of
from fl_lightning.executors import Executor
from fl_lightning.executors.on_pool import OnPool
from fl_lightning.strategies import Pooled


def on_pool(
    executor: Executor,
    strategy: Pooled,
    datamodule: FederatedDataModule,
    clients: Sequence[Any],
    training_clients: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    says: bool,
) -> Executor:
    """The executor that trains the pool, in the place of the first client.

    Args:
        executor: How the pool is trained.
        strategy: What is pooled; it is told where the clients' examples are.
        datamodule: The data module.
        clients: What each client holds.
        training_clients: Those whose examples are trained on, ascending.
        device: Where batches live.
        dtype: Their floating point type.
        says: Whether to warn of what is left out.

    Raises:
        ValueError: There is no whole graph, or nothing is left to train on.

    Warns:
        UserWarning: Examples have contradictory roles.
    """
    whole_graph = datamodule.common_graph() if strategy.graph == "whole" else None
    pool = pool_of(clients, training_clients, whole_graph)
    if pool.num_contradictory and says:
        warnings.warn(
            f"Pooled leaves {pool.num_contradictory:,} examples out of its training, which are training examples of "
            f"one client and validation or test examples of another; {pool.client_data.num_examples:,} training "
            "examples are left (with GlobalSplit as data.splitter an example has one role)",
            stacklevel=3,
        )
    strategy.place(pool.rows)
    collator = datamodule.collator([pool.client_data] * len(clients), device=device, dtype=dtype)
    return OnPool(executor, collator, training_clients[0])
