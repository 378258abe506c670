"""Files that are written whole: the table of renamed settings, the glossary, the list of words; and how they are used."""

import shutil
from pathlib import Path

HERE = Path(__file__).parent


def write(root: Path) -> None:
    for source in sorted((HERE / "files").rglob("*")):
        if source.is_file() and source.name != ".spelling":
            target = root / source.relative_to(HERE / "files")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    words(root)


def words(root: Path) -> None:
    """Add to the list of words what it lacks."""
    path = root / ".spelling"
    lines = path.read_text().splitlines() if path.exists() else []
    known = {line.partition("->")[0] for line in lines}
    lines += [line for line in (HERE / "files/.spelling").read_text().splitlines() if line.partition("->")[0] not in known]
    path.write_text("\n".join(sorted(lines)) + "\n")
