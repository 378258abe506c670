"""Who uses the former name of a setting or a class is told the present one, wherever it stands."""

from pathlib import Path

import pytest
from commands import QUICKSTART, refused_after

import fl_lightning as fl
from fl_lightning.renamed import CLASSES, SETTINGS, present_name
from fl_lightning.strategies.decentralized import map_initialization

pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--strategy=FedAvg", "--strategy.mix_only_moved=true"], "mix_only_moved was renamed to masked_averaging"),
        (["--strategy=FedAux", "--strategy.personalised=false"], "personalised was renamed to personalized"),
        (["--strategy=PFedHN", "--strategy.new_embedding=initial"], "new_embedding was renamed to unseen_embedding"),
        (["--trainer.participation.max_void_rounds=2"], "max_void_rounds was renamed to max_failed_rounds"),
        (["--trainer.callbacks=NeighbourIds"], "NeighbourIds was renamed to NeighborIds"),
        (["--model.net=fl_lightning.models.NormalisedGCN"], "NormalisedGCN was renamed to NormalizedGCN"),
        (
            ["--strategy=SheafFMTL", "--strategy.maps=fl_lightning.strategies.decentralised.DenseMaps"],
            "fl_lightning.strategies.decentralised was renamed to fl_lightning.strategies.decentralized",
        ),
    ],
)
def test_on_the_command_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in refused_after(capsys, "fit", f"--config={QUICKSTART}", *arguments)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("strategy: {class_path: FedAvg, init_args: {mix_only_moved: true}}", "renamed to masked_averaging"),
        ("trainer: {participation: {max_void_rounds: 2}}", "renamed to max_failed_rounds"),
        (
            "trainer: {callbacks: [{class_path: fl_lightning.callbacks.GaussianAttack, init_args: {signals: ['*']}}]}",
            "renamed to client_outputs",
        ),
    ],
)
def test_in_a_configuration(content: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.yaml").write_text(content + "\n")
    assert expected in refused_after(capsys, "fit", f"--config={QUICKSTART}", f"--config={tmp_path / 'old.yaml'}")


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (fl.strategies.FedAvg, "mix_only_moved"),
        (fl.strategies.Panacea, "new_embedding"),
        (fl.strategies.decentralized.DenseMaps, "shared_start"),
        (fl.callbacks.GaussianAttack, "signals"),
        (fl.Participation, "max_void_rounds"),
    ],
)
def test_in_python(cls: type, name: str) -> None:
    now = present_name(cls, name)
    with pytest.raises(TypeError, match=rf"got '{name}', which was renamed to {now}: call \w+\({now}=...\)"):
        cls(**{name: None})


def test_each_former_name_leads_to_a_setting_and_to_a_class_that_there_is() -> None:
    classes = [
        *vars(fl.strategies).values(),
        *vars(fl.strategies.decentralized).values(),
        *vars(map_initialization).values(),
        *vars(fl.callbacks).values(),
        *vars(fl.models).values(),
        fl.Participation,
    ]
    classes = [each for each in classes if isinstance(each, type) and each.__module__.startswith("fl_lightning")]
    for name in SETTINGS:
        assert any(present_name(cls, name) for cls in classes), name
    known = {cls.__name__ for cls in classes} | {"ClientModule", "NeighborGenerationClient"}
    assert {now.partition(",")[0] for now in CLASSES.values()} <= known


def test_a_former_class_is_named_where_it_is_imported() -> None:
    with pytest.raises(ImportError, match="NeighbourIds was renamed to NeighborIds"):
        fl.callbacks.NeighbourIds  # noqa: B018
