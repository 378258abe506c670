"""Runs that are over, for tests of what is done with them."""

from typing import Any

from torch_geometric.data import Data

import fl_lightning as fl
from fl_lightning.callbacks import FederatedCheckpoint, RunReport
from fl_lightning.strategies import FedAvg, Strategy


def loaded(make_trainer: Any, data: Any, strategy: type[Strategy] = FedAvg) -> Any:
    """A run of one round, read from its folder."""
    trainer = make_trainer(num_rounds=1, callbacks=[FederatedCheckpoint(every_seconds=0), RunReport()])
    trainer.fit(None, data, strategy(num_epochs=1))
    return fl.load_run(trainer.run.folder, data=data, strategy=strategy(num_epochs=1))


def graph_of(data: Any, **more: Any) -> Data:
    """A client's graph, with other targets or masks."""
    return Data(x=data.x_NF, edge_index=data.edge_index_2E, **more)
