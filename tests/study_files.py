"""The study files of the repository."""

from pathlib import Path

STUDIES = sorted((Path(__file__).parents[1] / "studies").glob("*.yaml"))
