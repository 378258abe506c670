"""Masked averaging: each coordinate is mixed over the clients that updated it, instead of over all.

A client whose data never touch a coordinate (such as the row of a word that it does not have) sends it back as it
received it. It has no information about it, yet in W θ it pulls the coordinate back to its old value. Niu, Wu, Tang,
Hua, Jia, Lv, Wu, Chen: "Billion-scale Federated Learning on Mobile Clients: A Submodel Design with Tunable Privacy",
MobiCom 2020, average a row of an embedding over the clients that have its key; here the coordinate itself shows which
clients updated it.

Shape legend: R rows of W (1 for one common model, else C), C clients that responded, P values of a parameter.
"""

import torch
from torch import Tensor


def masked_average(mixing_RC: Tensor, sent_CP: Tensor, received_CP: Tensor) -> Tensor:
    """W θ with each row of W restricted, coordinate by coordinate, to the clients that updated it, (R, P).

    With m_jp = [sent_jp ≠ received_jp] the result is Σ_j W_ij m_jp sent_jp / Σ_j W_ij m_jp, and plain W θ if no client
    with a positive weight in the row updated the coordinate. Local training must leave untouched coordinates alone: use
    no weight decay, or an optimizer of ``fl_lightning.optimizers``.

    Args:
        mixing_RC: W, without negative entries.
        sent_CP: What the clients sent.
        received_CP: What they had received; one row if it was the same for all.

    Example:
        >>> sent, received = torch.tensor([[1.0, 5.0], [3.0, 0.0], [0.0, 0.0]]), torch.zeros(1, 2)
        >>> masked_average(torch.tensor([[0.25, 0.25, 0.5]]), sent, received)
        tensor([[2., 5.]])
    """
    mixing_RC = mixing_RC.to(sent_CP)
    moved_CP = (sent_CP != received_CP).to(sent_CP)
    mass_RP = mixing_RC @ moved_CP
    mixed_RP = (mixing_RC @ moved_CP.mul_(sent_CP)).div_(mass_RP)
    still_P = (mass_RP == 0).any(dim=0).nonzero().flatten()  # 0 / 0 above
    if len(still_P):
        plain_RS = mixing_RC @ sent_CP.index_select(1, still_P)
        moved_RS = mixed_RP.index_select(1, still_P)
        mixed_RP.index_copy_(1, still_P, torch.where(mass_RP.index_select(1, still_P) == 0, plain_RS, moved_RS))
    return mixed_RP
