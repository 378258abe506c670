"""One set of examples, each with a target of its own, that a partitioner shares out: the base of such sources."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.allocation import Asked
from fl_lightning.data.columns import clients_by_column
from fl_lightning.data.partition.partitioners import GivenPartitioner, Partitioner
from fl_lightning.data.sources.base import Source
from fl_lightning.data.sources.examples import client_names
from fl_lightning.tasks import Task


class SetSource(Source):
    """A set of graphs, or of other examples, of which a partitioner makes clients."""

    #: What messages call the examples.
    noun: ClassVar[str] = "examples"
    #: The column with the clients, where no partitioner is given; None if one is needed.
    clients_by: str | None = None

    def partitioner_for(self, given: Partitioner | None) -> Partitioner:
        """The given one, or that of the natural clients."""
        if given is None and self.clients_by is not None:
            return GivenPartitioner(self.clients_by)
        if given is None:
            raise ValueError(
                f"data.partitioner is missing: {type(self).__name__} is one set of {self.noun}, which has to be "
                "shared out, for example by a RandomPartitioner"
            )
        if given.needs_edges:
            raise ValueError(
                f"data.partitioner is {type(given).__name__}, which cuts one graph along its edges, but "
                f"{type(self).__name__} is a set of {self.noun}: choose RandomPartitioner, DirichletPartitioner, "
                "SortedPartitioner or GivenPartitioner"
            )
        return given

    def shared_out(
        self, asked: Asked, task: Task, summary: Data, columns: Mapping[str, Any]
    ) -> tuple[tuple[str, ...], list[Tensor], list[Tensor]]:
        """The clients' names, the indices of each one's examples, and the roles of these.

        Args:
            asked: The settings of the data module.
            task: What is learned.
            summary: What partitioners and splitters see: an entry for each example.
            columns: Clients that are the values of one of them are called by these.

        Raises:
            ValueError: The partitioner goes by classes, and there are none.
        """
        assert asked.partitioner is not None
        if asked.partitioner.needs_classes and not task.target.has_classes:
            raise ValueError(
                f"{type(asked.partitioner).__name__} shares {self.noun} out by their classes, but these have "
                f"{task.target.name}: choose another partitioner, such as RandomPartitioner"
            )
        shares = asked.partitioner(summary, asked.seed)
        roles = asked.splitter(summary, shares, asked.seed)
        names = clients_by_column(asked.partitioner, columns, shares) or client_names("client", len(shares))
        return names, shares, roles
