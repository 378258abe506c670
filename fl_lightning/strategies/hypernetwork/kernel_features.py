"""The network before SheafRidge's ridge regression, which makes the kernel a deep kernel.

FedSheafHN's attention and MLP (``attention.py``) in a form that keeps what tells clients apart: scores of the attention
are divided by the square root of D, for unscaled ones make it one-hot or uniform; what is attended is added, for
uniform attention alone erases the client; hidden layers are normalized and their units do not die.

Shape legend: C clients, D embedding channels, H features.
"""

from typing import Literal

from torch import Tensor, nn

from fl_lightning.strategies.hypernetwork.attention import QueryKeyAttention, attention_of


class ScaledAttention(QueryKeyAttention):
    """X + softmax((X A_Q)(X A_K)^T / sqrt(D)) X A_V."""

    def scores(self, x_CD: Tensor) -> Tensor:
        """The attention scores between clients, ``(C, C)``."""
        return super().scores(x_CD) * float(x_CD.shape[1] ** -0.5)

    def forward(self, x_CD: Tensor) -> Tensor:
        """Return the embeddings with what they attend to, ``(C, D)``."""
        return x_CD + super().forward(x_CD)


class KernelFeatures(nn.Module):
    """Features of the clients from their embeddings; the embeddings themselves without attention and layers.

    Args:
        in_channels: D.
        hidden_channels: H, width of the hidden layers.
        num_hidden_layers: Number of hidden layers: linear, normalization, leaky ReLU, dropout.
        dropout: Fraction of the hidden channels dropped in training.
        attention: ``qkv``, ``matrix`` (the released code's) or ``none``.
        num_clients: Number of clients of ``matrix``.

    Shapes:
        x_CD ``(C, D)``; result ``(C, H)``, or ``(C, D)`` without hidden layers.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        hidden_channels: int,
        num_hidden_layers: int,
        dropout: float,
        attention: Literal["qkv", "matrix", "none"],
        num_clients: int,
    ) -> None:
        super().__init__()
        self.attention = attention_of(attention, in_channels, num_clients, ScaledAttention)
        hidden: list[nn.Module] = []
        for width in ([in_channels] + [hidden_channels] * num_hidden_layers)[:-1]:
            units = [nn.LayerNorm(hidden_channels), nn.LeakyReLU(0.2), nn.Dropout(dropout)]
            hidden += [nn.Linear(width, hidden_channels), *units]
        self.hidden = nn.Sequential(*hidden)

    def forward(self, x_CD: Tensor) -> Tensor:
        """Return the features, one row per client."""
        feature_CH: Tensor = self.hidden(self.attention(x_CD))
        return feature_CH
