"""A run that is over, read from its folder: its clients' models, predictions and embeddings."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.batches.base import Batch, Collator, single
from fl_lightning.batches.client_data import ClientData
from fl_lightning.data import FederatedDataModule, Source
from fl_lightning.data.settings import check_count, check_text, user_path
from fl_lightning.executors import SequentialExecutor
from fl_lightning.federation import UserNames
from fl_lightning.report.folder import Recorded, read
from fl_lightning.round.client import ClientModule, NetFactory
from fl_lightning.round.stage import Evaluation, tune
from fl_lightning.run import checkpoint as checkpoints
from fl_lightning.run.assembly import Run
from fl_lightning.run.joining import joined
from fl_lightning.run.predictions import Predicted, write_predictions
from fl_lightning.strategies import Strategy
from fl_lightning.trained.models import agree, model_of, outputs_of
from fl_lightning.trained.new_data import Like, as_client_data, names_in, numbers_of, read_new
from fl_lightning.trained.rebuilt import from_configuration, from_parts


def load_run(
    path: str | Path,
    *,
    checkpoint: Literal["best", "last"] = "best",
    client: ClientModule | None = None,
    data: FederatedDataModule | None = None,
    strategy: Strategy | None = None,
) -> "LoadedRun":
    """Read a run from its folder, on the CPU.

    A run of ``fl-train fit`` is rebuilt from the configuration in its folder, whose data must be there. A run from
    Python has none: pass what it was given.

    Args:
        path: The run's folder, such as ``runs/quickstart/version_0``.
        checkpoint: ``best``, the round that validation chose and whose scores were reported, or ``last``.
        client: The client module of a run from Python; None for the strategy's.
        data: The data of a run from Python.
        strategy: The strategy of a run from Python.

    Raises:
        ValueError: It is no folder of a run, it has no such checkpoint or no configuration, or what was passed is not
            what the run was made with.

    Example:
        >>> import fl_lightning as fl
        >>> fl.load_run("runs/none")
        Traceback (most recent call last):
        ValueError: there is no folder runs/none: give the folder of a run, such as runs/quickstart/version_0
    """
    if checkpoint not in ("best", "last"):
        raise ValueError(f"checkpoint must be 'best' or 'last', got {checkpoint!r}")
    recorded = read(user_path("folder", path))
    file = recorded.path / "checkpoints" / f"{checkpoint}.ckpt"
    if not file.is_file():
        raise ValueError(f"{path} has no checkpoints/{checkpoint}.ckpt: train with the callback FederatedCheckpoint")
    with checkpoints.random_state_kept():
        if client is None and data is None and strategy is None:
            trainer, parts = from_configuration(recorded)
        else:
            trainer, parts = from_parts(checkpoints.peek(file)), (client, data, strategy)
        trainer.executor = SequentialExecutor()
        run = trainer.restored(*parts, ckpt_path=str(file))
    run.scored_round = run.last_round
    return LoadedRun(recorded, run, {run.registry.names[client]: client for client in run.training_clients})


class LoadedRun:
    """What :func:`load_run` returns, or :meth:`onboard`.

    Attributes:
        recorded: What the run's files say of it.
        names: Names of the training clients; after :meth:`onboard` of the new client alone.
        round_idx: The round after which the models were saved, from 0.
        scores: The new client's metrics, and ``epsilon`` of private training; others' metrics are in ``recorded``.
    """

    def __init__(
        self,
        recorded: Recorded,
        run: Run,
        index: Mapping[str, int],
        *,
        like: int | None = None,
        joined_run: "LoadedRun | None" = None,
        scores: Mapping[str, float] | None = None,
    ) -> None:
        self.recorded = recorded
        self._run = run
        self._index, self._like, self._joined_run = dict(index), like, joined_run
        self.names = tuple(self._index)
        self.round_idx = run.last_round
        self.scores = dict(scores or {})
        with checkpoints.random_state_kept():
            clients = tuple(self._index.values())
            self._evaluations = dict(run.strategy.evaluations(clients))
            self._predicted = run.executor.predict(self._evaluations[""], clients, run.scored_round)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.recorded.path)!r}, {self.strategy}, {len(self.names)} clients)"

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return type(self._run.strategy).__name__

    @property
    def num_features(self) -> int | tuple[int, ...]:
        """Width of the models' inputs, or their shape."""
        return self._run.registry.num_features

    @property
    def num_outputs(self) -> int:
        """Width of their outputs."""
        return self._run.registry.num_outputs

    @property
    def net_factories(self) -> tuple[NetFactory, ...]:
        """What made the clients' nets."""
        return tuple(self._run.model.net_factories)

    def client(self, name: str) -> nn.Module:
        """A client's model, as it was scored: mixed, personal, generated or fine-tuned, as the strategy has it.

        A user's plain net is returned as the module that it is. Other models are a
        :class:`~fl_lightning.trained.GraphModel` (``forward(x, edge_index)``), an
        :class:`~fl_lightning.trained.ExampleModel` (``forward(x)``) or, of sets of graphs and of links, a
        :class:`~fl_lightning.trained.BatchModel` (``forward(batch)``); their ``net`` is the client's net. All return
        logits and are in eval mode. On the client's own data each has been compared with :meth:`predictions`.

        Args:
            name: The client's name.

        Raises:
            ValueError: There is no such training client, or the strategy's outputs need more than the inputs, so that
                no module can compute them.
        """
        client = self._client(name)
        if self._run.strategy.needs_own_examples:
            raise ValueError(
                f"{self.strategy} predicts with what it keeps of the client's own examples, so that its model cannot "
                "leave: use predictions()"
            )
        module, way = self._module(client, self._evaluations[""])
        model = model_of(module, way.output, self._run.registry.task, self.data(name)).eval()
        if not self._agrees(model, name):
            raise ValueError(
                f"{self.strategy} predicts with more than a net and its inputs, so that its model cannot leave: use "
                "predictions()"
            )
        return model

    def global_model(self) -> nn.Module:
        """The server's model, if there is one that all clients share, before any fine-tuning.

        After :meth:`onboard` it is that of the run that the new client joined.

        Raises:
            ValueError: Each client has a model of its own.
        """
        module, way = self._shared()
        return model_of(module, way.output, self._run.registry.task, self.data(self.names[0])).eval()

    def _shared(self) -> tuple[ClientModule, Evaluation]:
        """The first client with the model that all share, and the way in which that is evaluated.

        Raises:
            ValueError: Each client has a model of its own.
        """
        if self._joined_run is not None:
            return self._joined_run._shared()
        own: set[str] = set()
        for kind in ("global/", ""):
            if (evaluation := self._evaluations.get(kind)) is None:
                continue
            ways = [self._module(client, evaluation, tuned=False) for client in self._index.values()]
            states = [module.net.state_dict() for module, _ in ways]
            own = {key for state in states for key, value in states[0].items() if not torch.equal(value, state[key])}
            if not own:
                return ways[0]
        if own.isdisjoint(name for name, value in ways[0][0].net.named_parameters() if value.requires_grad):
            raise ValueError(
                f"{self.strategy} has one model, but each client its own running statistics "
                f"({', '.join(sorted(own))}): train with model.running_statistics set to shared, or use client(name)"
            )
        raise ValueError(f"{self.strategy} left each client a model of its own: use client(name), --client NAME")

    def new_data(self, new: Any, client: str | None = None) -> ClientData:
        """New data in the form of a client's, prepared as the run's were.

        Args:
            new: A file, or what it holds: a graph for nodes; a list of graphs, of molecules also of their SMILES; a
                graph with ``edge_label_index`` for links; rows as a tensor, or ``x``, ``y`` and ``train_mask`` by name.
                Targets may be missing.
            client: The client whose data they are like; None for the first.

        Raises:
            ValueError: They do not fit.
        """
        name = client or self.names[0]
        source, index = self._source(name)
        given = read_new(Path(new), source) if isinstance(new, str | Path) else new
        like = Like(
            client_data=self.data(name),
            registry=self._run.registry,
            source=source,
            preparation=self._run.datamodule.source.preparation_of(index),
        )
        result = given if isinstance(given, ClientData) else as_client_data(like.client_data, given, like)
        like.check(result)
        return result

    def _source(self, name: str) -> tuple[Source, int]:
        """Where data come from that are like a client's, and the index of that client or of one like it."""
        index = self._client(name) if self._like is None else self._like
        return self._run.datamodule.source.of_client(index), index

    def onboard(
        self,
        new: Any,
        name: str = "new-client",
        *,
        like: str | None = None,
        neighbors: Mapping[str, float] | None = None,
        num_epochs: int | None = None,
    ) -> "LoadedRun":
        """Let a new client join the federation as it was trained, and give it the model that its method has for it.

        It does what clients that were held out do at the end of a run (``participation.held_out_fraction``): the
        strategy's onboarding stages, with the server of this round. Neither the server nor the others learn from it.

        Args:
            new: Its data, as for :meth:`new_data`. It trains on the examples with a target, or on those of
                ``train_mask``, and is scored on the rest of them.
            name: What it is called.
            like: The client whose data they are like; None for the first.
            neighbors: If the clients have a relation graph: its weight to each client that it is related to.
            num_epochs: Local epochs of each stage that trains; None for those of a round.

        Returns:
            The new client as a run. Its ``scores["epsilon"]`` is of this training; who joins again spends it again.

        Raises:
            ValueError: The data do not fit; its training fails; or nobody can join, since the clients of a
                decentralized method have no server, and layers that are each client's own mean nothing for another.

        Example::

            joined = fl.load_run("runs/quickstart/version_0").onboard("mine.pt", "hospital-7")
            joined.scores["test/acc"], joined.client("hospital-7")
        """
        check_text("name", name, "hospital-7")
        if num_epochs is not None:
            check_count("num_epochs", num_epochs, least=1)
        client_data = dataclasses.replace(self.new_data(new, like), name=name)
        with checkpoints.random_state_kept():
            run, scores = joined(self._run, client_data, neighbors, num_epochs)
        (index,) = run.unseen_clients
        alike = self._client(like or self.names[0]) if self._like is None else self._like
        return LoadedRun(self.recorded, run, {name: index}, like=alike, joined_run=self, scores=scores)

    def predict(self, new: Any, client: str | None = None, *, num_finetune_epochs: int = 0) -> Tensor:
        """Predict new examples: of a client, or of somebody who was not there.

        Args:
            new: As for :meth:`new_data`, or what that returned.
            client: The client whose model predicts; None for the server's model.
            num_finetune_epochs: Train the model beforehand on the new examples with a target (on those of
                ``train_mask``, if there is one), with the clients' loss and optimizer. The run's own is untouched.

        Returns:
            Probabilities, or numbers, (N, num_outputs).

        Raises:
            ValueError: The data do not fit, or there is no such model (:meth:`client`, :meth:`global_model`).
        """
        check_count("num_finetune_epochs", num_finetune_epochs, least=0)
        data = self.new_data(new, client)
        model = self.global_model() if client is None else self.client(client)
        if num_finetune_epochs:
            model = self._finetuned(data, client, num_finetune_epochs)
        return self._output(model, data, self._batch_of(data))[0]

    def new_names(self, new: Any, client: str | None = None) -> tuple[str, ...] | None:
        """What new data are called: of a table of molecules their names or SMILES, of others None."""
        return names_in(Path(new), self._source(client or self.names[0])[0]) if isinstance(new, str | Path) else None

    def write_predictions(
        self,
        path: Path,
        data: ClientData,
        predicted: Tensor,
        names: tuple[str, ...] | None = None,
        *,
        trained: bool = False,
    ) -> None:
        """Write predictions of new data as :mod:`fl_lightning.run.predictions` describes.

        Args:
            path: The file.
            data: The new data (:meth:`new_data`).
            predicted: What was predicted for them (:meth:`predict`).
            names: What the examples are called; None if they have no names.
            trained: Whether the model was trained on those that train (:meth:`onboard`); their split is none if not.
        """
        data = data if trained else dataclasses.replace(data, train_mask_N=torch.zeros_like(data.train_mask_N))
        own = UserNames(number_N=numbers_of(data), names=names, class_names=self._run.datamodule.class_names)
        task = self._run.registry.task
        write_predictions(path, [Predicted(task=task, client_data=data, names=own, output_NK=predicted)])

    def _finetuned(self, data: ClientData, client: str | None, num_epochs: int) -> nn.Module:
        """A copy of a model, trained on new data."""
        if not data.num_examples:
            raise ValueError("there is nothing to fine-tune on: give y, known for some of the new examples")
        module, way = self._shared() if client is None else self._module(self._client(client), self._evaluations[""])
        if way.output is not None:
            raise ValueError(f"{self.strategy} computes outputs by a rule of its own, so that it cannot be fine-tuned")
        executor, run = SequentialExecutor(), self._run
        with checkpoints.random_state_kept():
            executor.setup(
                run.fabric, module, self._collator_of(data), [0], seed=run.seed, persistence=run.strategy.persistence()
            )
            tuned = executor.evaluated(Evaluation(tuning=tune(num_epochs)), 0, run.scored_round)
        return model_of(tuned, None, run.registry.task, data).eval()

    def _collator_of(self, data: ClientData) -> Collator:
        known = self._run.executor.collator
        return self._run.datamodule.collator([data], device=self._run.fabric.device, dtype=known.dtype)

    def _batch_of(self, data: ClientData) -> Batch:
        return single(self._collator_of(data)([0]))

    def predictions(self) -> dict[str, Tensor]:
        """Predictions for all examples of each client: probabilities, or numbers, (N, num_outputs)."""
        return {name: self._predicted[client] for name, client in self._index.items()}

    def embeddings(self) -> dict[str, Tensor]:
        """The representation of all examples of each client from which its model predicts them, (N, hidden)."""
        result = {}
        for name, client in self._index.items():
            module, way = self._module(client, self._evaluations[""])
            with torch.no_grad():
                parts = [
                    module.ruled_output(way.output, module.parameter_dict(), part, module.context).embedding
                    for part in self.batch(name).parts()
                ]
            result[name] = torch.cat(parts)[: len(self._predicted[client])]
        return result

    def data(self, name: str) -> ClientData:
        """A client's data, as it was trained and scored on them; nodes that a strategy has added come last."""
        data: ClientData = self._run.executor.evaluation_collator.client_data(self._client(name))
        return data

    def batch(self, name: str) -> Batch:
        """A client's data as a batch, which nets of this package take."""
        return single(self._run.executor.evaluation_collator([self._client(name)]))

    def _client(self, name: str) -> int:
        if name not in self._index:
            raise ValueError(f"there is no training client {name!r}: give one of {', '.join(self.names)}")
        return self._index[name]

    def _module(self, client: int, evaluation: Evaluation, *, tuned: bool = True) -> tuple[ClientModule, Evaluation]:
        """A client with the model of an evaluation, and the way in which it is evaluated."""
        ((way, _),) = evaluation.ways([client])
        way = way if tuned else dataclasses.replace(way, tuning=None)
        with checkpoints.random_state_kept(), torch.no_grad():
            executor = self._run.executor.of(client)
            assert isinstance(executor, SequentialExecutor), "as the run was given"
            return executor.evaluated(way, client, self._run.scored_round), way

    def same(self, model: nn.Module, other: nn.Module, name: str) -> bool:
        """Whether two modules predict the same of a client's own data."""
        data, batch = self.data(name), self.batch(name)
        (predicted, tolerance), (expected, _) = (self._output(each, data, batch) for each in (model, other))
        return agree(predicted, expected, tolerance)

    def _agrees(self, model: nn.Module, name: str) -> bool:
        """Whether a model predicts of a client's own data what was scored."""
        known = self._predicted[self._client(name)]
        try:
            predicted, tolerance = self._output(model, self.data(name), self.batch(name))
        except (AttributeError, AssertionError, KeyError, IndexError, RuntimeError, TypeError, ValueError):
            return False  # it needs something that is not there
        return agree(predicted[: len(known)].to(known), known, tolerance)

    def _output(self, model: nn.Module, data: ClientData, batch: Batch) -> tuple[Tensor, float]:
        """A model's predictions, in the run's precision, and how far others of that precision may be from them."""
        with torch.no_grad(), self._run.fabric.autocast():
            return outputs_of(model, data, batch, self._run.registry.task.target)
