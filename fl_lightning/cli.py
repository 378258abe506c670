"""The command line: ``fl-train fit|validate|test|predict|data``, with everything that LightningCLI users expect."""

import contextlib
import difflib
import inspect
import pkgutil
import re
import sys
import warnings
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any, NoReturn

import yaml
from jsonargparse import DefaultHelpFormatter
from lightning.fabric.loggers.logger import Logger
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console
from torch import nn

import fl_lightning.callbacks
import fl_lightning.models
import fl_lightning.run.loggers
from fl_lightning.callback import Callback, Trainer, WrongSetting
from fl_lightning.command_line import DESCRIPTION, TRAINER_VERBS, fail, options, settings_in
from fl_lightning.data import FederatedDataModule, Partitioner, Source, Splitter
from fl_lightning.executors import Executor
from fl_lightning.round.client import ClientModule
from fl_lightning.round.inspection import ServerDiverged
from fl_lightning.round_loop import ClientFailure, TooFewAnswers
from fl_lightning.run.folder import whole_file
from fl_lightning.run.predictions import Predicted, write_predictions
from fl_lightning.strategies import Strategy
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.trainer import LARGEST_SEED, FederatedTrainer
from fl_lightning.yaml_input import parse_yaml, use_in_parsers


class _HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the examples' lines."""


class _Parser(LightningArgumentParser):
    """Answers a mistake with one line and exit code 2."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        fail(_plain(message))


def _told(error: Exception) -> str:
    """An error in words; the operating system's with the file first."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


#: What the parser says of the types that a value is not of, whatever is wrong with it.
_NO_CAUSE = re.compile(r"Expected a (<class|path)|Not a valid subclass|Does not validate|a class path \(|a dict with")


def _plain(message: str) -> str:
    """What the parser says, without its lists of types and parsed objects, and with the names that would do."""
    given = re.search(r"Problem with given class_path '([^']+)'", message)
    if given and "." in given[1] and (why := _why_not_imported(given[1])):
        key = re.match(r'Parser key "([^"]+)"', message)
        return f"{f'{key[1]}: ' if key else ''}{given[1]!r} cannot be imported: {why}"
    if unknown := re.search(r"Expected a dot import path string: (\S+)", message):
        return _unknown_class(unknown[1], message)
    if unknown := re.fullmatch(r"Option '(\S+)' is not accepted", message):
        return _unknown_setting(unknown[1])
    if unknown := re.match(
        r"(?:unrecognized arguments: --|Subcommand '\w+' does not accept option ')([^\s=']+)", message
    ):
        return _unknown_option(unknown[1])
    if unknown := re.search(r"Dict must include a class_path .*NestedArg\(key='([^']+)'", message, flags=re.DOTALL):
        key = re.match(r'Parser key "([^"]+)"', message)
        name = f"model.{key[1]}" if key and key[1] == "optimizer" else key[1] if key else "it"
        example = "torch.optim.Adam" if name == "model.optimizer" else "a class path"
        return f"{name}.{unknown[1]} is given, but no class that it is of: give --{name} {example} before it"
    causes = [line for line in re.findall(r"^ +- (.+)$", message, flags=re.MULTILINE) if not _NO_CAUSE.match(line)]
    if "Does not validate against any of the Union" in message:
        key = re.match(r'Parser key "([^"]+)"', message)
        kinds = re.findall(r"- (?:Expected an? |Not a valid subclass of )(?:<class ')?([\w.]+)", message)
        given = re.search(r"Given value: (.*)", message)
        if not causes and kinds and given:
            causes = [f"expected {' or '.join(kinds)}, got {given[1] or 'nothing'}"]
        if causes:
            return f"{key[1]}: {causes[-1]}" if key else causes[-1]
    return message


def _why_not_imported(path: str) -> str:
    """What is wrong with a class path; empty if nothing is."""
    try:
        pkgutil.resolve_name(path)
    except Exception as error:  # a user's module can raise anything
        return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return ""


