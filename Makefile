# make demo: install into .venv and run the bundled demo.  make test: install and test.
PYTHON ?= python3
BIN := .venv/bin
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
INSTALLED := .venv/.installed

.PHONY: demo viewer pictures pages numbers test test-all gate baseline test-gpu lint format docs install clean
demo: install
	$(BIN)/qbench run recipes/demo.yaml --workers 2
	@echo "see it: $(BIN)/qbench view results/demo --recipe recipes/demo.yaml"

# the page of `qbench view`, from its source
viewer:
	cd qbench/viewer/frontend && npm ci && npm run build

# pages with numbers, from docs/templates; `numbers` first reads the records of results/ (a minute)
pages: install
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/sizes.py

numbers: install
	$(BIN)/python docs/read_results.py

# those of the viewer in README and docs, by Chromium
pictures: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[view-test]'
	$(BIN)/python docs/pictures.py

test: install
	$(PYTEST) -m "not gpu and not slow"

# with simulations, fault campaigns and large matrices: ten minutes
test-all: install
	$(PYTEST)

# the gate that README describes, on the bundled pair
gate: install
	$(BIN)/qbench run recipes/gate.yaml --workers 2
	$(BIN)/qbench check results/gate --baseline results/baselines/gate.parquet

# where a change of scores or layers is meant: replaces the baseline, shows old and new
baseline: install
	$(BIN)/qbench run recipes/gate.yaml --workers 2
	$(BIN)/qbench baseline results/gate --out results/baselines/gate.parquet --replace

test-gpu: install
	$(BIN)/python -m pytest -m gpu

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# the pages as a site, in site/
docs: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python -m typer qbench.cli.app utils docs --name qbench --title "Command line" --output docs/reference/cli.md
	$(BIN)/mkdocs build --quiet --strict
	git ls-files 'results/*.md' 'results/*.svg' recipes tests/plugins | tar -c -T - | tar -x -C site  # what pages link

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "qbench needs Python 3.11 to 3.13; say make PYTHON=python3.13"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (minutes the first time, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build *.egg-info
