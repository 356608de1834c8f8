# Every target does its own set-up. `make quickstart` and `make test` are the two a newcomer needs.
.PHONY: setup quickstart real-quickstart code-quickstart test test-dist test-slow test-slurm nightly test-gpu test-gpu-stack test-verifiers fuzz chaos fmt lint types arch docs golden bench-quickstart resolve check

# byte code that is never written is compiled anew in every process of a run, a minute in all
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# three workers on two cores: some wait for a clock, or for a process that starts
FILE_BY_FILE := --dist loadfile --no-loadscope-reorder
SIDE_BY_SIDE := -n 2 --dist loadgroup --no-loadscope-reorder
NOT_IN_CHECK := nightly or slurm or gpu or network
LATER := slow or $(NOT_IN_CHECK)
# a worker that reads all files needs half a minute for it
with_mark = $$(grep -rlE "mark\.($(1))\b" tests --include="test_*.py")
RUN_DIR := runs/quickstart
CODE_RUN_DIR := runs/code-quickstart
REAL_RUN_DIR := runs/real-quickstart
MINUTES := 10

setup:
	@tools/setup_env.sh

quickstart: setup  ## trains the tiny model with GTPO, 3 to 6 minutes on two cores, each time anew; RUN_DIR=... for another folder
	@$(BIN)/gtpo-megatron quickstart --run-dir "$(RUN_DIR)"

real-quickstart: setup  ## a pretrained SmolLM2 learns to follow instructions: 11 to 20 minutes on two cores
	@[ "$(REAL_RUN_DIR)" != runs/real-quickstart ] || rm -rf runs/real-quickstart
	@$(BIN)/gtpo-megatron train recipes.smollm2_cpu:gtpo --run-dir "$(REAL_RUN_DIR)"

code-quickstart: setup  ## the tiny model learns to write programs that pass tests, in a sandbox: about 8 minutes on two cores
	@tools/install_bubblewrap.sh
	@[ "$(CODE_RUN_DIR)" != runs/code-quickstart ] || rm -rf runs/code-quickstart
	@$(BIN)/gtpo-megatron train recipes.tiny_cpu:code_gtpo --run-dir "$(CODE_RUN_DIR)"

test: setup  ## every part, and the whole chain once: a tiny run, a resume; 6 to 13 minutes on two cores, as quick as they are
	@tools/install_bubblewrap.sh
	$(PYTEST) -n 3 $(FILE_BY_FILE) -m "not ($(LATER) or gpu_stack)"

test-dist: setup
	$(PYTEST) -m distributed

test-slow: setup  ## the rest of make check: golden curves, layouts, checkpoints, pushes, deaths, planted faults, pages in a browser
	@tools/install_bubblewrap.sh
	$(PYTEST) $(SIDE_BY_SIDE) -m "slow and not ($(NOT_IN_CHECK))" $(call with_mark,slow)

nightly: setup  ## whatever make check leaves out: chaos, Slurm, every layout, every example, damaged files, the wheel
	@tools/install_slurm.sh
	@tools/install_bubblewrap.sh
	$(PYTEST) -n 2 $(FILE_BY_FILE) --hypothesis-profile nightly -m "hypothesis and not ($(LATER))" tests/unit/weights
	$(PYTEST) $(SIDE_BY_SIDE) -m "(nightly or slurm) and not (gpu or network)" $(call with_mark,nightly|slurm)

test-gpu-stack:  ## the GPU's code on its own versions without a GPU, Transformer Engine's Python included; then tools/gpu_proof.sh on a bare machine's; PYTHON312=... names Python 3.12
	tools/test_gpu_stack.sh
	tools/test_gpu_proof.sh

test-verifiers: setup  ## tasksets of verifiers, played by verifiers in an environment of its own
	tools/setup_verifiers.sh
	$(PYTEST) tests/integration/test_verifiers.py

fuzz: setup  ## random batches over all options of credit, fresh seeds; MINUTES=10
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.credit_fuzz --minutes $(MINUTES)

chaos: setup  ## kills and stops processes of real runs for half an hour; docs/reliability.md
	$(BIN)/python -m tests.chaos --minutes 30

test-slurm: setup  ## jobs on a real Slurm of two nodes on this machine; needs root, else skipped with the reason
	@tools/install_slurm.sh
	$(PYTEST) tests/slurm -m slurm

test-gpu: setup
	$(PYTEST) tests/gpu -m gpu

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell

types: setup
	$(BIN)/mypy

arch: setup
	$(BIN)/lint-imports --no-logo 2>/dev/null || $(BIN)/lint-imports

docs: setup  ## the site of the documentation, in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # --quiet would also keep it from counting what is broken

resolve: setup  ## the packages of a GPU cluster and of the image can be resolved
	tools/resolve_gpu.sh

golden: setup  ## rewrites the golden curves, or adds this stack to them; say why in the commit
	$(PYTEST) tests/golden -m megatron --rewrite-golden

bench-quickstart: setup  ## time, memory and accuracy of the quickstart, as JSON
	$(BIN)/python -m benchmarks.quickstart --output benchmarks/results/quickstart.json

check: lint types arch docs resolve test test-slow  ## what CI runs: 30 to 60 minutes on two cores