def _unknown_class(name: str, message: str) -> str:
    key = re.match(r'Parser key "([^"]+)"', message)
    if key is not None and key[1].endswith("net"):
        return _unknown_net(key[1], name)
    known = known_classes()
    named = re.findall(r"subclass of (\w+)", message)
    family = [
        base
        for base in known.values()
        if f"'{base.__module__}.{base.__qualname__}'" in message or base.__name__ in named
    ]
    names = sorted(
        n
        for n, cls in known.items()
        if not inspect.isabstract(cls) and cls not in family and (not family or issubclass(cls, family[0]))
    )
    near = difflib.get_close_matches(name, names, n=1)
    where = f"{key[1]}: " if key else ""
    if not family and not near:
        return f"{where}{name!r} is not accepted: --print_config shows what would be, --help what it is"
    advice = f"did you mean {near[0]}?" if near else f"give a class path, or one of {', '.join(names)}"
    return f"{where}there is no class {name!r}: {advice}"


def known_nets() -> list[str]:
    """Class paths of this package's nets and layers."""
    models = fl_lightning.models
    return [f"{models.__name__}.{net}" for net in models.__all__ if issubclass(getattr(models, net), nn.Module)]


def _unknown_net(key: str, name: str) -> str:
    paths = known_nets()
    nets = [path.rpartition(".")[2] for path in paths]
    near = difflib.get_close_matches(name.rpartition(".")[2], nets, n=1)
    why = f" ({_why_not_imported(name)})" if "." in name else ""
    advice = (
        f"did you mean fl_lightning.models.{near[0]}?" if near else f"give a class path, or one of {', '.join(paths)}"
    )
    return f"{key}: there is no net {name!r}{why}: {advice}"


#: What users of other trainers ask for.
_OTHER_NAMES = {
    "data.num_clients": "data.partitioner.num_clients",
    "trainer.epochs": "trainer.num_rounds",
    "trainer.max_epochs": "trainer.num_rounds",
    "trainer.max_steps": "trainer.num_rounds",
}


def _unknown_option(option: str) -> str:
    """What to say of an option that no parser has."""
    if option in _OTHER_NAMES:
        return f"there is no option --{option}: did you mean --{_OTHER_NAMES[option]}?"
    room, _, name = option.rpartition(".")
    rooms: dict[str, type] = {"trainer": FederatedTrainer, "data": FederatedDataModule}
    settings = list(inspect.signature(rooms[room]).parameters) if room in rooms else []
    if near := difflib.get_close_matches(name, settings, n=1):
        return f"there is no option --{option}: did you mean --{room}.{near[0]}?"
    return f"there is no option --{option}: {_unknown_setting(name)}"


def _unknown_setting(name: str) -> str:
    owners: dict[str, list[str]] = {}
    for owner, cls in known_classes().items():
        for setting in inspect.signature(cls).parameters:
            owners.setdefault(setting, []).append(owner)
    near = difflib.get_close_matches(name, sorted(owners), n=1)
    advice = f"did you mean {near[0]}? " if near else ""
    if name in owners:
        advice = f"it is one of {', '.join(sorted(owners[name]))}; "
    return f"there is no setting {name!r} here: {advice}--print_config shows those there are"


def known_classes() -> dict[str, type]:
    """What settings can name, and the bases, by bare name."""
    bases = (Strategy, Aggregation, Source, Partitioner, Splitter, Callback, Executor, ClientModule, Logger)
    found = [cls for base in bases for cls in _subclasses(base)]
    return {cls.__name__: cls for cls in found if cls is Logger or not cls.__module__.startswith("lightning.")}


def _chosen_strategy(words: Sequence[str]) -> type[Strategy]:
    """The strategy that the arguments and their files name last; the base class where none can be made out."""
    name = ""
    for option, value in options(words):
        if option in ("--strategy", "--strategy.class_path"):
            inline = _read(value)
            name = str(inline.get("class_path", "")) if isinstance(inline, dict) else value
        elif option in ("-c", "--config") and value:
            name = _strategy_of(settings_in(value), words[0]) or name
    found = known_classes().get(name)
    if found is None and name:
        if "." in name and (why := _why_not_imported(name)):
            fail(f"strategy {name!r} cannot be imported: {why}")
        with contextlib.suppress(ImportError, AttributeError, ValueError):  # the parser says what is wrong
            found = pkgutil.resolve_name(name)
    return found if inspect.isclass(found) and issubclass(found, Strategy) else Strategy


def _check_init_args(words: Sequence[str]) -> None:
    """Refuse ``init_args`` of what has none, which the parser drops where they are empty."""
    for option, value in options(words):
        if option in ("-c", "--config") and value:
            _check_nested(settings_in(value), ())
        elif option.startswith("--") and "init_args" in value:
            _check_nested(_read(value), tuple(option[2:].split(".")))


