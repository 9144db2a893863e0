# Each target brings what it needs: a fresh checkout, a Python from 3.11 to 3.13 and a network are
# enough for `make demo`. The set-up is repeated only when its inputs change.
#
#   PYTHON           interpreter for .venv; default: the first fitting one on PATH
#   TORCH_INDEX_URL  package index to take torch from, where the default one would bring CUDA packages
#   EXTRAS           extras to install; default: dev, and gpu on Linux
#   JOBS             processes of `make test`; default 2
#   CHECKPOINT ...   what a night judges: .ci/nightly tells its variables
#   ARGS             further arguments of the command, as in: make test ARGS="-k layouts"

PYTHON ?=
TORCH_INDEX_URL ?=
EXTRAS ?=
JOBS ?= 2
ARGS ?=

BIN := .venv/bin
# Byte code of the suites is kept even where the environment forbids it: each process, and each one
# that a suite starts, would compile several hundred modules again.
THREADS := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.NOTPARALLEL:
.PHONY: help setup demo test suites slow lint types figures mutation real house docs pages wheel nightly vllm-env vllm-test vllm-pack vllm-prove vllm-any peers-pack kernels-beside-peers clean

help:
	@echo "make demo     run a small model, plant a fault, find and name it, write a report to open"
	@echo "make test     lint, types and all suites that this machine can run"
	@echo "make figures  measure what docs/figures.md states"
	@echo "make nightly  judge a checkpoint, or the embedded one, as every night: docs/nights.md"
	@echo "make vllm-test  hold the plugin against vLLM 0.33 itself, in .venv-vllm: docs/vllm.md"
	@echo "make vllm-pack  vLLM 0.26 in parts, for a GPU machine that fetches nothing: docs/vllm.md"
	@echo "make vllm-any   capture tiny Llama and Qwen 3 MoE in vLLM on this machine's GPU, and judge them"
	@echo "make vllm-prove  start vLLM with the plugin on this machine's GPU, and judge it: docs/vllm.md"
	@echo "make peers-pack  the kernels of others in parts, for a GPU machine that fetches nothing"
	@echo "make kernels-beside-peers  time our kernels beside theirs on this machine's GPU: docs/kernels.md"
	@echo "make slow     the suites that make test leaves out because they take minutes each"
	@echo "make real     judge runs of SmolLM2 with its real weights, which are downloaded"
	@echo "make mutation hold suites against mutants of the product, before tests are deleted: docs/house.md"
	@echo "make house    print the figures of the house: lines, heads, comments, fullest folder"
	@echo "also: setup lint types suites docs pages wheel clean"

setup:
	@PYTHON="$(PYTHON)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" EXTRAS="$(EXTRAS)" sh .ci/setup

demo: setup
	@$(BIN)/degarble demo $(ARGS)

# The type checker runs beside the suites, whose last tests leave a core idle.
test: lint
	@mkdir -p out; $(MAKE) --no-print-directory types >out/types.log 2>&1 & checker=$$!; \
	$(MAKE) --no-print-directory suites; status=$$?; \
	wait $$checker || { cat out/types.log >&2; status=2; }; \
	exit $$status

lint: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo "lint: run $(BIN)/ruff format ." >&2; exit 1; }

types: setup
	@MYPYPATH=.types $(BIN)/mypy --no-error-summary --explicit-package-bases -p degarble

suites: setup
	@$(THREADS) $(BIN)/python -m pytest -q --no-header -n $(JOBS) --dist worksteal --timeout 1200 $(ARGS)

# Every form of every kernel compiled, the whole museum, weights by the gigabyte: hours on two cores.
real:
	@$(MAKE) --no-print-directory setup EXTRAS=dev,gpu,real
	@$(THREADS) $(BIN)/python -m pytest -q --no-header --timeout 1200 -m real $(ARGS)

slow: setup
	@$(THREADS) $(BIN)/python -m pytest -q --no-header -n $(JOBS) --dist worksteal --timeout 3600 -m slow $(ARGS)

figures: setup
	@$(BIN)/python -m degarble.suites.bench $(ARGS) --page

mutation: setup
	@$(THREADS) $(BIN)/python -m degarble.suites.mutation.run $(ARGS)

house: setup
	@$(BIN)/python -m degarble.suites.house.table

docs: setup
	@$(BIN)/python -m degarble.suites.house.pages.command_line
	@$(BIN)/python -m degarble.suites.house.pages.audit_rules
	@$(BIN)/python -m degarble.suites.house.pages.site

# Pictures of report pages, by Chromium and its driver.
pages: setup
	@$(THREADS) $(BIN)/python -m degarble.suites.reports.screenshots

wheel: setup
	@rm -rf build
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . >build-wheel.log || { cat build-wheel.log >&2; exit 1; }
	@rm -rf build build-wheel.log
	@ls dist/*.whl

nightly: setup
	@sh .ci/nightly

vllm-env:
	@PYTHON="$(PYTHON)" TORCH_INDEX_URL="$(TORCH_INDEX_URL)" sh .ci/vllm-env

vllm-test: vllm-env
	@$(THREADS) VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1 .venv-vllm/bin/python -m pytest -q --no-header -m vllm -W default suites/vllm $(ARGS)

# In the caller's environment, which has vLLM and a GPU: PYTHON names its interpreter.
PROVE := PYTHONPATH=$(CURDIR)/.types:$$PYTHONPATH $(or $(PYTHON),python3) -m degarble.harness.vllm.engine
vllm-prove:
	@[ -d out/vllm-asked ] || $(PROVE).prepare out/vllm-asked
	@$(PROVE).prove out/vllm-asked out/vllm-proof $(ARGS)

vllm-any:
	@PYTHONPATH=$(CURDIR)/.types:$$PYTHONPATH $(or $(PYTHON),python3) -m degarble.suites.vllm.any_model out/vllm-any $(ARGS)

vllm-pack: setup
	@sh .ci/vllm-pack

peers-pack: setup
	@sh .ci/peers-pack

# In the caller's environment as well: PYTHONPATH names the CuTe DSL and what peers-pack unpacked.
kernels-beside-peers:
	@PYTHONPATH=$(CURDIR)/.types:$$PYTHONPATH $(or $(PYTHON),python3) -m degarble.suites.bench.kernel_peers $(ARGS)

# The environments stay: delete .venv or .venv-vllm to have it built anew.
clean:
	rm -rf build dist out degarble-demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +
