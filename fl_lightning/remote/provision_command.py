"""Kits with certificates for the sites of a federation: ``fl-train provision FILE``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_lightning.arguments import fail
from fl_lightning.data.settings import check_count, check_text
from fl_lightning.remote.verbs import Parser, run_verb
from fl_lightning.yaml_input import WrongYaml, read_yaml

_DESCRIPTION = """Make kits with certificates for a server, its sites and the submitter of runs.

  fl-train provision federation.yaml --folder kits

federation.yaml:
  name: wards
  server: fl.example.org
  port: 8002
  sites: [berlin, paris, rome]
  admin: lead@example.org
"""
_NEEDED = {"name": "wards", "server": "fl.example.org", "sites": "berlin", "admin": "lead@example.org"}


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    parser = Parser("provision", _DESCRIPTION)
    parser.add_argument("file", metavar="FILE", help="the federation (YAML)")
    parser.add_argument("--folder", default="kits", help="where to put the kits (kits)")
    return run_verb(_provision, parser, arguments)


def _provision(options: argparse.Namespace, rest: list[str]) -> int:
    from fl_lightning.remote.kits import CA_FILE, check_names, provision
    from fl_lightning.remote.names import check_folder_for_processes

    if rest:
        fail(f"fl-train provision has no option {rest[0]}")
    try:
        settings: dict[str, Any] = read_yaml(Path(options.file))
    except WrongYaml as error:
        fail(str(error))
    if not isinstance(settings, dict) or set(settings) - {*_NEEDED, "port"} or not set(_NEEDED) <= set(settings):
        fail(f"{options.file} must have {', '.join(_NEEDED)}, may have port, and must have nothing else")
    if not isinstance(settings["sites"], list) or not settings["sites"]:
        fail(f"{options.file}: sites is {settings['sites']!r}, give a list of names")
    port = settings.get("port", 8002)
    check_count(f"{options.file}: port", port, most=65535)
    for key, example in _NEEDED.items():
        for name in settings[key] if key == "sites" else [settings[key]]:
            check_text(f"{options.file}: {key}", name, example)
    named = {key: settings[key] for key in _NEEDED}
    try:
        check_names(**named)
    except ValueError as error:
        fail(f"{options.file}: {error}")
    check_folder_for_processes(Path(options.folder), "--folder")
    folder = provision(Path(options.folder), **named, port=port)
    sys.stdout.write(f"kits are in {folder}; give each participant its own kit and have it run startup/start.sh\n")
    sys.stdout.write(
        f"the authority's private key is in {folder.parent / CA_FILE}: whoever has it can make a kit for anybody. "
        "Keep it off the server and the sites: move the folder state to a medium that is locked away, or delete it "
        "if the federation will have no new participants\n"
    )
    return 0
