"""The command line: ``fl-train fit|validate|test|predict|data``, with everything that LightningCLI users expect."""

import contextlib
import inspect
import os
import pkgutil
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NoReturn

from jsonargparse import DefaultHelpFormatter, _typehints
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console

from fl_lightning.arguments import DESCRIPTION, TRAINER_VERBS, fail, named, options, read, settings_in, warn_in_one_line
from fl_lightning.data import FederatedDataModule
from fl_lightning.models import GCN
from fl_lightning.models.plain_inputs import takes_widths_by_name
from fl_lightning.refusals import known_classes, plain, summary_of, why_not_imported
from fl_lightning.round.client import ClientModule
from fl_lightning.round.inspection import ServerDiverged
from fl_lightning.run.allocator import keep_freed_memory
from fl_lightning.run.callback import WrongSetting
from fl_lightning.run.failures import ClientFailure, TooFewUpdates
from fl_lightning.run.predictions import Predicted, write_predictions
from fl_lightning.run.settings import LARGEST_SEED
from fl_lightning.strategies import Strategy
from fl_lightning.terminal import plain_text
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.yaml_input import use_in_parsers

#: Options that need no value.
_FLAGS = ("--profile", "--resume_with_changes")


class _HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the line breaks of the examples."""


class _Parser(LightningArgumentParser):
    """Reports a mistake with one line and exit code 2."""

    #: The command line, and the folder in which it was given.
    words: Sequence[str] = ()
    folder = "."

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)  # a configuration takes whole names alone, too

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        with contextlib.chdir(self.folder):  # out of that of the configuration which is being read
            fail(plain(message, self.words))


def _chosen_strategy(words: Sequence[str]) -> type[Strategy]:
    """The strategy that the arguments and their files name last; the base class if there is none."""
    name = named(words, "strategy")
    result = known_classes().get(name)
    if result is None and name:
        if "." in name and (why := why_not_imported(name)):
            fail(f"strategy {name!r} cannot be imported: {why}")
        with contextlib.suppress(ImportError, AttributeError, ValueError):  # the parser says what is wrong
            result = pkgutil.resolve_name(name)
    return result if inspect.isclass(result) and issubclass(result, Strategy) else Strategy


@contextlib.contextmanager
def _current_folder_by_path() -> Iterator[None]:
    """Search the current folder for modules by its whole path where Python searches it as ``''`` (in an interpreter).

    The parser reads a configuration in the configuration's folder, which ``''`` would then mean.
    """
    here = os.getcwd() if "" in sys.path else None
    if here is not None:
        sys.path.insert(sys.path.index(""), here)
    try:
        yield
    finally:
        if here is not None:
            sys.path.remove(here)


def _pass_widths_by_name() -> None:
    """Let the parser leave ``in_channels`` and ``out_channels`` of a net to the run, wherever its class has them.

    It would leave out the first two arguments, and ask for ``out_channels`` of PyG's models in place of
    ``hidden_channels``.
    """
    if getattr(_typehints.adapt_partial_callable_class, "by_name", False):
        return
    adapt: Callable[[Any, Any], tuple[Any, Any]] = _typehints.adapt_partial_callable_class

    def adapted(kind: Any, given: Any) -> tuple[Any, Any]:
        spec, skipped = adapt(kind, given)
        if skipped == {2} and takes_widths_by_name(pkgutil.resolve_name(spec["class_path"])):
            skipped = {"in_channels", "out_channels"}
        return spec, skipped

    adapted.by_name = True  # type: ignore[attr-defined]
    _typehints.adapt_partial_callable_class = adapted


def _check_init_args(words: Sequence[str]) -> None:
    """Refuse ``init_args`` where there can be none; the parser would silently drop empty ones."""
    for option, value in options(words):
        if option in ("-c", "--config") and value:
            _check_nested(settings_in(value), ())
        elif option.startswith("--") and "init_args" in value:
            _check_nested(read(value), tuple(option[2:].split(".")))


def _check_nested(settings: Any, path: tuple[str, ...]) -> None:
    if isinstance(settings, list):
        settings = dict(enumerate(settings))
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if key == "init_args" and path[-1:] in (("init_args",), ("data",), ("trainer",)):
            fail(f"{'.'.join(path)} takes no init_args: give the settings right in {'.'.join(path)}")
        _check_nested(value, (*path, str(key)))


def _default_model(strategy: type[Strategy], *, with_net: bool) -> dict[str, Any]:
    """The client class of a strategy, with the strategy's net for graphs if settings of it are given."""
    client, net = strategy.client_class, strategy.default_net or GCN
    model: dict[str, Any] = {"class_path": f"{client.__module__}.{client.__qualname__}"}
    if with_net:
        model["init_args"] = {"net": {"class_path": f"{net.__module__}.{net.__qualname__}"}}
    return model


