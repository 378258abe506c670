"""The blocks of a page of the documentation, executed in order; what they print is compared with what it shows."""

import contextlib
import io
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml

from fl_lightning.command_line import main
from fl_lightning.study.schema import read_file

#: A number of a page and of a run agree to so much; both are rounded, and machines add in different orders.
ABSOLUTE, RELATIVE = 0.02, 0.005
_NUMBER = re.compile(r"[-−]?\d+(?:\.\d+)?(?:e-?\d+)?")
#: Programs that no test starts, and what needs machines, kits or an account: those commands have tests of their own.
OTHER_PROGRAMS = ("git", "make", "source", "wandb", "torchrun", "srun", "pip")
ELSEWHERE = re.compile(r"--trainer\.accelerator gpu|--workers slurm|--kit |^fl-train (sites?|provision|submit) ")


def blocks(page: Path) -> list[tuple[str, str]]:
    """The blocks of a page, in order: language and text."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def command_lines(text: str) -> list[str]:
    """The command lines of a block: those after a ``$``, continued ones joined."""
    return [line.removeprefix("$ ") for line in text.replace("\\\n", " ").splitlines() if line.startswith("$ ")]


def run_page(page: Path, *, most_rounds: int | None = None) -> None:
    """Execute the blocks of a page; AssertionError where a command fails or the page shows what is not printed.

    Args:
        page: A Markdown file. Blocks in ``python`` and ``console`` run, those in ``yaml`` are read as configurations,
            or as studies, and those in ``output`` are what the block before them prints.
        most_rounds: Rounds at most; blocks in ``output`` are then not compared.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    printed = ""
    for language, text in blocks(page):
        if language == "output":
            if most_rounds is None:
                assert_shown(text, printed)
            continue
        with _captured() as stream:
            if language == "python":
                exec(compile(_fewer(text, most_rounds), page.name, "exec"), names)
            elif language == "console":
                for line in command_lines(text):
                    run_command(_fewer(line, most_rounds))
            elif language == "yaml" and "cases" in yaml.safe_load(text):
                Path("block.yaml").write_text(text)
                read_file(Path("block.yaml"))
            elif language == "yaml" and set(yaml.safe_load(text)) <= {"data", "model", "trainer", "strategy"}:
                Path("block.yaml").write_text(text)
                run_command("fl-train fit --config configs/fedavg_cora.yaml --config block.yaml --print_config")
        printed = stream.getvalue()


def run_command(line: str) -> None:
    """Run ``fl-train``, which must end well; what other programs do is not tried, but they must be known ones."""
    words = shlex.split(line, comments=True)
    if ELSEWHERE.search(line) or words[0] in OTHER_PROGRAMS:
        return
    assert words[0] == "fl-train", f"a program that no test knows: {line}"
    try:
        code = main(words[1:])
    except SystemExit as ended:  # --print_config
        code = int(ended.code or 0)
    assert code == 0, line


def assert_shown(shown: str, printed: str) -> None:
    """Every line that a page shows is printed, in this order; numbers agree roughly, and ``...`` stands for lines."""
    left = [line for line in map(_words, printed.splitlines()) if line]
    for line in filter(None, map(_words, shown.splitlines())):
        if line == "...":
            continue
        place = next((place for place, other in enumerate(left) if _agree(line, other)), None)
        assert place is not None, f"the page shows {line!r}, but this is printed:\n{printed}"
        left = left[place + 1 :]


def _agree(one: str, other: str) -> bool:
    if _NUMBER.sub("#", one) != _NUMBER.sub("#", other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    return all(math.isclose(_value(a), _value(b), rel_tol=RELATIVE, abs_tol=ABSOLUTE) for a, b in pairs)


def _value(text: str) -> float:
    return float(text.replace("−", "-"))


def _words(line: str) -> str:
    return " ".join(line.split())


def _fewer(text: str, most_rounds: int | None) -> str:
    if most_rounds is None:
        return text
    return re.sub(r"(num_rounds[ =])\d+", lambda match: f"{match[1]}{most_rounds}", text)


@contextlib.contextmanager
def _captured() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        yield stream
