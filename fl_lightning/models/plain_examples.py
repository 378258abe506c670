"""Plain PyTorch modules for rows of tables, series and images: ``forward(x)`` returns a row of logits for each."""

from typing import Any

from torch import nn

from fl_lightning.models.output import NetOutput
from fl_lightning.models.plain import PlainNet, drawn_by
from fl_lightning.models.plain_inputs import ExampleInputs
from fl_lightning.models.plain_trial import Trial


class PlainExampleNet(PlainNet):
    """A plain PyTorch module as the net of clients whose examples have no graphs.

    It is as :class:`PlainNet` for graphs: parameters keep their names, a head is added if the output is not as wide as
    the logits, and running statistics are parameters. It runs on a stack of clients under ``torch.vmap``, where dropout
    follows from the batch's key and batch normalization leaves padding out (``models/stacked/examples.py``).

    Args:
        net: Maps the inputs of examples (N, *X) to (N, any width), or to a tuple of logits and an embedding.
        num_features: Width of the inputs, or the shape X of one example.
        num_outputs: Width of the logits.

    Raises:
        ValueError: The module does not return one row of numbers for each example, or cannot be a client's net.
    """

    #: It is for tasks whose examples have no graphs.
    needs_rows = True

    @staticmethod
    def _inputs_of(net: nn.Module) -> ExampleInputs:
        return ExampleInputs(net)

    def _stack(self, num_features: Any, trial: Trial) -> None:
        """Try it on a stack."""
        from fl_lightning.models.stacked.examples import try_examples_on_stack
        from fl_lightning.models.stacked.functions import NotStackable

        self._stacked = self._net  # under vmap it runs as it is
        self.takes_stacks, self.transposed, self.why_alone = False, (), ""
        try:
            try_examples_on_stack(self, trial.graph.x.shape[1:], has_numbers=trial.has_numbers)
        except NotStackable as error:
            self._stacked, self.why_alone = (), str(error)
        self.train(self.training)

    def forward(self, batch: Any) -> NetOutput:
        """Run the module; its random draws follow from the batch's key."""
        if self.why_alone:
            with drawn_by(batch.key):
                return self._run(self._net[0], batch)
        from fl_lightning.models.stacked.examples import StackedExamples

        with StackedExamples(batch, has_dropout=self.has_dropout):
            return self._run(self.stacked_net, batch)
