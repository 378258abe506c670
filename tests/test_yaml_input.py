"""YAML from people and from elsewhere: the rules of YAML 1.2, limits, and files that are none."""

import math
import os
from pathlib import Path

import pytest
import yaml

from fl_lightning.command_line import main
from fl_lightning.yaml_input import WrongYaml, dump_yaml, parse_yaml, read_yaml

BOMB = "a: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{level + 1}: &a{level + 1} [{', '.join([f'*a{level}'] * 10)}]\n" for level in range(9)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("089", 89),
        ("0o17", 15),
        ("0x1F", 31),
        ("-5", -5),
        ("1e-2", 0.01),
        ("1E5", 100000.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", -math.inf),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("no", "no"),
        ("on", "on"),
        ("2024-01-01", "2024-01-01"),
        ("True", True),
        ("~", None),
        ("{a: &x {b: 1}, c: {<<: *x, b: 2}}", {"a": {"b": 1}, "c": {"b": 2}}),
        ("!!map {a: !!seq [!!bool TRUE, !!str no, !!null '', !!int 3]}", {"a": [True, "no", None, 3]}),
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    actual = parse_yaml(text)
    assert actual == value
    assert type(actual) is type(value)


@pytest.mark.parametrize("value", ["1e-2", "010", "089", "0o7", "no", "1:30", "null", "", "<<", "é", 1e-5, 1e20, -3])
def test_what_is_written_is_read_as_it_was(value: object) -> None:
    assert parse_yaml(dump_yaml({"a": value})) == {"a": value}
    assert yaml.safe_load(dump_yaml({"a": value})) == {"a": value}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "more than 100,000 values"),
        ("&a [*a]", "it contains itself"),
        ("&a {b: {c: *a}}", "it contains itself"),
        ("[" * 5000, "more than 64 levels"),
        ("- " * 5000 + "a", "more than 64 levels"),
        ("9" * 400, "a number of 400 characters"),
        ("9" * 5000, "a number of 5000 characters"),
        ("0." + "3" * 500, "a number of 502 characters"),
        ("!!int 1:30", "is not a valid int"),
        ("{a: 1, a: 2}", "a stands twice"),
        ("{1: a, 0x1: b}", "0x1 stands twice"),
        ("{a: 1, ? !!str a : 2}", "a stands twice"),
        ("[!!python/name:os.system x]", "no setting is of the type !!python/name:os.system: leave it out"),
        ("a: 1\nb: !own x", "line 2: no setting is of the type !own"),
        ("!!bool foo", "'foo' is not a valid bool"),
        ("!!bool [x]", "expected a scalar node"),
        ("!!null x", "'x' is not a valid null"),
        ("!!timestamp foo", "no setting is of the type !!timestamp"),
        ("!!timestamp 2001-99-99", "no setting is of the type !!timestamp"),
        ("!!set {a, b}", "no setting is of the type !!set"),
        ("!!set a", "no setting is of the type !!set"),
        ("!!omap [a: 1]", "no setting is of the type !!omap"),
        ("!!pairs a", "no setting is of the type !!pairs"),
        ("!!binary aGVsbG8=", "no setting is of the type !!binary"),
        ("!!map a", "expected a mapping node"),
        ("!!seq a", "expected a sequence node"),
        ("!!str [a]", "expected a scalar node"),
        ("{[a]: b}", "unhashable key"),
        ("a: \x07", "special characters"),
    ],
)
def test_what_is_beyond_the_limits_is_refused_at_once(text: str, why: str) -> None:
    with pytest.raises(yaml.YAMLError, match=why):
        parse_yaml(text)


def test_no_file_but_a_regular_one_is_read(tmp_path: Path) -> None:
    pipe, large, other = tmp_path / "pipe.yaml", tmp_path / "large.yaml", tmp_path / "other.yaml"
    os.mkfifo(pipe)
    large.write_text("a: 1\n" * 300_000)
    other.write_bytes(b"a: \xff")
    for path, why in [
        (pipe, "it is not a regular file"),
        (Path("/dev/zero"), "it is not a regular file"),
        (tmp_path, "Is a directory"),
        (large, "larger than 1,048,576 bytes"),
        (other, "byte 3"),
        (tmp_path / "missing.yaml", "No such file"),
    ]:
        with pytest.raises(WrongYaml, match=why) as caught:
            read_yaml(path)
        assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--config=pipe.yaml"], "pipe.yaml cannot be read (it is not a regular file)"),
        (["--config=bomb.yaml"], "bomb.yaml is not YAML: more than 100,000 values"),
        (["--config=quickstart.yaml", "--trainer.num_rounds=" + "9" * 400], "a number of 400 characters"),
        (["--config=quickstart.yaml", "--trainer.num_rounds=" + "9" * 5000], "a number of 5000 characters"),
        (["--config=quickstart.yaml", "--trainer.num_rounds=1:30"], "expected int, got 1:30"),
        (["--config=quickstart.yaml", "--trainer", "pipe.yaml"], "pipe.yaml cannot be read (it is not a regular file)"),
        (["--config=nested.yaml"], "pipe.yaml cannot be read (it is not a regular file)"),
    ],
)
def test_the_command_line_updates_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    quickstart = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
    (tmp_path / "quickstart.yaml").write_text(quickstart.read_text())
    (tmp_path / "bomb.yaml").write_text(BOMB)
    (tmp_path / "nested.yaml").write_text("strategy: FedAvg\ntrainer: pipe.yaml\n")
    os.mkfifo(tmp_path / "pipe.yaml")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["fit", *words])
    assert ended.value.code == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert why in error


def test_numbers_of_a_configuration_are_what_they_look_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("strategy: FedAvg\ntrainer:\n  num_rounds: 010\n  run_name: '1e-2'\n")
    with pytest.raises(SystemExit):
        main(["fit", "--config=run.yaml", "--print_config"])
    shown = capfd.readouterr().out
    assert "num_rounds: 10\n" in shown
    assert "run_name: '1e-2'\n" in shown
