#!/usr/bin/env bash
# Runs the Megatron and Triton tests on the torch and megatron-core of the `gpu` extra, which need Python 3.12; no GPU is
# needed. Downloads about 3 GB into .venv-gpu-stack. PYTHON312 names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-gpu-stack
python="${PYTHON312:-python3.12}"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || {
  echo "test_gpu_stack: $python is not Python 3.12; set PYTHON312" >&2
  exit 1
}
unset PYTHONDONTWRITEBYTECODE
if [ ! -x "$venv/bin/uv" ]; then
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -qq uv
fi
# without vLLM and Transformer Engine, which need a GPU to run or a compiler to build; torch brings Triton
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --compile-bytecode \
  torch==2.13.0 megatron-core==0.19.2 "pytest<9.2" pytest-timeout pytest-xdist hypothesis -e .
export OMP_NUM_THREADS=1
exec "$venv/bin/python" -m pytest -p no:cacheprovider -m "not (gpu or vllm or ray or network)" \
  tests/distributed tests/golden tests/unit/distributed tests/unit/actor "$@"
