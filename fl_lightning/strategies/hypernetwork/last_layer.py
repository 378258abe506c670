"""A hypernetwork's last layer in closed form: the ridge regression of the clients' models on the generator's features.

The layer generates θ_i = m + W φ_i from features φ centered over the clients. The W with the least
Σ_i ‖θ̃_i - m - W φ_i‖² + λ ‖W‖² for trained models θ̃ is W = (θ̃ - m)^T (K + λ I)^-1 φ with K = φ φ^T, so that

    generated = m + K (K + λ I)^-1 (θ̃ - m) = H θ̃.

W is never formed: H is C x C, and one product with θ̃ generates all models. Each parameter tensor p has a strength s_p
in [0, 1]: generated = m + s_p (H θ̃ - m), estimated from the clients' updates by leaving one out
(``relations/client_similarity.py``). It interpolates between one common model (0) and the kernel's prediction (1).

Shape legend: M clients asked for, C clients whose models are known, P generated parameters, Q of one of T tensors, H
width of the features.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl_lightning.relations.client_similarity import ridge_smoother, strength, transfer


def scaled_features(feature_MH: Tensor, is_known_M: Tensor, weight_C: Tensor) -> Tensor:
    """Features centered at the weighted mean of the known clients, with mean square norm 1 over these."""
    centered_MH = feature_MH - weight_C @ feature_MH[is_known_M]
    square = centered_MH[is_known_M].square().sum(dim=1).mean()
    return centered_MH / square.clamp(min=torch.finfo(square.dtype).tiny).sqrt()


class ClosedFormLayer(nn.Module):
    """The last layer; its content is the clients' models, and its only weight is λ.

    Args:
        sizes: Number of values in each parameter tensor; P in total.
        num_clients: Number of training clients.
        ridge: Initial λ, positive.
        strength: s of all tensors; None for estimates.

    Attributes:
        models_CP: The last trained model of every training client.
        weight_C: Its weight in the mean m, 0 for a client that has not responded yet.
        strength_T: s of each tensor.
        strength_factor: Factor on all strengths.
        own_T: Share of each tensor that comes from the client's own trained model, if there is one.
        columns: Columns of each tensor among the P values.
    """

    models_CP: Tensor
    weight_C: Tensor
    strength_T: Tensor

    def __init__(self, sizes: Sequence[int], num_clients: int, *, ridge: float, strength: float | None) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.fixed_strength, self.strength_factor = strength, 1.0
        self.log_ridge = nn.Parameter(torch.tensor(ridge).log())
        self.register_buffer("models_CP", torch.zeros(num_clients, sum(sizes)))
        self.register_buffer("weight_C", torch.zeros(num_clients))
        self.own_T = [0.0] * len(self.sizes)
        ends = list(itertools.accumulate(self.sizes))
        self.columns = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]
        self.register_buffer("strength_T", torch.full((len(sizes),), 0.0 if strength is None else strength))

    def start_from(self, parameters_P: Tensor) -> None:
        """Set the model that every client is given until a client has responded."""
        self.models_CP.copy_(parameters_P.expand_as(self.models_CP))

    def smoother(self, feature_MH: Tensor, is_known_M: Tensor, weight_C: Tensor) -> Tensor:
        """H for the requested clients, (M, C), with a gradient to features and λ."""
        feature_MH = scaled_features(feature_MH, is_known_M, weight_C)
        kernel_MC = feature_MH @ feature_MH[is_known_M].T
        return ridge_smoother(kernel_MC, kernel_MC[is_known_M], weight_C, self.log_ridge.exp())

    @torch.no_grad()
    def forward(self, feature_MH: Tensor, rows: Sequence[int]) -> Tensor:
        """Generate the models of some rows of the features, training clients first, (len, P)."""
        is_known_C = self.weight_C > 0
        mean_P = self._mean(is_known_C)
        if int(is_known_C.sum()) < 2:
            return mean_P.repeat(len(rows), 1)
        is_known_M = feature_MH.new_zeros(len(feature_MH), dtype=torch.bool)
        is_known_M[: len(is_known_C)] = is_known_C
        smoother_MC = self.smoother(feature_MH, is_known_M, self.shares())[list(rows)]
        generated_MP = smoother_MC @ (self.models_CP if is_known_C.all() else self.models_CP[is_known_C])
        trained = [index for index, row in enumerate(rows) if is_known_M[row]]
        of_trained = [rows[index] for index in trained]
        is_whole = trained == of_trained == list(range(len(self.models_CP)))
        strength_T = (self.strength_factor * self.strength_T).tolist()
        for columns, from_mean, share in zip(self.columns, strength_T, self.own_T, strict=True):
            generated_MQ = generated_MP[:, columns]
            torch.lerp(mean_P[columns], generated_MQ, from_mean, out=generated_MQ)
            if share and is_whole:
                generated_MQ[: len(self.models_CP)].lerp_(self.models_CP[:, columns], share)
            elif share:
                own_CQ = self.models_CP[of_trained, columns]
                generated_MQ[trained] = torch.lerp(generated_MQ[trained], own_CQ, share)
        return generated_MP

    def keep_own_(self, generated_P: Tensor, own_P: Tensor) -> None:
        """Mix the own model of an unseen client, which has no row, into its generated model as for the others."""
        for columns, share in zip(self.columns, self.own_T, strict=True):
            generated_P[columns].lerp_(own_P[columns].to(generated_P), share)

    def shares(self) -> Tensor:
        """Normalized weights of the clients that have responded, (C,)."""
        known_C = self.weight_C[self.weight_C > 0]
        return known_C / known_C.sum()

    def _mean(self, is_known_C: Tensor) -> Tensor:
        """m, (P,); the initial model as long as no client has responded."""
        weight_C = self.weight_C if is_known_C.any() else torch.ones_like(self.weight_C)
        return weight_C / weight_C.sum() @ self.models_CP

    @torch.no_grad()
    def ingest(self, rows: Sequence[int], models_CQ: Tensor, examples_C: Tensor, columns: slice = slice(None)) -> None:
        """Store what clients trained, for all values or for one tensor, and their weights."""
        places_C = torch.tensor(rows, device=self.models_CP.device)
        self.models_CP[:, columns].index_copy_(0, places_C, models_CQ.to(self.models_CP))
        self.weight_C[places_C] = examples_C.to(self.weight_C).clamp(min=1e-6)

    def gram(self, update_CP: Tensor) -> Tensor:
        """Inner products of the clients' updates by tensor, (T, C, C)."""
        return torch.stack([part_CQ @ part_CQ.T for part_CQ in torch.split(update_CP, self.sizes, dim=1)])

    def set_strengths(self, smoother_CC: Tensor, weight_C: Tensor, gram_TCC: Tensor) -> None:
        """Estimate s of each tensor, unless it is fixed."""
        if self.fixed_strength is None:
            result = [strength(smoother_CC, weight_C, gram_CC) for gram_CC in gram_TCC]
            self.strength_T.copy_(torch.stack(result))

    @staticmethod
    def loss(smoother_CC: Tensor, weight_C: Tensor, gram_TCC: Tensor) -> Tensor:
        """1 - transfer: how badly clients' updates are predicted from the others'; all tensors count equally."""
        trace_T = gram_TCC.diagonal(dim1=1, dim2=2).sum(dim=1)
        tiny = torch.finfo(trace_T.dtype).tiny
        whole_CC = (gram_TCC / trace_T.clamp(min=tiny)[:, None, None]).sum(dim=0)
        return 1 - transfer(smoother_CC, weight_C, whole_CC)
