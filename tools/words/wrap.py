"""Lines of docstrings and comments that became too long are broken anew, as few lines as possible."""

import ast
import io
import re
import tokenize
from pathlib import Path

LIMIT = 120
_ENTRY = re.compile(r"^\s*(\w+(\.\w+)*: |[-*] |\d+\. |>>>|\.\.\. |Args:|Returns:|Raises:|Attributes:|Example|Yields:)")


def wrap_tree(root: Path, files: list[str]) -> None:
    for file in files:
        if file.endswith((".py", ".pyi")):
            path = root / file
            source = path.read_text()
            if any(len(line) > LIMIT for line in source.splitlines()):
                new = wrap(source)
                if new != source:
                    path.write_text(new)


def _regions(source: str) -> list[tuple[int, int, str]]:
    """First and last line (from 0) of each docstring and block of comments."""
    found = []
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            if isinstance(body[0].value.value, str):
                found.append((body[0].lineno - 1, body[0].end_lineno - 1, "doc"))
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not lines[token.start[0] - 1][: token.start[1]].strip():
            found.append((token.start[0] - 1, token.start[0] - 1, "comment"))
    return found


def wrap(source: str) -> str:
    lines = source.splitlines()
    kinds: dict[int, tuple[str, int]] = {}
    for first, last, kind in _regions(source):
        for number in range(first, last + 1):
            kinds[number] = (kind, last)
    out: list[str] = []
    pending = ""  # words to put before the next line
    number = 0
    marks = [kinds.get(i) for i in range(len(lines))]
    i = 0
    while i < len(lines):
        line, mark = lines[i], marks[i]
        if mark is None or len(line) <= LIMIT:
            out.append(line)
            i += 1
            continue
        kind, last = mark
        indent = re.match(r"\s*(?:#:? )?", line)[0]
        if kind == "doc" and i == last and line.rstrip().endswith('"""') and line.lstrip().startswith('"""'):
            i = _one_line(lines, marks, out, i, line)
            continue
        at = line.rfind(" ", 0, LIMIT + 1)
        head, rest = line[:at], line[at + 1 :]
        follow = indent
        if kind == "doc" and re.match(r"^\s*(\w+(\.\w+)*): ", line) and not line.lstrip().startswith('"""'):
            nxt = lines[i + 1] if i + 1 < len(lines) and marks[i + 1] == mark else ""
            follow = re.match(r"\s*", nxt)[0] if nxt.strip() and not _ENTRY.match(nxt) else indent + "    "
        out.append(head)
        joined = False
        if i + 1 < len(lines) and marks[i + 1] is not None and marks[i + 1][0] == kind:
            nxt = lines[i + 1]
            same = re.match(r"\s*(?:#:? )?", nxt)[0] == follow
            if same and nxt.strip() not in ("", '"""', "#") and not _ENTRY.match(nxt) and (kind != "doc" or i + 1 <= last):
                lines[i + 1] = follow + rest + " " + nxt[len(follow) :]
                joined = True
        if not joined:
            lines.insert(i + 1, follow + rest)
            marks.insert(i + 1, (kind, last + 1))
            marks = [m if m is None or m[1] != last or m[0] != kind else (m[0], last + 1) for m in marks]
            lines_changed = True
        i += 1
    return "\n".join(out) + "\n"


def _one_line(lines: list[str], marks: list, out: list[str], i: int, line: str) -> int:
    """A docstring of one line that is too long: its first sentence, and the rest behind a blank line."""
    indent = re.match(r"\s*", line)[0]
    text = line.strip()[3:-3]
    at = max((m.end() for m in re.finditer(r"[.;:] ", text[: LIMIT - len(indent) - 3])), default=0)
    if at and text[at - 2] in ".":
        first, rest = text[: at - 1], text[at:]
    elif at:
        first, rest = text[: at - 2] + ".", text[at:][:1].upper() + text[at:][1:]
    else:
        out.append(line)
        return i + 1
    out.append(f'{indent}"""{first}')
    out.append("")
    words, current = rest.split(" "), indent
    for word in words:
        if len(current) + len(word) + 1 > LIMIT:
            out.append(current.rstrip())
            current = indent
        current += word + " "
    out.append(current.rstrip())
    out.append(f'{indent}"""')
    return i + 1


def split_tree(root: Path, files: list[str]) -> None:
    for file in files:
        if file.endswith(".py"):
            path = root / file
            source = path.read_text()
            if any(len(line) > LIMIT for line in source.splitlines()):
                new = split_strings(source)
                if new != source:
                    path.write_text(new)


_LITERAL = re.compile(r"([rbfuRBFU]*)([\"'])(.*)\2$", re.DOTALL)


def split_strings(source: str) -> str:
    """Long literals inside of brackets become two, one below the other; the formatter then lays them out."""
    lines = source.splitlines()
    depth = 0
    changes: list[tuple[int, int, int, str]] = []
    previous = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        row, start = token.start
        long = token.type == tokenize.STRING and token.start[0] == token.end[0] and len(lines[row - 1]) > LIMIT
        if long and depth > 0 and token.end[1] > LIMIT - 12 and not token.string.startswith(('"""', "'''")):
            literal = _LITERAL.match(token.string)
            if literal and len(literal[3]) > 40:
                prefix, quote, body = literal.groups()
                room = min(LIMIT - 16 - start, len(body) - 8)
                if room < 25:
                    room = min(LIMIT - 40, len(body) - 8)
                places = [m.end() for m in re.finditer(r" ", body[:room]) if "f" not in prefix.lower() or _outside(body, m.end())]
                if places:
                    at = places[-1]
                    new = f"{prefix}{quote}{body[:at]}{quote} {prefix}{quote}{body[at:]}{quote}"
                    changes.append((row, start, token.end[1], new))
    for row, start, end, new in reversed(changes):
        line = lines[row - 1]
        cut = new.index(" ", 0) if False else None
        first, second = _halves(new)
        indent = " " * start
        lines[row - 1] = line[:start] + first + "\n" + indent + second + line[end:]
    return "\n".join(lines) + "\n"


def _outside(body: str, at: int) -> bool:
    """Whether a place in an f-string is outside of its expressions."""
    depth, i = 0, 0
    while i < at:
        if body[i : i + 2] in ("{{", "}}") and depth == 0:
            i += 2
            continue
        depth += (body[i] == "{") - (body[i] == "}")
        i += 1
    return depth == 0


def _halves(new: str) -> tuple[str, str]:
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(f"({new})").readline) if t.type == tokenize.STRING]
    return tokens[0].string, tokens[1].string
