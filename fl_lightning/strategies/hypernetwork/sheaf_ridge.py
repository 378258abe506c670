"""SheafRidge: every client's model is the common one and what the models of clients alike tell beyond it.

A method of this project, and the bare core of FedSheafHN with its last layer in closed form: no attention, no MLP. With
m the average of the clients' models θ̃ and G the Gram matrix of their embeddings in the common initial frame, centred
and diffused along a sheaf,

    θ_i = m + s Σ_j K_ij (θ̃_j - m),    K = G (G + λ I)^-1.

Sheaf and λ are trained on how well clients' updates are predicted by the others' alone, in closed form
(``relations/kinship.py``), and the strength s of each parameter tensor is estimated likewise, by empirical Bayes: K by
itself would give a client with no kin its own model back, whatever λ, because no other client tells how much of it is
noise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from fl_lightning.strategies.hypernetwork.fedsheafhn import FedSheafHN
from fl_lightning.strategies.hypernetwork.sheaf import SheafDiffusion


def sheaf_beside(in_channels: int) -> nn.Module:
    """A sheaf diffusion whose result is added to the embeddings."""
    return SheafDiffusion(in_channels, skip=True)


@dataclass(kw_only=True, eq=False)
class SheafRidge(FedSheafHN):
    """Kernel ridge regression of the clients' models on sheaf-diffused embeddings.

    Args:
        personal: Shell-style patterns of parameters that are not generated and never leave their client.
    """

    personal: Sequence[str] = ()
    init_epochs: int = 0
    embedding_model: Literal["own", "initial", "received"] = "initial"
    normalize_embeddings: bool = True
    diffusion: Callable[[int], nn.Module] = sheaf_beside
    hypernetwork_lr: float = 0.001
    mix_only_moved: bool = True
    predict: Literal["trained", "generated"] = "generated"
    diffusion_weight_decay: float = 0.0
    attention: Literal["qkv", "matrix", "none"] = field(default="none", init=False)
    num_hidden_layers: int = field(default=0, init=False)
    last_layer: Literal["gradient", "closed_form"] = field(default="closed_form", init=False)