class FederatedCLI(LightningCLI):
    """LightningCLI with a federated trainer, and a strategy in addition to model and data.

    Args:
        args: Command line; None for that of the process.
    """

    def __init__(self, args: list[str] | None = None) -> None:
        words = sys.argv[1:] if args is None else args
        self._given = [verb for verb in TRAINER_VERBS if verb in words[:1]]
        super().__init__(
            model_class=ClientModule,
            datamodule_class=FederatedDataModule,
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            subclass_mode_model=True,
            seed_everything_default=0,
            parser_class=_Parser,
            parser_kwargs={"description": DESCRIPTION, "prog": "fl-train", "formatter_class": _HelpFormatter},
            save_config_callback=None,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
            args=args,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The verb that is given, or all, and their arguments that are not options: parsers take time to make."""
        objects = {"client", "data", "strategy"}
        return dict.fromkeys(self._given or TRAINER_VERBS, objects)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, with the chosen strategy's client as the default model.

        Unlike in LightningCLI, arguments given from Python ignore those of the process.
        """
        words = sys.argv[1:] if args is None else args
        use_in_parsers()
        _pass_widths_by_name()
        if isinstance(words, list):
            words = [
                f"{word}=true" if word in _FLAGS and following.lower() not in ("true", "false") else word
                for word, following in pairwise([*words, ""])
            ]
            _Parser.words, _Parser.folder = words, os.getcwd()
            _check_init_args(words)
            # its settings, such as its dropout, would otherwise remain next to those of a net that is named
            with_net = any(o.startswith("--model.net.") for o, _ in options(words)) and not named(words, "model.net")
            model = _default_model(_chosen_strategy(words), with_net=with_net)
            for subparser in self._subcommand_parsers.values():
                subparser.set_defaults({"model": model})
        with _current_folder_by_path():
            self.config = parser.parse_args(words)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add trainer, strategy, model and data."""
        parser.add_class_arguments(FederatedTrainer, "trainer", instantiate=False, sub_configs=True, skip={"seed"})
        parser.add_subclass_arguments(Strategy, "strategy", required=True)
        parser.add_lightning_class_args(ClientModule, "model", subclass_mode=True, required=False)
        self.add_data(parser)

    def add_data(self, parser: LightningArgumentParser) -> None:
        """Add the data."""
        parser.add_lightning_class_args(FederatedDataModule, "data")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Add the options of ``data`` by hand, since it is both a verb and a group of settings."""
        if subcommand != "data":
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser = self.init_parser(**kwargs)
        self._add_arguments(parser)
        parser.set_defaults({"strategy": "FedAvg"})  # nothing is trained
        parser.add_argument("--csv", type=str | None, help="File to which the table is written.")
        drawn = "PNG file for a plot of each client's labels, numbers or links."
        parser.add_argument("--picture", type=str | None, help=drawn)
        self._subcommand_method_arguments[subcommand] = ["csv", "picture"]
        return parser

    def _parse_ckpt_path(self) -> None:
        """Ignore the checkpoint's settings here; they are compared when it is read."""

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= LARGEST_SEED:
            fail(f"seed_everything must be in [0, {LARGEST_SEED}], got {seed}")
        super()._set_seed()

    def instantiate_classes(self) -> None:
        """Build all objects; a value that a constructor refuses is the user's mistake."""
        try:
            super().instantiate_classes()
        except (ValueError, OSError) as error:
            fail(plain(summary_of(error), _Parser.words))

    def instantiate_trainer(self, **kwargs: Any) -> FederatedTrainer:  # type: ignore[override]
        """Build the trainer with the default callbacks that the user has not replaced."""
        settings = self._get(self.config_init, "trainer")
        if not hasattr(settings, "get"):
            fail(f"trainer is {settings!r}: leave it out for its defaults, or give its settings")
        given = settings["callbacks"] or []
        callbacks = list(given) if isinstance(given, list) else [given]
        seed = self._get(self.config, "seed_everything")
        config = self.config.get(str(self.subcommand), self.config).clone()
        for option in self._subcommand_method_arguments[str(self.subcommand)]:
            config.pop(option, None)  # options of this verb alone, while the file serves every verb
        trainer = FederatedTrainer(**{**settings, "callbacks": callbacks, "seed": int(seed)}, **kwargs)
        trainer.config = self._parser(self.subcommand).dump(config, skip_unset=False)
        trainer.config_sources = tuple(str(path) for path in config.get("config") or ())
        return trainer

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        options = {name: self._get(self.config_init, name) for name in self._subcommand_method_arguments[subcommand]}
        if subcommand == "data":
            return {"data": self.datamodule, **options}
        strategy = self._get(self.config_init, "strategy")
        return {"client": self.model, "data": self.datamodule, "strategy": strategy, **options}

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a verb; errors before training starts are the user's mistakes, later ones are shown in full.

        Failing clients, diverging servers and full disks are not bugs of the program: one line, exit code 1.
        """
        try:
            super()._run_subcommand(subcommand)
        except (ClientFailure, TooFewUpdates, ServerDiverged) as error:
            fail(str(error), code=1)
        except OSError as error:
            fail(summary_of(error), code=1 if self.trainer.started else 2)  # type: ignore[attr-defined]
        except ValueError as error:
            if self.trainer.started and not isinstance(error, WrongSetting):  # type: ignore[attr-defined]
                raise
            fail(str(error))

    def data(self, **options: Any) -> None:
        """Print the partition table."""
        table = self.trainer.data(**options)  # type: ignore[attr-defined]
        Console().print(table.rich_table())

    def predict(self, **options: Any) -> None:
        """Write the prediction for every node or example to predictions.csv in the run's folder."""
        trainer: FederatedTrainer = self.trainer  # type: ignore[assignment]
        predictions = trainer.predict(**options)
        path = trainer.run.folder / "predictions.csv"
        if trainer.fabric.is_global_zero:
            write_predictions(
                path,
                (
                    Predicted(
                        task=self.datamodule.task,
                        client_data=self.datamodule.clients[client],
                        names=self.datamodule.user_names(client),
                        output_NK=predicted_NK,
                    )
                    for client, predicted_NK in predictions.items()
                ),
            )
            Console().print(plain_text(f"{sum(map(len, predictions.values()))} predictions in {path}"), soft_wrap=True)


def main(args: list[str] | None = None) -> int:
    """Entry point of ``fl-train``; returns the exit code (128 + signal number if a signal ended the run)."""
    keep_freed_memory()
    warn_in_one_line()
    cli = FederatedCLI(args)
    trainer: FederatedTrainer = cli.trainer  # type: ignore[assignment]
    received = trainer.run.interruption.received if trainer.has_run else None
    return 0 if received is None else 128 + received
