"""An estimate of the memory that a client needs while it is trained together with others."""

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context

#: Number of tensors of the parameters' size in training: parameters, gradients, two moments and the update.
PARAMETER_COPIES = 5
#: The backward pass needs gradients of activations in addition to the activations, and both have temporaries.
ACTIVATION_COPIES = 2


def client_bytes(client: ClientModule, batch: Batch) -> int:
    """An estimate of the memory of one client's step, from what one forward pass keeps for the backward pass.

    Args:
        client: The client, in training mode.
        batch: One client's batch, without the client dimension; a mini-batch if it draws them.
    """
    parameters = client.parameter_dict()
    given = {tensor.untyped_storage().data_ptr() for tensor in (*parameters.values(), *batch.tensors().values())}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = client.objective(parameters, batch, Context(anchor=parameters))
    del loss
    num_parameter_bytes = sum(parameter.nbytes for parameter in parameters.values())
    return PARAMETER_COPIES * num_parameter_bytes + ACTIVATION_COPIES * sum(storages.values())
