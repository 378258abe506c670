"""Attention hypernetwork: from client embeddings to the parameters of each client's model.

FedSheafHN (Liang et al., "Personalized Subgraph Federated Learning with Sheaf Collaboration", ECAI 2025), eqs. (10)
and (11). Departures: the attention matrix of the released code and no attention at all are options beside eq. (10).

Shape legend: C clients, D embedding channels, P generated parameters per client.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from fl_lightning.kernels.wide_linear import WideLinear
from fl_lightning.memory import require


class QueryKeyAttention(nn.Module):
    """softmax((X A_Q)(X A_K)^T) X A_V of eq. (10), with no division by the square root of D, as printed.

    A_Q and A_K start as the same orthogonal matrix and A_V as the identity, so that the scores start as the inner
    products of the embeddings and a client attends most to itself and to those like it. Independent random matrices
    would start by replacing each embedding with those of arbitrary clients.

    Args:
        channels: D.

    Attributes:
        entropy: Entropy of the last forward's attention, mean over the clients, as a share of log C; 1 if uniform.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.entropy = torch.tensor(torch.nan)
        self.query_DD = nn.Parameter(nn.init.orthogonal_(torch.empty(channels, channels)))
        self.key_DD = nn.Parameter(self.query_DD.detach().clone())
        self.value_DD = nn.Parameter(torch.eye(channels))

    def scores(self, x_CD: Tensor) -> Tensor:
        """The attention scores (X A_Q)(X A_K)^T between clients, ``(C, C)``."""
        return (x_CD @ self.query_DD) @ (x_CD @ self.key_DD).T

    def forward(self, x_CD: Tensor) -> Tensor:
        """Return the attended embeddings ``(C, D)``."""
        attention_CC = self.scores(x_CD).softmax(dim=1)
        self.entropy = torch.special.entr(attention_CC.detach()).sum(dim=1).mean() / math.log(max(len(x_CD), 2))
        return attention_CC @ (x_CD @ self.value_DD)


class MatrixAttention(nn.Module):
    """A X with one learnable number per pair of clients, A starting as the identity, as in the released code.

    A refers to the first ``num_clients`` rows of X by their position. Later rows belong to unseen clients, for which A
    has no entries, so they keep their embedding (identity rows).
    """

    def __init__(self, num_clients: int) -> None:
        super().__init__()
        self.attention_CC = nn.Parameter(torch.eye(num_clients))

    def forward(self, x_CD: Tensor) -> Tensor:
        """Return the attended embeddings ``(C, D)``."""
        num_known = len(self.attention_CC)
        if len(x_CD) < num_known:
            raise ValueError(
                f"attention='matrix' was built for num_clients={num_known} and was given {len(x_CD)} embeddings. "
                "Give those of all clients, in a fixed order, or use attention='qkv'."
            )
        return torch.cat([self.attention_CC @ x_CD[:num_known], x_CD[num_known:]])


class AttentionHypernetwork(nn.Module):
    """Generate every client's parameters from its embedding: attention among clients, an MLP, a linear layer.

    The last layer holds ``hidden_channels * num_outputs`` weights; nothing here copies them.

    Args:
        in_channels: Width of the embeddings.
        num_outputs: Parameters generated per client.
        hidden_channels: Width of the hidden layers, at least 1.
        num_hidden_layers: Hidden layers, each linear, ReLU, dropout.
        dropout: Fraction of the hidden channels dropped in training.
        attention: ``qkv`` (eq. 10), ``matrix`` (a learnable matrix over a fixed set of clients) or ``none``.
        num_clients: Clients of the fixed set; needed by ``matrix``, not read by the others, which take any number.

    Shapes:
        x_CD ``(C, in_channels)``; result ``(C, num_outputs)``.

    Raises:
        ValueError: A setting is out of range, ``num_clients`` is missing for ``matrix``, or (in ``forward``) there
            are fewer embeddings than clients in the matrix.
    """

    def __init__(
        self,
        in_channels: int,
        num_outputs: int,
        *,
        hidden_channels: int = 128,
        num_hidden_layers: int = 1,
        dropout: float = 0.3,
        attention: Literal["qkv", "matrix", "none"] = "qkv",
        num_clients: int | None = None,
    ) -> None:
        super().__init__()
        sizes = {"in_channels": in_channels, "num_outputs": num_outputs, "hidden_channels": hidden_channels}
        if min(sizes.values()) < 1 or num_hidden_layers < 0:
            raise ValueError(
                f"Every size of a hypernetwork must be at least 1, given {sizes}; num_hidden_layers not negative, "
                f"given {num_hidden_layers}."
            )
        self.attention = attention_of(attention, in_channels, num_clients)
        widths = [in_channels] + [hidden_channels] * num_hidden_layers
        hidden: list[nn.Module] = []
        for width in widths[:-1]:
            hidden += [nn.Linear(width, hidden_channels), nn.ReLU(), nn.Dropout(dropout)]
        self.hidden = nn.Sequential(*hidden)
        require(
            2 * 4 * num_outputs * widths[-1],
            f"the hypernetwork's last layer of {num_outputs:,} x {widths[-1]:,} weights (with their gradient)",
            "lower strategy.hidden_channels, generate fewer parameters (strategy.personal), or choose PFedHN with head "
            "FactoredHead or ChunkedHead",
        )
        self.output = WideLinear(widths[-1], num_outputs)

    def forward(self, x_CD: Tensor) -> Tensor:
        """Return the generated parameters, one row per client."""
        parameters_CP: Tensor = self.output(self.hidden(self.attention(x_CD)))
        return parameters_CP


def attention_of(
    name: str, channels: int, num_clients: int | None, qkv: Callable[[int], nn.Module] = QueryKeyAttention
) -> nn.Module:
    """The attention of a name, see :class:`AttentionHypernetwork`; ``qkv`` builds that of eq. 10 from D."""
    match name:
        case "qkv":
            return qkv(channels)
        case "matrix":
            if num_clients is None:
                raise ValueError("attention='matrix' learns one number per pair of clients: set num_clients.")
            return MatrixAttention(num_clients)
        case "none":
            return nn.Identity()
    raise ValueError(f"attention={name!r} is unknown. Choose 'qkv', 'matrix' or 'none'.")
