"""YAML input, read by the rules of YAML 1.2's core schema and within limits.

PyYAML's own loader reads YAML 1.1, in which ``010`` is eight, ``1:30`` is ninety, ``no`` is false and ``1e-2`` is text;
the last of two equal names wins, and aliases and nesting are followed until memory or the stack is exhausted. All YAML
that the program reads is read here.
"""

import os
import re
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any, ClassVar

import yaml

#: Limits: bytes of a file, levels of nesting, values after expanding all aliases, and characters of a number.
MOST_BYTES, MOST_LEVELS, MOST_VALUES, MOST_DIGITS = 1 << 20, 64, 100_000, 40

_NULL, _BOOL, _INT, _FLOAT, _TEXT, _LIST, _DICT, _MERGE = (
    f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
)
_IS_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_IS_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_WORDS = {_NULL: re.compile(r"~|null|Null|NULL|"), _BOOL: re.compile(r"true|True|TRUE|false|False|FALSE")}
#: The type of a value without quotes, by its first character; the first match wins.
_RULES: list[tuple[str, re.Pattern[str], list[str]]] = [
    (_NULL, _WORDS[_NULL], ["~", "n", "N", ""]),
    (_BOOL, _WORDS[_BOOL], list("tTfF")),
    (_INT, _IS_INT, list("-+0123456789")),
    (_FLOAT, _IS_FLOAT, list("-+.0123456789")),
    (_MERGE, re.compile(r"<<"), ["<"]),
]


class WrongYaml(ValueError):
    """A file that is not YAML or exceeds the limits; the message begins with its path."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 within limits, in which no name may occur twice in a mapping."""

    yaml_implicit_resolvers: ClassVar[Any] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[Any] = {}
    _level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As PyYAML, up to a maximum depth."""
        self._level += 1
        if self._level > MOST_LEVELS:
            raise yaml.YAMLError(f"more than {MOST_LEVELS} levels of nesting: write it flatter")
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def get_single_node(self) -> Any:
        """As PyYAML, after counting the values that the aliases expand to."""
        node = super().get_single_node()
        if node is not None:
            _count(node, {})
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """As PyYAML, after a check for duplicate names; values of a merge (``<<``) may be overridden."""
        node = super().compose_mapping_node(anchor)
        lines: dict[Hashable, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            line, name = key.start_mark.line + 1, self.construct_object(key)
            if name in lines:
                raise yaml.YAMLError(f"{key.value} stands twice, in lines {lines[name]} and {line}: remove one of them")
            lines[name] = line
        return node

    def word(self, node: yaml.ScalarNode) -> bool | None:
        """A truth value, or none."""
        text = str(self.construct_scalar(node))
        if not _WORDS[node.tag].fullmatch(text):
            raise _invalid(node, text)
        return None if node.tag == _NULL else text.lower() == "true"

    def number(self, node: yaml.ScalarNode) -> int | float:
        """An integer or a float of YAML 1.2."""
        text = str(self.construct_scalar(node))
        if len(text) > MOST_DIGITS:
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"line {line}: a number of {len(text)} characters: write at most {MOST_DIGITS}")
        if node.tag == _INT and _IS_INT.fullmatch(text):
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        if node.tag == _FLOAT and _IS_FLOAT.fullmatch(text):
            return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        raise _invalid(node, text)

    def other(self, node: yaml.Node) -> Any:
        """What is none of the core schema's types."""
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        raise yaml.YAMLError(f"line {node.start_mark.line + 1}: no setting is of the type {tag}: leave it out")


def _invalid(node: yaml.ScalarNode, text: str) -> yaml.YAMLError:
    return yaml.YAMLError(f"line {node.start_mark.line + 1}: {text!r} is not a valid {node.tag.rpartition(':')[2]}")


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would not read as text."""


for _tag, _pattern, _first in _RULES:
    _whole = re.compile(f"(?:{_pattern.pattern})\\Z")
    _Loader.add_implicit_resolver(_tag, _whole, _first)
    _Dumper.add_implicit_resolver(_tag, _whole, _first)
for _tags, _construct in (
    ((_NULL, _BOOL), _Loader.word),
    ((_INT, _FLOAT), _Loader.number),
    ((_TEXT,), _Loader.construct_yaml_str),
    ((_LIST,), _Loader.construct_yaml_seq),
    ((_DICT,), _Loader.construct_yaml_map),
):
    for _tag in _tags:
        _Loader.add_constructor(_tag, _construct)
_Loader.add_constructor(None, _Loader.other)  # for every other tag


def _count(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of values below a node, with aliases expanded."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if known.setdefault(id(node), 0):
        return known[id(node)]
    parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
    known[id(node)] = -1
    total = 1
    for part in parts:
        if known.get(id(part)) == -1:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: it contains itself: write it out")
        total += _count(part, known)
        if total > MOST_VALUES:
            raise yaml.YAMLError(f"more than {MOST_VALUES:,} values after expanding the aliases: write less")
    known[id(node)] = total
    return total


def parse_yaml(text: str) -> Any:
    """Parse YAML text.

    Raises:
        yaml.YAMLError: It is not YAML, has a name twice, or exceeds the limits.

    Example:
        >>> parse_yaml("{rounds: 010, rate: 1e-2, time: 1:30, shuffle: no}")
        {'rounds': 10, 'rate': 0.01, 'time': '1:30', 'shuffle': 'no'}
    """
    return yaml.load(text, _Loader)


def dump_yaml(value: Any, **options: Any) -> str:
    """YAML that :func:`parse_yaml` and other programs read as the same value; options are those of ``yaml.dump``."""
    return str(yaml.dump(value, Dumper=_Dumper, **{"allow_unicode": True, **options}))


def read_text(path: Path) -> str:
    """Read the text of a settings file.

    Raises:
        WrongYaml: It is not a regular file (a pipe would never end), too large, not UTF-8, or cannot be read.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise WrongYaml(f"{path} cannot be read (it is not a regular file): give a YAML file of settings")
            content = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, WrongYaml):
            raise
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise WrongYaml(f"{path} cannot be read ({why}): give a YAML file of settings") from error
    if len(content) > MOST_BYTES:
        raise WrongYaml(f"{path} is larger than {MOST_BYTES:,} bytes: give a YAML file of settings")
    try:
        return content.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise WrongYaml(f"{path} is not UTF-8 text (byte {error.start}): give a YAML file of settings") from error


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        WrongYaml: It cannot be read, is not YAML, or exceeds the limits; the message begins with its path.
    """
    text = read_text(path)
    try:
        return parse_yaml(text)
    except yaml.YAMLError as error:
        raise WrongYaml(f"{path} is not YAML: {' '.join(str(error).split())}") from error


def use_in_parsers() -> None:
    """Make parsers of jsonargparse read and write YAML as this module does.

    ``set_loader`` is not enough: number types read text with the default loader, whatever was set.
    """
    from jsonargparse import _loaders_dumpers, set_dumper

    _loaders_dumpers.yaml_default_loader = _Loader  # type: ignore[assignment]
    set_dumper("yaml", lambda value: dump_yaml(value, default_flow_style=False, sort_keys=False))
