# make quickstart   install, then train FedSheafHN on a generated graph
# make test         install, then run every check and test
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test lint clean

quickstart: .venv/installed
	$(BIN)/fl-train fit --config configs/quickstart.yaml

test: lint
	$(BIN)/pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache
