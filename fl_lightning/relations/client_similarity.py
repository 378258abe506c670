"""How well clients predict each other: linear predictions of each client's parameters from those of all clients.

A smoother H (C, C) predicts the clients' parameters T (C, P) as H T; its rows sum to one. With leave-one-out, client i
is predicted by the others alone: row i of H without its diagonal entry, rescaled to sum to one. That is the refitted
prediction for every smoother whose refit is H with t_i replaced by its own prediction (Craven and Wahba, "Smoothing
Noisy Data with Spline Functions", Numerische Mathematik, 1978); it needs only H.

Everything here is computed from the Gram matrix G = T T^T, which costs one product with T, however long T is.

Shape legend: C clients, M clients predicted for, D features.
"""

import torch
from torch import Tensor


def mean_smoother(weight_C: Tensor) -> Tensor:
    """The smoother that predicts every client by the weighted mean, (C, C)."""
    return weight_C.expand(len(weight_C), -1)


def ridge_smoother(kernel_MC: Tensor, kernel_CC: Tensor, weight_C: Tensor, ridge: Tensor | float) -> Tensor:
    """Kernel ridge regression about the weighted mean: 1 w^T + K (K + λ I)^-1 (I - 1 w^T), (M, C).

    Args:
        kernel_MC: K between predicted and observed clients.
        kernel_CC: K among observed clients, positive semidefinite.
        weight_C: w of the mean; sums to one.
        ridge: λ > 0.
    """
    identity_CC = torch.eye(len(kernel_CC)).to(kernel_CC)
    about_mean_CC = identity_CC - mean_smoother(weight_C)
    beyond_CC: Tensor = torch.linalg.solve(kernel_CC + ridge * identity_CC, about_mean_CC)
    return weight_C + kernel_MC @ beyond_CC


def leave_one_out(smoother_CC: Tensor) -> Tensor:
    """The smoother that predicts each client from the others alone: zero diagonal, rows that sum to one, (C, C).

    Example:
        >>> leave_one_out(torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.25, 0.25, 0.5]]))
        tensor([[0.0000, 1.0000, 0.0000],
                [0.0000, 0.0000, 1.0000],
                [0.5000, 0.5000, 0.0000]])
    """
    own_C = smoother_CC.diagonal()
    others_CC = smoother_CC - own_C.diag_embed()
    return others_CC / (1 - own_C)[:, None]


def squared_error(smoother_CC: Tensor, gram_CC: Tensor) -> Tensor:
    """‖(I - H) T‖², scalar."""
    residual_CC = torch.eye(len(smoother_CC)).to(smoother_CC) - smoother_CC
    return ((residual_CC @ gram_CC) * residual_CC).sum()


def transfer(smoother_CC: Tensor, weight_C: Tensor, gram_CC: Tensor) -> Tensor:
    """Leave-one-out share of the variance about the mean that other clients explain: 1 - e(H) / e(mean), scalar.

    1 if similar clients explain everything, 0 if no more than the mean does, negative if they mislead.
    """
    error = squared_error(leave_one_out(smoother_CC), gram_CC)
    tiny = torch.finfo(gram_CC.dtype).tiny
    return 1 - error / squared_error(leave_one_out(mean_smoother(weight_C)), gram_CC).clamp(min=tiny)


def strength(smoother_CC: Tensor, weight_C: Tensor, gram_CC: Tensor) -> Tensor:
    """The factor by which to shrink what a smoother adds to the mean, in [0, 1], scalar.

    It is the slope of the regression, over all clients and coordinates, of observations on leave-one-out predictions,
    both relative to the others' mean. With n similar clients and h the share of the variance that similar clients have
    in common, it tends to n h / (n h + 1 - h), that of the best linear predictor; with unrelated clients it tends to 0,
    however much of its own parameters the smoother gives each client.
    """
    predicted_CC = leave_one_out(smoother_CC)
    mean_CC = leave_one_out(mean_smoother(weight_C))
    added_CC = predicted_CC - mean_CC
    observed_CC = torch.eye(len(mean_CC)).to(mean_CC) - mean_CC
    product_CC = added_CC @ gram_CC
    square = (product_CC * added_CC).sum()
    slope = (product_CC * observed_CC).sum() / square.clamp(min=torch.finfo(square.dtype).tiny)
    return torch.where(square > 1e-9 * gram_CC.diagonal().sum(), slope, 0.0).clamp(0.0, 1.0)
