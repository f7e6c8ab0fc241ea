# Everything a newcomer runs. Tools live in ./.venv; PYTHON names the interpreter that makes it.
#   make demo        set up on the first call, then the end-to-end demonstration
#   make test        lint, types, import directions, spelling, and the core tests
#   make peers       add the libraries whose bytes ours are held against (make test-slow does it, too)
#   make test-slow   the long tests
#   make mutants     deliberate faults in the number core, and the test that notices each; MUTANTS=swap picks by name
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.setup-done
PEERS_STAMP := $(VENV)/.peers-done
TORCH := torch==2.13.0
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
DEMO_ARGS ?=
MUTANTS ?=
PYTEST_ARGS ?=

.PHONY: help setup peers demo test lint core test-slow mutants clean

help:
	@echo "make setup | peers | demo | test | test-slow | mutants | clean   (see README.md)"

setup: $(STAMP)

# torch comes first and by name, because a plain install would pull a CUDA build of several gigabytes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "tracefp4 needs Python 3.11 or newer; %s is %d.%d. Run `make PYTHON=/path/to/python3.12 ...`." % (sys.executable, v[0], v[1]))'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "$(VENV) holds an older Python: remove it with `make clean` and run again.")'
	@if $(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(m.version("torch").split("+")[0] != "2.13.0")' 2>/dev/null; then \
	    echo "torch is already there"; \
	elif $(PIP) install -q --no-index --no-deps '$(TORCH)' 2>/dev/null; then \
	    echo "torch: installed from the wheels that this machine's pip configuration offers"; \
	elif $(PIP) install -q --timeout 15 --retries 1 --no-deps --index-url $(TORCH_CPU_INDEX) '$(TORCH)'; then \
	    echo "torch: installed from $(TORCH_CPU_INDEX)"; \
	else \
	    echo "No CPU build of $(TORCH) could be had: pip's find-links offers none, and $(TORCH_CPU_INDEX) did not answer." >&2; \
	    echo "Put a wheel into a folder and run: PIP_FIND_LINKS=/that/folder make setup" >&2; exit 1; \
	fi
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

peers: $(PEERS_STAMP)

# fouroversix and transformer-engine would compile CUDA code and pull their own torch, so both come alone. The
# latter raises on import, which confuses libraries that look for it: it lies beside site-packages, and the
# tests read one file of it.
$(PEERS_STAMP): $(STAMP)
	$(PIP) install -q -c constraints.txt -e '.[dev,peers]'
	SKIP_CUDA_BUILD=1 $(PIP) install -q -c constraints.txt --no-build-isolation --no-deps fouroversix
	$(PIP) install -q -c constraints.txt --no-deps --upgrade --target $(VENV)/transformer-engine transformer-engine
	@touch $(PEERS_STAMP)

demo: $(STAMP)
	$(BIN)/tracefp4 demo $(DEMO_ARGS)

test: lint core

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# Two worker processes with one thread each: the same cores, without fighting over them. A worker that dies ends the
# run: with another one in its place, pytest-xdist may wait for ever.
core: $(STAMP)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	    $(BIN)/python -m pytest -q -n 2 --dist loadfile --max-worker-restart 0 \
	    -m "not slow and not peers and not gpu and not engine" $(PYTEST_ARGS)

# First what can share the machine, then what measures it or fills it by itself.
test-slow: $(PEERS_STAMP)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	    $(BIN)/python -m pytest -q -n 2 --max-worker-restart 0 \
	    -m "(slow or peers) and not alone and not gpu and not engine" \
	    --timeout 2400 --durations 10 $(PYTEST_ARGS)
	$(BIN)/python -m pytest -q -m "alone and not gpu and not engine" --timeout 2400 $(PYTEST_ARGS)

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants.runner $(MUTANTS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
