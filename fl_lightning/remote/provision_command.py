"""Kits with certificates for the sites of a federation: ``fl-train provision FILE``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.command_line import fail
from fl_lightning.remote.verbs import Parser, run_verb

_DESCRIPTION = """Make kits with certificates for a server, its sites and who submits runs.

  fl-train provision federation.yaml --folder kits

federation.yaml:
  name: wards
  server: fl.example.org
  port: 8002
  sites: [berlin, paris, rome]
  admin: lead@example.org
"""
_NEEDED = ("name", "server", "sites", "admin")


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    parser = Parser("provision", _DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="the federation, YAML")
    parser.add_argument("--folder", default="kits", help="where the kits are put (kits)")
    return run_verb(_provision, parser, arguments)


def _provision(options: argparse.Namespace, rest: list[str]) -> int:
    from fl_lightning.remote.kits import provision

    if rest:
        fail(f"fl-train provision has no option {rest[0]}")
    try:
        told: dict[str, Any] = yaml.safe_load(Path(options.file).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        fail(f"{options.file} cannot be read: {error}")
    if not isinstance(told, dict) or set(told) - {*_NEEDED, "port"} or not set(_NEEDED) <= set(told):
        fail(f"{options.file} must have {', '.join(_NEEDED)}, may have port, and has nothing else")
    if not isinstance(told["sites"], list) or not told["sites"]:
        fail(f"{options.file}: sites is {told['sites']!r}, give a list of names")
    folder = provision(
        Path(options.folder),
        name=str(told["name"]),
        sites=[str(site) for site in told["sites"]],
        server=str(told["server"]),
        port=int(told.get("port", 8002)),
        admin=str(told["admin"]),
    )
    sys.stdout.write(f"kits in {folder}; give each participant its own, whose startup/start.sh starts it\n")
    return 0
