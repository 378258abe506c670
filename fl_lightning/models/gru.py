"""Forecaster of sequences: an encoder-decoder of gated recurrent units, computed for a whole stack of clients at once.

Cho, van Merriënboer, Gulcehre, Bahdanau, Bougares, Schwenk, Bengio: "Learning Phrase Representations using RNN
Encoder-Decoder for Statistical Machine Translation", EMNLP 2014, with the reset gate where ``torch.nn.GRU`` has it:

    r = σ(W_r x + b_r + U_r h + c_r),    z = σ(W_z x + b_z + U_z h + c_z),
    n = tanh(W_n x + b_n + r ∘ (U_n h + c_n)),    h' = (1 - z) ∘ n + z ∘ h.

It is the client model of Meng, Rambhatla, Liu: "Cross-Node Federated Graph Neural Network for Spatio-Temporal Data
Modeling", KDD 2021, without its graph network, as the traffic tasks of Panacea use it ("1-layer GRU with hidden
dimension 100", "63K parameters"): 62,501 parameters on the two features of Meng et al., speed and time of day, and
61,901 on the speed alone. Departures: the decoder always reads its own predictions, where theirs is given the true
values now and then while it trains (scheduled sampling); and it reads the other features of the last observed step at
every step, where theirs is given those of the step itself (the future's times of day).

The three gates are one product, and the encoder's inputs are multiplied for all steps at once. 5 clients with 64
examples, 12 + 12 steps and 100 channels take 27 ms forward and backward on one core, 15 of them in products, and 28 ms
under ``vmap``; ``torch.nn.GRU`` takes 36 ms for one client after another, ``GRUCell`` 45 ms under ``vmap``.

Shape legend: C clients, N examples, T steps read, H steps forecast, F features, D hidden channels, G = 3 D gates.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.batches.examples import ExampleBatch
from fl_lightning.kernels.linear import Linear, check_widths
from fl_lightning.models.output import NetOutput


class GRULayer(nn.Module):
    """Gated recurrent units in one layer, with the parameters of ``torch.nn.GRU`` by name, shape and initial values.

    Its tensors may have leading client dimensions, as those of :class:`~fl_lightning.kernels.linear.Linear`.

    Args:
        in_channels: Width of the input of a step.
        hidden_channels: Width of the state.
    """

    def __init__(self, in_channels: int, hidden_channels: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * hidden_channels, in_channels))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * hidden_channels, hidden_channels))
        self.bias_ih_l0 = nn.Parameter(torch.empty(3 * hidden_channels))
        self.bias_hh_l0 = nn.Parameter(torch.empty(3 * hidden_channels))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden_channels**-0.5), hidden_channels**-0.5)

    def read(self, x_NF: Tensor) -> Tensor:
        """The inputs' part of the gates, (..., N, G): W x + b, plus c_r and c_z, which do not depend on the state.

        The rows may be the steps of many examples: one product for all of them.
        """
        hidden = self.weight_hh_l0.shape[-1]
        bias_G = self.bias_ih_l0 + F.pad(self.bias_hh_l0[..., : 2 * hidden], (0, hidden))
        return x_NF @ self.weight_ih_l0.mT + bias_G.unsqueeze(-2)

    def step(self, read_NG: Tensor, h_ND: Tensor) -> Tensor:
        """The next state, (..., N, D), from the output of :meth:`read` for the step's input and the previous state."""
        hidden = self.weight_hh_l0.shape[-1]
        read_rz, read_n = torch.split(read_NG, [2 * hidden, hidden], dim=-1)
        recurrent_rz, recurrent_n = torch.split(h_ND @ self.weight_hh_l0.mT, [2 * hidden, hidden], dim=-1)
        r_ND, z_ND = (read_rz + recurrent_rz).sigmoid().chunk(2, dim=-1)
        bias_1D = self.bias_hh_l0[..., None, 2 * hidden :]
        return torch.addcmul(read_n, r_ND, recurrent_n + bias_1D).tanh().lerp(h_ND, z_ND)


class GRUForecaster(nn.Module):
    """Reads T steps of a series and forecasts the next H, one after another, each from its own previous forecast.

    The decoder starts from the encoder's last state and reads at first the last observed step, then its prediction
    with the other features of that step. ``head.*`` is the read-out, ``encoder.*`` and ``decoder.*`` are the backbone;
    the embedding is the encoder's last state.

    Args:
        in_features: (T, F): steps read and features of each. The first feature is the one that is forecast.
        num_outputs: Steps forecast (H).
        hidden_channels: Width of encoder and decoder.

    Shapes:
        batch.x ``(N, T, F)``; logits ``(N, H)``; embedding ``(N, hidden_channels)``; all of them with a leading C for a
        stack.

    Raises:
        ValueError: The shape of an example is not that of a sequence, or a width is below 1.
    """

    #: All of it computes on leading client dimensions by itself, so a stack of clients needs no ``vmap``.
    takes_stacks = True

    def __init__(self, in_features: int | tuple[int, int], num_outputs: int, *, hidden_channels: int = 100) -> None:
        super().__init__()
        if isinstance(in_features, int) or len(in_features) != 2:
            raise ValueError(
                f"in_features={in_features} is not the shape of a sequence, (steps, features): "
                "give GRUForecaster a source of series, or choose MLP"
            )
        num_steps, num_features = in_features
        check_widths(steps=num_steps, features=num_features, num_outputs=num_outputs, hidden_channels=hidden_channels)
        self.horizon = num_outputs
        self.hidden_channels = hidden_channels
        self.encoder = GRULayer(num_features, hidden_channels)
        self.decoder = GRULayer(num_features, hidden_channels)
        self.head = Linear(hidden_channels, 1)

    def forward(self, batch: ExampleBatch) -> NetOutput:
        """Return forecasts and embeddings of all examples of one client."""
        x_TNF = batch.x.movedim(-2, 0)
        state_ND = batch.x.new_zeros(*x_TNF.shape[1:-1], self.hidden_channels)
        for read_NG in self.encoder.read(x_TNF).unbind():
            state_ND = self.encoder.step(read_NG, state_ND)
        embedding_ND, x_NF, forecasts = state_ND, x_TNF[-1], []
        for _ in range(self.horizon):
            state_ND = self.decoder.step(self.decoder.read(x_NF), state_ND)
            forecasts.append(self.head(state_ND))
            x_NF = torch.cat([forecasts[-1], x_NF[..., 1:]], dim=-1)
        return NetOutput(torch.cat(forecasts, dim=-1), embedding_ND)