def _check_nested(settings: Any, place: tuple[str, ...]) -> None:
    if isinstance(settings, list):
        settings = dict(enumerate(settings))
    for key, value in settings.items() if isinstance(settings, dict) else ():
        if key == "init_args" and place[-1:] in (("init_args",), ("data",), ("trainer",)):
            fail(f"{'.'.join(place)} takes no init_args: give the settings right in {'.'.join(place)}")
        _check_nested(value, (*place, str(key)))


def _read(word: str) -> Any:
    """A word of the command line as YAML; None where it is none."""
    try:
        return parse_yaml(word)
    except yaml.YAMLError:
        return None


def _strategy_of(settings: dict[str, Any], verb: str) -> str | None:
    """What a configuration, of all verbs or of one, calls its strategy."""
    try:
        strategy = settings.get(verb, settings).get("strategy")
        name = strategy.get("class_path") if isinstance(strategy, dict) else strategy
        return name if isinstance(name, str) else None
    except AttributeError:
        return None  # the parser says what is wrong


def _default_model(strategy: type[Strategy], *, with_net: bool) -> dict[str, Any]:
    """The client that a strategy is written for; with the strategy's net for graphs where settings of it are given."""
    client, net = strategy.client_class, strategy.default_net or fl_lightning.models.GCN
    model: dict[str, Any] = {"class_path": f"{client.__module__}.{client.__qualname__}"}
    if with_net:
        model["init_args"] = {"net": {"class_path": f"{net.__module__}.{net.__qualname__}"}}
    return model


def _subclasses(base: type) -> list[type]:
    children: list[type] = base.__subclasses__()
    return [base, *(below for child in children for below in _subclasses(child))]


