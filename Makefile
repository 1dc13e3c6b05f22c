# Two commands set everything up on a machine with only Python (3.11 or later), make and git:
#   make demo    see it work          make test    run the tests
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-all test-torchft lint format bench docs figures screenshots examples clean
.DEFAULT_GOAL := demo

demo: $(READY)
	$(BIN)/cannikin demo

test: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile

# The tests that take minutes too, with those of Ray.
test-all: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	$(BIN)/pytest -n 2 --dist loadfile -m "slow or not slow"

# torchft comes as a nightly build, which may go again: its tests are skipped unless it is there.
test-torchft: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torchft]'
	$(BIN)/pytest tests/integrations tests/test_docs.py -k torchft

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	$(BIN)/python -m benchmarks $(ONLY)

# The site, in site/; warnings are errors. The variable silences an announcement of mkdocs' successor.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "Built: site/index.html"

# The drawings in docs/assets, from the run logs of simulated runs.
figures: $(READY)
	$(BIN)/python -m scripts.docs_figures

# constraints.txt pins what was tested, torch 2.13.0 among it. Where the index has a CPU build of that version pip takes
# it; elsewhere torch comes with its CUDA packages, several gigabytes.
$(READY): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "cannikin needs Python 3.11 or later; say which with: make PYTHON=python3.11"; exit 1; }
	@echo "Setting up $(VENV): a minute or two"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[torch,dev,docs,frameworks]'
	touch $@

# The pictures of the live view and the report, from a demo's run directory: make screenshots RUN=runs/demo-...
screenshots: $(READY)
	$(BIN)/python scripts/docs_screenshots.py $(RUN)

# Each example at its reduced size, on real data: make examples DATA=folder
examples: $(READY)
	for name in cifar10 ncf char_lm speech_ctc; do \
	  OMP_NUM_THREADS=1 timeout 300 $(BIN)/torchrun --standalone --nproc-per-node=2 \
	    examples/$$name.py --data $(DATA) --quick || exit 1; done

clean:
	rm -rf $(VENV) site .bench .mypy_cache .pytest_cache .ruff_cache .hypothesis
