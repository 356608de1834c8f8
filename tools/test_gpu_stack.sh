#!/usr/bin/env bash
# Runs on the versions of the `gpu` extra, without a GPU: Megatron on its local layers and the Triton kernels under their
# interpreter; then tests/gpu_stack, where Transformer Engine's own Python runs. Arguments go to pytest, so that
# `tools/test_gpu_stack.sh -m "not (gpu or vllm or ray or network)"` runs the nightly tests of layouts too.
set -euo pipefail
cd "$(dirname "$0")/.."

tools/setup_gpu_stack.sh
unset PYTHONDONTWRITEBYTECODE
export OMP_NUM_THREADS=1
pytest=(.venv-gpu-stack/bin/python -m pytest -p no:cacheprovider)
"${pytest[@]}" -m "not (gpu or vllm or ray or network or nightly)" \
  tests/distributed tests/golden tests/unit/distributed tests/unit/actor "$@"
# in a process of its own, which tells Transformer Engine that there is a GPU
exec "${pytest[@]}" tests/gpu_stack