class _SaveConfig(Callback):
    """Writes config.yaml into the folder of a new run and shows it to the loggers that keep one.

    A resume with other settings writes config_resumed_<round>.yaml beside it.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        run = trainer.run
        changed = any(change.startswith(f"from round {run.round_idx} on") for change in run.changes)
        if changed:
            run.config_file = f"config_resumed_{run.round_idx}.yaml"
        elif not run.config_file or not (run.folder / run.config_file).exists():
            run.config_file = "config.yaml"
        path = run.folder / run.config_file
        if trainer.fabric.is_global_zero:
            if changed or not path.exists():
                with whole_file(path) as temporary:
                    temporary.write_text(run.config)
            for logger in run.loggers:
                if hasattr(logger, "continue_run"):
                    logger.log_hyperparams(parse_yaml(run.config))


class FederatedCLI(LightningCLI):
    """LightningCLI with a federated trainer and a strategy beside model and data.

    Args:
        args: Command line; that of the process if None.
    """

    def __init__(self, args: list[str] | None = None) -> None:
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

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """The verbs, and the arguments that are not options."""
        objects = {"client", "data", "strategy"}
        return dict.fromkeys(TRAINER_VERBS, objects)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, the chosen strategy's client being the default model.

        Unlike LightningCLI, arguments given from Python do not mind those of the process.
        """
        words = sys.argv[1:] if args is None else args
        use_in_parsers()
        if isinstance(words, list):
            words = [f"{word}=true" if word in ("--profile", "--resume_with_changes") else word for word in words]
            _check_init_args(words)
            with_net = any(option.startswith("--model.net.") for option, _ in options(words))
            model = _default_model(_chosen_strategy(words), with_net=with_net)
            for subparser in self._subcommand_parsers.values():
                subparser.set_defaults({"model": model})
        self.config = parser.parse_args(words)

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add trainer, strategy, model and data."""
        parser.add_class_arguments(FederatedTrainer, "trainer", instantiate=False, sub_configs=True, skip={"seed"})
        parser.add_subclass_arguments(Strategy, "strategy", required=True)
        parser.add_lightning_class_args(ClientModule, "model", subclass_mode=True, required=False)
        self.add_data(parser)

    def add_data(self, parser: LightningArgumentParser) -> None:
        """Add the data, which not every run reads here."""
        parser.add_lightning_class_args(FederatedDataModule, "data")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """``data`` is a verb and a group of settings, so its options are added by hand."""
        if subcommand != "data":
            return super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser = self.init_parser(**kwargs)
        self._add_arguments(parser)
        parser.add_argument("--csv", type=str | None, help="File to write the table to.")
        parser.add_argument("--picture", type=str | None, help="PNG file to draw each client's labels to.")
        self._subcommand_method_arguments[subcommand] = ["csv", "picture"]
        return parser

    def _parse_ckpt_path(self) -> None:
        """Take nothing of a checkpoint here; its settings are compared when it is read."""

    def _set_seed(self) -> None:
        seed = self._get(self.config, "seed_everything")
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= LARGEST_SEED:
            fail(f"seed_everything must be in [0, {LARGEST_SEED}], got {seed}")
        super()._set_seed()

    def instantiate_classes(self) -> None:
        """Build everything; a value that a constructor refuses is the user's mistake."""
        try:
            super().instantiate_classes()
        except (ValueError, OSError) as error:
            fail(_plain(_told(error)))

    def instantiate_trainer(self, **kwargs: Any) -> FederatedTrainer:  # type: ignore[override]
        """Build the trainer with the default callbacks that the user has not replaced."""
        own = self._get(self.config_init, "trainer")
        if not hasattr(own, "get"):
            fail(f"trainer is {own!r}: leave it out for its defaults, or give its settings")
        given = own["callbacks"] or []
        callbacks = list(given) if isinstance(given, list) else [given]
        seed = self._get(self.config, "seed_everything")
        config = self.config.get(str(self.subcommand), self.config).clone()
        for option in self._subcommand_method_arguments[str(self.subcommand)]:
            config.pop(option, None)  # of this verb alone: the file is for every verb
        callbacks.append(_SaveConfig())
        trainer = FederatedTrainer(**{**own, "callbacks": callbacks, "seed": int(seed)}, **kwargs)
        trainer.config = self._parser(self.subcommand).dump(config, skip_none=False)
        trainer.config_sources = tuple(str(path) for path in config.get("config") or ())
        return trainer

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        options = {name: self._get(self.config_init, name) for name in self._subcommand_method_arguments[subcommand]}
        if subcommand == "data":
            return {"data": self.datamodule, **options}
        strategy = self._get(self.config_init, "strategy")
        return {"client": self.model, "data": self.datamodule, "strategy": strategy, **options}

    def _run_subcommand(self, subcommand: str) -> None:
        """Run a verb; what is refused before training starts is the user's mistake, later errors are shown in full.

        Clients that fail, servers that diverge and full disks are no mistakes in the program: one line, exit code 1.
        """
        try:
            super()._run_subcommand(subcommand)
        except (ClientFailure, TooFewAnswers, ServerDiverged) as error:
            fail(str(error), code=1)
        except OSError as error:
            fail(_told(error), code=1 if self.trainer.started else 2)  # type: ignore[attr-defined]
        except ValueError as error:
            if self.trainer.started and not isinstance(error, WrongSetting):  # type: ignore[attr-defined]
                raise
            fail(str(error))

    def data(self, **options: Any) -> None:
        """Print the partition table."""
        table = self.trainer.data(**options)  # type: ignore[attr-defined]
        Console().print(table.rich_table())

    def predict(self, **options: Any) -> None:
        """Write what is predicted for every node or example to predictions.csv in the run's folder."""
        trainer: FederatedTrainer = self.trainer  # type: ignore[assignment]
        predictions = trainer.predict(**options)
        path = trainer.run.folder / "predictions.csv"
        if trainer.fabric.is_global_zero:
            write_predictions(
                path,
                (
                    Predicted(
                        holds=self.datamodule.clients[client],
                        own=self.datamodule.own_names(client),
                        output_NK=predicted_NK,
                    )
                    for client, predicted_NK in predictions.items()
                ),
            )
            Console().print(f"{sum(map(len, predictions.values()))} predictions in {path}")


def main(args: list[str] | None = None) -> int:
    """Entry point of ``fl-train``; returns the exit code (128 + signal number if a signal ended the run)."""
    warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated.*", category=DeprecationWarning)
    warnings.formatwarning = lambda message, *_, **__: f"fl-train: warning: {message}\n"
    cli = FederatedCLI(args)
    trainer: FederatedTrainer = cli.trainer  # type: ignore[assignment]
    received = trainer.run.interruption.received if trainer.has_run else None
    return 0 if received is None else 128 + received
