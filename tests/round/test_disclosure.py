"""The column "what leaves the client", which every strategy has without saying anything."""

from scripts import script

from fl_lightning.round.disclosure import what_leaves
from fl_lightning.round.payload import FLAT
from fl_lightning.round.program import LocalProgram
from fl_lightning.round.stage import Rows, Stage
from fl_lightning.strategies.mixing.fedproto import class_means

NAMES = ["convs.0.weight", "convs.0.mask", "head.weight", "head.bias", "projection"]


def test_parameters_are_named_by_what_stays() -> None:
    assert what_leaves(Stage(name="s"), NAMES) == []
    assert what_leaves(Stage(name="s", upload=tuple(NAMES)), NAMES) == ["all parameters"]
    assert what_leaves(Stage(name="s", upload=("convs.0.weight",), as_update=True), NAMES) == [
        "the change of all parameters but *.mask and head.* and projection"
    ]
    program = LocalProgram(send_anchor=True)
    assert what_leaves(Stage(name="s", upload=("head.bias", "convs.0.weight"), program=program), NAMES) == [
        "its anchor, a copy of 2 of 5 parameters"
    ]
    assert what_leaves(Stage(name="s", upload=(FLAT,)), NAMES) == ["all parameters"]


def test_outputs_are_described_by_their_functions() -> None:
    stage = Stage(name="s", client_outputs={"class": class_means, "row": class_means}, rows={"row": Rows(of="example")})
    whole, rows = what_leaves(stage, NAMES)
    assert whole.startswith("class: each class's mean embedding")
    assert rows.endswith(", for each of its examples")


def test_the_page_tells_what_leaves_under_every_strategy() -> None:
    """If it is not up to date: ``python benchmarks/what_leaves.py``."""
    module = script("benchmarks/what_leaves.py")
    page = module.page()
    assert page == module.PAGE.read_text()
    for kind in module.find_strategies():
        own = [line for line in page.splitlines() if line.startswith(f"| `{kind.__name__}` |")]
        assert own
        assert all(len(what.split(": ", 1)[-1]) > 1 for line in own for what in line.split(" | ")[2].split("; "))
