"""Nets for vectors: the multilayer perceptron and the linear model.

The perceptron with its defaults (three linear layers of width 16) is the client model of the binary classification and
regression tasks of Panacea (its Sec. IV-A); the linear model is the multinomial logistic regression (or, for School,
the linear regression) of the tabular tasks of Sheaf-FMTL (its Sec. 4.1).
"""

import itertools
import math

from torch import Tensor, nn

from fl_lightning.batches.examples import ExampleBatch
from fl_lightning.kernels.linear import Linear, check_dropout, check_widths
from fl_lightning.kernels.randomness import dropout
from fl_lightning.models.batch_norm import BatchNorm
from fl_lightning.models.output import NetOutput


class _VectorNet(nn.Module):
    """A net on vectors; examples of any other shape are flattened.

    Args:
        in_features: Width of the inputs, or the shape of one example.
    """

    #: All of it computes on leading client dimensions by itself, so a stack of clients needs no ``vmap``.
    takes_stacks = True

    def __init__(self, in_features: int | tuple[int, ...]) -> None:
        super().__init__()
        shape = (in_features,) if isinstance(in_features, int) else tuple(in_features)
        for width in shape:
            check_widths(in_features=width)
        self.num_dims = len(shape)
        self.in_channels = math.prod(shape)

    def flat(self, batch: ExampleBatch) -> Tensor:
        """The inputs as vectors, (..., N, in_channels); for a graph its nodes' features, if they are dense."""
        if batch.x is None:
            raise ValueError(
                "the features of this graph are stored as sparse matrices (bags of words), which only graph nets read"
            )
        return batch.x.flatten(-self.num_dims) if self.num_dims > 1 else batch.x


class LinearModel(_VectorNet):
    """One linear layer, ``head.*``: logistic regression under a cross entropy, linear regression under a squared error.

    It has no backbone; its embedding is the input.

    Args:
        in_features: Width of the inputs, or the shape of one example, which is flattened.
        num_outputs: Number of classes, or of predicted values.

    Shapes:
        batch.x ``(N, in_features)``; logits ``(N, num_outputs)``; embedding ``(N, in_features)``; all of them with a
        leading C for a stack.

    Raises:
        ValueError: A width is below 1.
    """

    def __init__(self, in_features: int | tuple[int, ...], num_outputs: int) -> None:
        super().__init__(in_features)
        check_widths(num_outputs=num_outputs)
        self.head = Linear(self.in_channels, num_outputs)

    def forward(self, batch: ExampleBatch) -> NetOutput:
        """Return the predictions, and the inputs as vectors."""
        x_NF = self.flat(batch)
        return NetOutput(self.head(x_NF), x_NF)


class MLP(_VectorNet):
    """Linear layers, each but the last followed by ReLU and dropout.

    The hidden layers (``layers.*``) are the backbone, ``head.*`` is the read-out; the embedding is the last hidden
    layer after its ReLU (the input where there is none).

    Args:
        in_features: Width of the inputs, or the shape of one example, which is flattened.
        num_outputs: Number of classes, or of predicted values.
        hidden_channels: Width of every hidden layer.
        num_layers: Number of linear layers, the read-out among them.
        dropout: Drop probability after each hidden layer, in [0, 1).
        batch_norm: Normalize the output of each hidden layer before its ReLU over the examples that are trained on
            (``models/batch_norm.py``).

    Shapes:
        batch.x ``(N, in_features)``; logits ``(N, num_outputs)``; embedding ``(N, hidden_channels)``; all of them with
        a leading C for a stack.

    Raises:
        ValueError: A width or the number of layers is below 1, or the dropout is not in [0, 1).
    """

    def __init__(
        self,
        in_features: int | tuple[int, ...],
        num_outputs: int,
        *,
        hidden_channels: int = 16,
        num_layers: int = 3,
        dropout: float = 0.0,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(in_features)
        check_widths(num_outputs=num_outputs, hidden_channels=hidden_channels, num_layers=num_layers)
        self.dropout = check_dropout(dropout)
        widths = [self.in_channels] + [hidden_channels] * (num_layers - 1)
        self.layers = nn.ModuleList(Linear(*pair, bias=not batch_norm) for pair in itertools.pairwise(widths))
        self.norms = nn.ModuleList([BatchNorm(width) for width in widths[1:]] if batch_norm else [])
        self.head = Linear(widths[-1], num_outputs)

    def forward(self, batch: ExampleBatch) -> NetOutput:
        """Return predictions and embeddings of all examples of one client."""
        embedding_ND = h_ND = self.flat(batch)
        for number, layer in enumerate(self.layers):
            z_ND = layer(h_ND)
            if len(self.norms):
                z_ND = self.norms[number](z_ND, batch.train_mask)
            embedding_ND = z_ND.relu()
            h_ND = dropout(embedding_ND, batch.key + number, self.dropout) if self.training else embedding_ND
        return NetOutput(self.head(h_ND), embedding_ND)
