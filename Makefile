# `make` says what there is. Needs Python 3.11 or later as `python3`, and nothing else.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
OTHERS := .venv-integrations
DOORS  := $(addprefix tests/integrations/,verl transfer_queue openrlhf ray drafting recording) # what takes longest begins first

.DEFAULT_GOAL := help
.PHONY: help install check format test test-long stability simulate test-gpu attack test-integrations test-transports test-web docs demo demo-durable demo-hosts bench bench-hosts clean $(DOORS)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 20

install: $(STAMP) ## make .venv with all that the tests and the demo need

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard dataplane/*/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV), once: PyTorch for the CPU or CUDA as pip finds it, PyArrow, scikit-learn and the tools of the"
	@echo "tests. About 1.8 GB on disk with PyTorch for the CPU, several GB more with CUDA. This takes some minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,demo]' >$(VENV)/pip.log 2>&1 || \
	{ cat $(VENV)/pip.log >&2; exit 1; }
	@touch $@

check: $(STAMP) ## format, lint, types, import directions
	@$(BIN)/ruff format --check . || { echo "run: make format" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --strict dataplane
	@$(BIN)/lint-imports --no-cache >$(VENV)/imports.log || { cat $(VENV)/imports.log >&2; exit 1; }
	@$(BIN)/python -m pytest -q tests/architecture

format: $(STAMP) ## format the sources
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

SUITE := -q -n5 --dist=loadfile --no-loadscope-reorder --ignore=tests/architecture # five at a time: they wait half of their time

test: export PYTHONDONTWRITEBYTECODE = # or each of some hundred processes compiles all that it imports
test: $(STAMP) ## run the tests, but the long ones
	@base=$$(mktemp -d /tmp/dataplane.XXXXXX) && trap 'rm -rf "$$base"' EXIT && \
	$(BIN)/python -P tests/rerun.py $(SUITE) --basetemp="$$base/t" -m"not long"

test-long: export PYTHONDONTWRITEBYTECODE = # as above
test-long: $(STAMP) $(OTHERS)/.installed ## run the long tests: all faults and kills, more seeds, every version of the doors
	@base=$$(mktemp -d /tmp/dataplane.XXXXXX) && trap 'rm -rf "$$base"' EXIT && \
	$(BIN)/python -P tests/rerun.py $(SUITE) --basetemp="$$base/t" -mlong
	@$(MAKE) --no-print-directory attack
	@$(MAKE) --no-print-directory test-integrations TIER=long

stability: export PYTHONDONTWRITEBYTECODE = # as above
stability: $(STAMP) ## run the tests RUNS=20 times and name those that failed; LOAD=4 busy loops beside, CONDITION=background
	@base=$$(mktemp -d /tmp/dataplane.XXXXXX) && trap 'rm -rf "$$base"' EXIT && \
	$(BIN)/python -P tests/stability.py --runs $(or $(RUNS),20) --load $(or $(LOAD),0) $(if $(CONDITION),--condition $(CONDITION)) \
	$(SUITE) --basetemp="$$base/t" -m"not long"

simulate: export PYTHONDONTWRITEBYTECODE = # as above
simulate: $(STAMP) ## run simulated clusters; SEEDS=1000 FIRST=0, or SEED= [KEEP=] for one again; STREAM=1, TABLE=1: of streams, tables
	@$(BIN)/python -m tests.simulation $(if $(STREAM),--stream) $(if $(TABLE),--table) $(if $(SEED),--seed $(SEED) $(if $(KEEP),--keep $(KEEP)),--seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0))

test-gpu: $(STAMP) ## run the tests that need a CUDA device
	@$(BIN)/python -m pytest -q -m gpu tests/gpu tests/unit/batch tests/integration/test_loader.py

attack: export PYTHONDONTWRITEBYTECODE = # as above
attack: $(STAMP) ## attack nodes with frames, faults and kills; MINUTES=2, SEED= for the same again
	@$(BIN)/python -m tests.attack --minutes $(or $(MINUTES),2) $(if $(SEED),--seed $(SEED))

test-integrations: export PYTHONDONTWRITEBYTECODE = # as above
test-integrations: $(OTHERS)/.installed ## run the tests with verl, TransferQueue, OpenRLHF and Ray, in an environment of their own
	@$(MAKE) --no-print-directory --jobs=3 --output-sync --keep-going $(DOORS)

$(DOORS): # each in a process of its own: they change each other
	@echo "-- $@" && $(OTHERS)/bin/python -P tests/rerun.py -q -m"$(or $(TIER),not long)" $@ || [ $$?$(TIER) = 5long ] # 5: it has none

$(OTHERS)/.installed: $(OTHERS)/.packages pyproject.toml setup.py $(wildcard dataplane/*/*.c)
	@$(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' >$(OTHERS)/pip.log 2>&1 || \
	{ cat $(OTHERS)/pip.log >&2; exit 1; }
	@touch $@

$(OTHERS)/.packages: tests/integrations/requirements.txt # apart from this one, so that they are installed beside $(VENV)
	@test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	@echo "Installing into $(OTHERS)."
	@pip() { $(OTHERS)/bin/python -m pip install --quiet --disable-pip-version-check "$$@"; }; \
	{ pip torch==2.13.0 && pip --no-deps verl==0.9.1 openrlhf==0.11.2 && pip -r tests/integrations/requirements.txt; } \
	>$(OTHERS)/pip.log 2>&1 || { cat $(OTHERS)/pip.log >&2; exit 1; }
	@touch $@

test-transports: pyproject.toml ## run the tests of ucx and nixl, in a .venv-transports with both
	@test -x .venv-transports/bin/python || $(PYTHON) -m venv .venv-transports
	@echo "installing into .venv-transports"
	@.venv-transports/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ucx,nixl]'
	@.venv-transports/bin/python -m pytest -q tests/conformance tests/integration/test_transports.py

