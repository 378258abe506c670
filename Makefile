# make quickstart   install what training needs, then train FedSheafHN on a generated graph
# make test         install all, then run linters, the type checker and the first tier of tests (CONTRIBUTING.md)
# make test-full    make test, then write the documentation and run every other test but the campaign's
#                   (pip writes no bytecode: Python does, of what it imports)
# make docs         install all, then write the documentation to docs/_build/html
# make campaign     install, then run the slow tests of reliability in SHARES processes at once, and write their figures
#                   (FL_CAMPAIGN_SEED draws others)
# make words        look for British spelling, and for words that .spelling has others for
# make lock         write requirements.lock, the versions of constraints.txt with hashes, but for torch
# make audit        look the locked versions up among known vulnerabilities; ENVIRONMENT=1 for those that are installed
PYTHON ?= python3
BIN := .venv/bin
SHARES ?= 2
RECORD := $(CURDIR)/campaign.jsonl
ACTIVATE := echo '"source .venv/bin/activate" puts fl-train on the path of this shell'

#: What words of .spelling are looked for as a whole, and after them parts of identifiers.
PHRASES := $(shell grep -e ' ' -e _ .spelling | sed 's/->.*//' | paste -sd '|')

.PHONY: quickstart test test-full docs campaign lint words lock audit clean

quickstart: .venv/installed
	$(BIN)/fl-train fit --config configs/quickstart.yaml
	@$(ACTIVATE)
	@echo "the page of this run: $$(ls -t runs/quickstart/version_*/report.html | head -n 1)"

test: lint
	$(BIN)/pytest --numprocesses auto --dist worksteal
	@$(ACTIVATE)
	@echo 'the page to read next: docs/tutorials/first-federation.md'

test-full: test docs
	$(BIN)/pytest --numprocesses auto --dist worksteal -m 'full and not slow'
	@$(ACTIVATE)
	@echo 'the documentation: docs/_build/html/index.html'

docs: .venv/installed-all
	$(BIN)/sphinx-build --quiet --fail-on-warning --builder html docs docs/_build/html

campaign: .venv/installed-all
	rm -f $(RECORD)
	status=0; $(MAKE) --keep-going --jobs=$(SHARES) $(addprefix campaign-,$(shell seq $(SHARES))) || status=$$?; \
	$(BIN)/python tests/campaign/report.py $(RECORD) docs/reliability.md; exit $$status

campaign-%:
	FL_CAMPAIGN_SHARE=$*/$(SHARES) FL_CAMPAIGN_RECORD=$(RECORD) OMP_NUM_THREADS=1 \
	$(BIN)/pytest -p no:cacheprovider -m "slow or not slow" tests/campaign

lint: .venv/installed-all words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

# the files that are skipped name old words on purpose
words: .venv/installed-all
	$(BIN)/codespell --skip ./CHANGELOG.md,./fl_lightning/renamed.py,./fl_lightning/strategies/former_settings.py \
	--skip ./tests/cli/test_renamed.py --builtin en-GB_to_en-US --dictionary .spelling --dictionary - --regex '(?i:$(PHRASES))|[A-Z]?[a-z]+'

lock: .tools/installed
	CUSTOM_COMPILE_COMMAND='make lock' .tools/bin/pip-compile --quiet --generate-hashes --strip-extras \
	--no-emit-index-url --no-emit-find-links --no-emit-options --unsafe-package torch --unsafe-package fl-lightning \
	--constraint constraints.txt --extra all \
	--output-file requirements.lock pyproject.toml

audit: .tools/installed
	.tools/bin/pip-audit --strict $(if $(ENVIRONMENT),--path $(wildcard .venv/lib/python3*/site-packages),--require-hashes \
	--disable-pip --requirement requirements.lock)

.tools/installed:
	$(PYTHON) -m venv .tools
	.tools/bin/pip install --quiet --disable-pip-version-check pip-audit pip-tools
	touch $@

.venv/installed .venv/installed-all: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt --editable '.$(EXTRAS)'
	touch .venv/installed $@
.venv/installed: EXTRAS :=
.venv/installed-all: EXTRAS := [all]

clean:
	rm -rf .venv .tools build *.egg-info .mypy_cache .ruff_cache .pytest_cache
