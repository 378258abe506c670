"""``fl-train provision | submit | sites``: a federation over a network, by NVIDIA FLARE."""

import argparse
import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fl_lightning.command_line import fail

_DESCRIPTION = {
    "provision": """Make kits with certificates for a server, its sites and who submits runs.

  fl-train provision federation.yaml --folder kits

federation.yaml:
  name: wards
  server: fl.example.org
  port: 8002
  sites: [berlin, paris, rome]
  admin: lead@example.org
""",
    "submit": """Have the sites of a federation train, follow them, and fetch the run's folder.

  fl-train submit --kit kits/lead@example.org --config configs/fedavg_cora.yaml --trainer.num_rounds 50

Other options are those of fl-train fit. A job that fails because a site's process died is submitted again, and goes on
from its last checkpoint.
""",
    "sites": """Try a federation out on this machine: provision, start a server and sites on 127.0.0.1, train, stop all.

  fl-train sites --config configs/quickstart.yaml --num_sites 3

Site k holds client k of the configuration's data. Other options are those of fl-train fit.
""",
}


class _Parser(argparse.ArgumentParser):
    """Answers a mistake with one line."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def _parser(verb: str) -> _Parser:
    parser = _Parser(
        prog=f"fl-train {verb}",
        description=_DESCRIPTION[verb],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    if verb == "provision":
        parser.add_argument("file", metavar="FILE", help="the federation, YAML")
        parser.add_argument("--folder", default="kits", help="where the kits are put (kits)")
        return parser
    if verb == "submit":
        parser.add_argument("--kit", required=True, help="folder of the kit of who submits")
        parser.add_argument("--sites", nargs="+", help="these alone, in the order of their clients; all, by name")
    else:
        parser.add_argument("--num_sites", type=int, default=3, help="sites (3)")
        parser.add_argument("--folder", default="runs/sites", help="where kits and logs are put (runs/sites)")
    parser.add_argument("--name", help="of the run; for --ckpt_path last that of the run to go on with")
    parser.add_argument("--ckpt_path", choices=["last"], help="go on where the run of this name stopped")
    parser.add_argument("--attempts", type=int, default=3, help="jobs to submit before giving up (3)")
    parser.add_argument("--timeout_seconds", type=int, default=600, help="in which a site must answer (600)")
    parser.add_argument("--num_outputs", type=int, help="classes of the federation; as many as the sites have seen")
    parser.add_argument("--secure", action="store_true", help="secure aggregation: the server learns sums alone")
    return parser


def _run(verb: Callable[[argparse.Namespace, list[str]], int], name: str, arguments: Sequence[str]) -> int:
    """Run a verb; what is wrong ends in one line."""
    warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated.*", category=DeprecationWarning)
    options, rest = _parser(name).parse_known_args(list(arguments))
    if importlib.util.find_spec("nvflare") is None:
        fail(f"fl-train {name} needs NVIDIA FLARE: pip install 'fl-lightning[flare]'")
    try:
        return verb(options, rest)
    except (ValueError, OSError) as error:
        fail(str(error))
    except RuntimeError as error:
        fail(str(error), code=1)


def provision(arguments: Sequence[str]) -> int:
    """Make the kits of a real federation, with certificates: ``fl-train provision``; returns the exit code."""
    return _run(_provision, "provision", arguments)


def submit(arguments: Sequence[str]) -> int:
    """Have a provisioned federation train, and fetch the run: ``fl-train submit``; returns the exit code."""
    return _run(_submit, "submit", arguments)


def sites(arguments: Sequence[str]) -> int:
    """Try a real federation on this machine alone: ``fl-train sites``; returns the exit code."""
    return _run(_sites, "sites", arguments)


def _provision(options: argparse.Namespace, rest: list[str]) -> int:
    from fl_lightning.remote import kits

    if rest:
        fail(f"fl-train provision has no option {rest[0]}")
    try:
        told: dict[str, Any] = yaml.safe_load(Path(options.file).read_text())
    except (OSError, yaml.YAMLError) as error:
        fail(f"{options.file}: {error}")
    needed = ("name", "server", "sites", "admin")
    if not isinstance(told, dict) or set(told) - {*needed, "port"} or not set(needed) <= set(told):
        fail(f"{options.file} must have {', '.join(needed)}, and may have port")
    folder = kits.provision(
        Path(options.folder),
        name=str(told["name"]),
        sites=[str(site) for site in told["sites"]],
        server=str(told["server"]),
        port=int(told.get("port", 8002)),
        admin=str(told["admin"]),
    )
    sys.stdout.write(f"kits in {folder}; give each participant its own, whose startup/start.sh starts it\n")
    return 0


def _submission(options: argparse.Namespace, rest: Sequence[str], sites: Sequence[str]) -> tuple[Any, Path]:
    """The run, and where its folder goes."""
    from fl_lightning.remote.job import Parts
    from fl_lightning.remote.submit import Submission

    if options.ckpt_path and not options.name:
        fail("--ckpt_path last needs --name, that of the run to go on with")
    if options.attempts < 1 or options.timeout_seconds < 1:
        fail("--attempts and --timeout_seconds must be at least 1")
    parts = Parts(rest)
    submission = Submission(
        name=options.name or f"{parts.trainer.root.name}-{time.strftime('%Y%m%d-%H%M%S')}",
        config=parts.trainer.config,
        sites=sites,
        ckpt_path=options.ckpt_path,
        timeout_seconds=options.timeout_seconds,
        num_outputs=options.num_outputs,
        secure=options.secure,
    )
    return submission, parts.trainer.root.parent


def _follow(session: Any, submission: Any, destination: Path, attempts: int, watch: Callable[[], None]) -> int:
    """Submit until it is done; returns the exit code."""
    from fl_lightning.remote.submit import follow

    def warn(message: str) -> None:
        sys.stderr.write(f"fl-train: warning: {message}\n")

    outcome = follow(session, submission, destination, attempts=attempts, watch=watch, warn=warn)
    if outcome.status != "finished":
        fail(f"{submission.name}: {outcome.message}", code=2 if outcome.status == "refused" else 1)
    chosen = {n: v for n, v in outcome.facts["result"].items() if n.startswith(("val/", "test/")) and "_" not in n}
    figures = "  ".join(f"{name} {value:.4f}" for name, value in chosen.items())
    sys.stdout.write(f"{submission.name}: {figures}\n{outcome.folder}\n")
    return 0


def _submit(options: argparse.Namespace, rest: list[str]) -> int:
    from fl_lightning.remote.submit import session_of

    with session_of(Path(options.kit)) as session:
        sites = options.sites or sorted(client.name for client in session.get_connected_client_list())
        if not sites:
            fail("no site is connected to the server: start them (startup/start.sh in their kits)")
        submission, destination = _submission(options, rest, sites)
        return _follow(session, submission, destination, options.attempts, lambda: None)


def _sites(options: argparse.Namespace, rest: list[str]) -> int:
    from fl_lightning.remote.submit import session_of
    from fl_lightning.remote.trial import Trial

    if options.num_sites < 1:
        fail(f"--num_sites must be at least 1, got {options.num_sites}")
    with Trial(Path(options.folder), options.num_sites) as trial:
        submission, destination = _submission(options, rest, trial.sites)
        trial.start()
        with session_of(trial.admin_kit) as session:
            trial.wait(session)
            return _follow(session, submission, destination, options.attempts, trial.processes.check)
