# make quickstart   install, then train FedSheafHN on a generated graph
# make test         install, then run every check and test
# make docs         install, then write the documentation to docs/_build/html
# make campaign     install, then run the slow tests of reliability (FL_CAMPAIGN_SEED draws others) and write their figures
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test docs campaign lint clean

quickstart: .venv/installed
	$(BIN)/fl-train fit --config configs/quickstart.yaml

test: lint docs
	$(BIN)/pytest --numprocesses auto

docs: .venv/installed
	$(BIN)/sphinx-build --quiet --fail-on-warning --builder html docs docs/_build/html

campaign: .venv/installed
	rm -f campaign.jsonl
	status=0; FL_CAMPAIGN_RECORD=campaign.jsonl OMP_NUM_THREADS=1 $(BIN)/pytest -m "slow or not slow" tests/campaign || status=$$?; \
	$(BIN)/python tests/campaign/report.py campaign.jsonl docs/reliability.md; exit $$status

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
