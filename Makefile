# Everything that a fresh clone needs: each target first makes its own environment, from python3 alone.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

export OMP_NUM_THREADS := 1
export TOKENIZERS_PARALLELISM := false
# Tests start many processes, which should not compile the same modules again.
export PYTHONDONTWRITEBYTECODE :=

# Two workers for each core: tests wait for processes for a third of their time. Few tests at a time to each worker, as
# slow ones come first.
WORKERS ?= $(shell expr 2 '*' $$(nproc 2>/dev/null || echo 2))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --maxschedchunk 4

.PHONY: demo test quick campaigns chaos gpu slow-tests checks docs clean

demo: $(READY)  ## Train vision + audio + language model + generator on 4 processes; ask the exported model, and let it draw.
	$(BIN)/motet demo

test: checks  ## Everything.
	$(PYTEST) --junitxml build/test.xml

quick: $(READY)  ## All but the functions in tests/slow.txt.
	$(PYTEST) -m "not slow and not campaign"

campaigns: $(READY)  ## Whole products and many draws of what `make test` samples.
	$(PYTEST) -m campaign
	MOTET_FUZZ_DRAWS=1000 $(PYTEST) tests/schedule/test_fuzz.py
	$(PYTEST) -m "hypothesis and not campaign" --hypothesis-profile draws

chaos: $(READY)  ## Kills processes of trainings at random moments, 200 times (MOTET_CHAOS_TRIALS), and looks at what is left.
	$(BIN)/python -m pytest -s -m campaign tests/resilience/test_chaos.py tests/resilience/test_wild_chaos.py tests/resilience/test_cut_link.py

gpu: $(READY)  ## Everything that needs a GPU, into the folder GPU_REPORT; GPU_REHEARSAL=1 runs it on CPUs in small sizes.
	@$(BIN)/python -m benchmarks.gpu

slow-tests:  ## Rewrites tests/slow.txt with the processor seconds of the last `make test`.
	$(BIN)/python tests/support/slow_tests.py build/test.xml

checks: $(READY)  ## Style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## Renews the pages that are generated from the sources.
	$(BIN)/python -m docs.generate

# Exact versions: an open range would take the newest torch with gigabytes of CUDA libraries.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "motet needs Python 3.11 or newer; give one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build src/*.egg-info
