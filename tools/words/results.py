"""Stored results of studies and benchmarks in the new words: names of files, metrics and columns. Nothing is trained.

Keys and labels are moved by studies/migrate.py afterwards (README.md has the command).
"""

import re
import subprocess
from pathlib import Path

_CODE = '''
import json, re, sys
from pathlib import Path
from fl_lightning.study.store import Store

def metric(name):
    name = re.sub(r"^new(?=/|$)", "unseen", name)
    name = name.replace("_client_chosen", "_per_client_selection").replace("_own_choice", "_at_own_best_round")
    return {"void": "failed_round", "server/mix_only_moved": "server/masked_averaging"}.get(name, name)

def renamed(names):
    return {metric(name): value for name, value in names.items()}

def change(record):
    new = dict(record)
    for part in ("result", "kinds", "rounds"):
        if isinstance(record.get(part), dict):
            new[part] = renamed(record[part])
    return None if new == record else new

for folder in sorted(Path("studies/results").iterdir()):
    if folder.is_dir():
        count = Store(folder).rewrite(change)
        if count:
            print(f"{folder.name}: metrics renamed in {count} records")
'''


def migrate(root: Path) -> None:
    for folder in sorted((root / "studies" / "results").iterdir()):
        old, new = folder / "cells.jsonl", folder / "runs.jsonl"
        if old.exists() and not new.exists():
            subprocess.run(["git", "-C", str(root), "mv", str(old), str(new)], check=True)
    done = subprocess.run([str(root / ".venv/bin/python"), "-c", _CODE], cwd=root, capture_output=True, text=True)
    print(done.stdout, done.stderr[-3000:])
    for file in (root / "benchmarks" / "results").glob("*"):
        if file.suffix in (".json", ".md", ".csv"):
            text = file.read_text()
            new = re.sub(r'"new/', '"unseen/', text)
            if file.suffix == ".md":
                import text as X

                new = X.prose(new, f"benchmarks/results/{file.name}")
            if new != text:
                file.write_text(new)
