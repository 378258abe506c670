# make quickstart   install, then train FedSheafHN on a generated graph
# make test         install, then run every check and test
# make docs         install, then write the documentation to docs/_build/html
# make campaign     install, then run the slow tests of reliability in SHARES processes at once, and write their figures
#                   (FL_CAMPAIGN_SEED draws others)
PYTHON ?= python3
BIN := .venv/bin
SHARES ?= 2
RECORD := $(CURDIR)/campaign.jsonl

.PHONY: quickstart test docs campaign lint clean

quickstart: .venv/installed
	$(BIN)/fl-train fit --config configs/quickstart.yaml

test: lint docs
	$(BIN)/pytest --numprocesses auto

docs: .venv/installed
	$(BIN)/sphinx-build --quiet --fail-on-warning --builder html docs docs/_build/html

campaign: .venv/installed
	rm -f $(RECORD)
	status=0; $(MAKE) --keep-going --jobs=$(SHARES) $(addprefix campaign-,$(shell seq $(SHARES))) || status=$$?; \
	$(BIN)/python tests/campaign/report.py $(RECORD) docs/reliability.md; exit $$status

campaign-%:
	FL_CAMPAIGN_SHARE=$*/$(SHARES) FL_CAMPAIGN_RECORD=$(RECORD) OMP_NUM_THREADS=1 \
	$(BIN)/pytest -p no:cacheprovider -m "slow or not slow" tests/campaign

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,flare]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache
