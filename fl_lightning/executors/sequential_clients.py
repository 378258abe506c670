"""The clients of the sequential executor: those of a round are loaded as modules, the others are stored."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from fl_lightning.executors.in_process import InProcessExecutor
from fl_lightning.executors.optimizer_state import check_optimizer, pack_optimizer_state, unpack_optimizer_state
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload


class SequentialClients(InProcessExecutor):
    """Base class of the sequential executor.

    Attributes:
        modules: The loaded clients.
        optimizers: Their optimizers.
        client_states: Their client states.
    """

    def _clear(self) -> None:
        self.modules: dict[int, ClientModule] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self.client_states: dict[int, dict[str, Tensor]] = {}

    def _at_hand(self) -> list[int]:
        return sorted(self.modules)

    def _leave(self, clients: Sequence[int]) -> None:
        """Unload clients."""
        self._put_away(clients)
        for client in clients:
            del self.modules[client], self.optimizers[client], self.client_states[client]

    def _create(self, client: int) -> None:
        """Load a client in its initial state."""
        self.modules[client] = self._new_module()
        self.optimizers[client] = check_optimizer(self.modules[client].configure_optimizers())
        self.client_states[client] = {
            n: self.first_client_state(spec, [client])[0] for n, spec in self.state_specs.items()
        }

    def _new_module(self) -> ClientModule:
        module = copy.deepcopy(self.client)
        module.fabric = self.fabric
        load(module, self.initial)
        return module

    def _activate(self, client: int) -> None:
        """Let a client begin a stage of the round: what has not lived on is reset."""
        if client in self.active:
            return
        if client not in self.modules:
            self._create(client)
            if client in self.store:
                self._load_rows(self._stored([client]))
        else:
            module = self.modules[client]
            load(module, {name: tensor for name, tensor in self.initial.items() if name not in self.lasting})
            if not self.persistence.optimizer:
                self.optimizers[client] = check_optimizer(module.configure_optimizers())
        self.active.add(client)

    def _module_of(self, client: int) -> ClientModule:
        """A copy of a client that is not active, with the parameters that have lived on and else the initial ones."""
        module = self._new_module()
        if client in self.modules:
            parameters = self.modules[client].parameter_dict()
            load(module, {name: parameters[name].detach() for name in self.lasting})
        elif client in self.store:
            load(module, {name: tensor[0] for name, tensor in self._stored([client]).parameters.items()})
        return module

    def _client_state_of(self, client: int) -> dict[str, Tensor]:
        """The client state from earlier stages."""
        if client in self.client_states:
            return self.client_states[client]
        client_state = {
            name: self.first_client_state(spec, [client])[0] for name, spec in self.lasting_state_specs().items()
        }
        if client in self.store:
            client_outputs = self._stored([client]).extras
            client_state |= {name: client_outputs[f"client_state/{name}"][0] for name in client_state}
        return client_state

    @contextmanager
    def _copies(self, clients: Sequence[int]) -> Iterator[None]:
        themselves = self.modules, self.optimizers, self.client_states
        modules = {client: self._module_of(client) for client in clients}
        for client in self.active & modules.keys():
            load(modules[client], detached(self.modules[client]))
        client_states = {client: dict(self._client_state_of(client)) for client in clients}
        optimizers = {client: check_optimizer(module.configure_optimizers()) for client, module in modules.items()}
        self.modules, self.optimizers, self.client_states = modules, optimizers, client_states
        try:
            yield
        finally:
            self.modules, self.optimizers, self.client_states = themselves

    def _rows(self, clients: Sequence[int]) -> Payload:
        nets = [dict(self.modules[client].net.named_parameters()) for client in clients]
        optimizers = [self.optimizers[client] for client in clients]
        client_outputs = pack_optimizer_state(
            ((name, [net[name] for net in nets], optimizers) for name in self.initial), self.fabric.device
        )
        parameters = {name: torch.stack([net[name].detach() for net in nets]) for name in self.initial}
        for name, spec in self.lasting_state_specs().items():
            values = [self.client_states[client][name] for client in clients]
            padded = pad_sequence(values, batch_first=True) if spec.per_example else torch.stack(values)
            client_outputs[f"client_state/{name}"] = padded
        rows = Payload(clients=tuple(clients), parameters=parameters, extras=client_outputs)
        return self._as_rows(clients, rows.named())

    def _load_rows(self, rows: Payload) -> None:
        for row, client in enumerate(rows.clients):
            if client not in self.modules:
                self._create(client)
            module = self.modules[client]
            load(module, {name: tensor[row] for name, tensor in rows.parameters.items()})
            for name, parameter in module.net.named_parameters():
                if f"optimizer/started/{name}" in rows.extras:
                    unpack_optimizer_state(name, row, parameter, self.optimizers[client], rows)
            for name, spec in self.lasting_state_specs().items():
                value = rows.extras[f"client_state/{name}"][row].to(self.fabric.device)
                self.client_states[client][name] = (
                    value[: self.collator.size(client)] if spec.per_example else value.clone()
                )


def detached(module: ClientModule) -> dict[str, Tensor]:
    """A client's parameters, detached."""
    return {name: parameter.detach() for name, parameter in module.parameter_dict().items()}


def load(module: ClientModule, tensors: Mapping[str, Tensor]) -> None:
    """Copy values into some of a client's parameters."""
    parameters = module.parameter_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