test-web: pyproject.toml ## run the tests of the live page in a headless Chromium, in a .venv-web with Playwright
	@which chromium >/dev/null || { echo "a browser is needed: apt-get install chromium" >&2; exit 1; }
	@test -x .venv-web/bin/python || $(PYTHON) -m venv .venv-web
	@echo "installing into .venv-web"
	@.venv-web/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt -e '.[web,etcd,test]' -r tests/web/requirements.txt
	@.venv-web/bin/python -m pytest -q tests/web

docs: $(VENV)-docs/.installed ## build the documentation site into build/site, strictly: links and names are checked
	@NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

$(VENV)-docs/.installed: pyproject.toml constraints.txt
	@test -x $(VENV)-docs/bin/python || $(PYTHON) -m venv $(VENV)-docs
	@echo "installing into $(VENV)-docs"
	@$(VENV)-docs/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

demo: $(STAMP) ## run the multimodal GRPO job; the first time it installs about 1.8 GB into .venv
	@$(BIN)/python -m examples.multimodal_grpo

demo-durable: $(STAMP) ## run it with a durable stream, and kill all of its processes three times
	@$(BIN)/python -m examples.multimodal_grpo.killed

demo-hosts: $(STAMP) ## run it over three hosts: two are killed, one by one, and one is cut off
	@$(BIN)/python -m examples.multi_host --kill

bench: $(STAMP) ## measure this machine, other systems beside ours, and write the report
	@missed=0; for what in local stream media durable peers report; do \
		echo "-- bench.$$what"; $(BIN)/python -m bench.$$what || missed=1; \
	done; exit $$missed

bench-hosts: $(STAMP) ## measure hosts of network namespaces, as root
	@missed=0; for what in hosts partition; do $(BIN)/python -m bench.$$what || missed=1; done; exit $$missed

clean: ## remove what was built; .venv stays
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis bench/results
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
