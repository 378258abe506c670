"""YAML, TOML, Markdown, notebooks, templates, CSV."""

import json
import re
from pathlib import Path

import tables as T
import text as X

_SKIP = ("studies/results/", "benchmarks/results/", "requirements.lock", "constraints.txt", "LICENSE")
#: Keys of settings in YAML.
SETTINGS = {
    "mix_only_moved": "masked_averaging", "personalised": "personalized", "new_embedding": "unseen_embedding",
    "max_void_rounds": "max_failed_rounds", "start_from_clients": "initialize_from_clients", "shared_start": "shared_initialization",
}


def convert(root: Path, files: list[str], names: dict[str, str]) -> list[str]:
    changed = []
    spelled = {o: n for o, n in names.items() if X.spell(o) == n}
    exact = re.compile(r"(?<![A-Za-z0-9_])(" + "|".join(sorted(map(re.escape, spelled), key=len, reverse=True)) + r")(?![A-Za-z0-9_])")
    for file in files:
        if file.startswith(_SKIP) or file.endswith((".py", ".pyi", ".png", ".json")):
            continue
        path = root / file
        try:
            old = path.read_text()
        except UnicodeDecodeError:
            continue
        new = old
        if file.endswith((".yaml", ".yml")):
            new = yaml(old, file, exact, spelled)
        elif file == "CHANGELOG.md":
            new = X.spell(X.names(old)) if False else X.spell(old)
        elif file.endswith(".md") or file in ("llms.txt",):
            new = exact.sub(lambda m: spelled[m[1]], X.prose(old, file))
            new = markdown(new, file)
        elif file.endswith(".ipynb"):
            new = notebook(old, file)
        elif file.endswith((".toml", "Makefile", ".gitignore", ".ci/run")):
            new = X.names(exact.sub(lambda m: spelled[m[1]], old))
        elif file.endswith((".html", ".css")):
            new = exact.sub(lambda m: spelled[m[1]], X.names(old))
        elif file.endswith(".csv"):
            new = exact.sub(lambda m: spelled[m[1]], X.names(old))
        if new != old:
            path.write_text(new)
            changed.append(file)
    return changed


def markdown(text: str, file: str) -> str:
    text = text.replace('## Test figures', '## Test metrics')
    text = re.sub(r"`new/([^`]*)`", r"`unseen/\1`", text)
    text = re.sub(r"`void`", "`failed_round`", text)
    text = re.sub(r"`(\w+(?:/\w+)*?)_client_chosen`", r"`\1_per_client_selection`", text)
    return text


def yaml(text: str, file: str, exact: re.Pattern[str], spelled: dict[str, str]) -> str:
    lines = []
    for line in text.splitlines(keepends=True):
        body, mark, comment = _split(line)
        body = X.names(body)
        body = exact.sub(lambda m: spelled[m[1]], body)
        for old, new in SETTINGS.items():
            body = re.sub(rf"(?<![\w]){old}(?=\s*:)", new, body)
        if file.startswith("studies/"):
            body = re.sub(r"(?<![\w.])figure(?=: )", "metric", body)
            body = body.replace("new_test", "unseen_test").replace("new_clients", "unseen_clients")
            body = re.sub(r"^(  (\w+), )moved-only: \{", r'\1masked averaging: {drawn_as: "\2, moved-only", ', body)
            body = re.sub(r"(?<!\", )(?<!drawn_as: \")\bmoved-only\b(?!\", )", "masked averaging", body) if "drawn_as" not in body else body
            body = re.sub(r"strategy\.maps\.start(?=[.:])", "strategy.maps.initialization", body)
            body = re.sub(r"strategy\.maps\.shared_start", "strategy.maps.shared_initialization", body)
            body = re.sub(r"title: Kinship", "title: Client similarity", body)
            body = re.sub(r"title: FedAux alive", "title: Settings of FedAux", body)
            body = re.sub(r"title: New clients", "title: Unseen clients", body)
            body = re.sub(r"(\d+%|\{x:\.0%\}) new\b", r"\1 unseen", body)
            body = re.sub(r"\bnew clients\b", "unseen clients", body)
        else:
            body = re.sub(r"^(\s+)start(?=: fl_lightning\.strategies)", r"\1initialization", body)
        lines.append(body + (X.prose(mark + comment, file) if mark else ""))
    return "".join(lines)


def _split(line: str) -> tuple[str, str, str]:
    """A line of YAML: what stands before a comment, the comment with its sign."""
    quote = ""
    for place, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place], "#", line[place + 1 :]
    return line, "", ""


def notebook(text: str, file: str) -> str:
    data = json.loads(text)
    for cell in data["cells"]:
        cell["source"] = [X.prose(line, file) for line in cell["source"]]
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"
