#!/usr/bin/env bash
# Makes .venv-gpu-stack: torch (CUDA build) and megatron-core of the `gpu` extra on Python 3.12, and the Python of its
# Transformer Engine beside them. No GPU and no compiler is needed. Idempotent: does nothing when nothing changed.
# Needs: Python 3.12 (on the path, under pyenv, or named by PYTHON312), a package index, 6 GB (3 GB to download).
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'setup_gpu_stack: %s\n' "$*" >&2; exit 1; }

venv=.venv-gpu-stack
stamp=$venv/.installed
wanted=$(cat pyproject.toml tools/setup_gpu_stack.sh | sha256sum | cut -d' ' -f1)
if [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi

if command -v uv >/dev/null 2>&1; then
  uv=(uv)
else
  if [ ! -x .uv/bin/uv ]; then
    python3 -m venv .uv || fail "python3 has no venv module; install it (Debian: python3-venv) or install uv"
    .uv/bin/python -m pip install -qq uv || fail "uv cannot be installed with pip; install it by hand"
  fi
  uv=(.uv/bin/uv)
fi

# uv does not read pip's configuration
index="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}}"
if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi

python="${PYTHON312:-}"
if [ -z "$python" ] && command -v pyenv >/dev/null 2>&1 && version=$(pyenv latest 3.12 2>/dev/null); then
  python="$(pyenv root)/versions/$version/bin/python" # its shims answer only for versions that are switched on
fi

# byte code is compiled once here: without it every import of Megatron takes a minute
unset PYTHONDONTWRITEBYTECODE
"${uv[@]}" venv --quiet --allow-existing --no-python-downloads --python "${python:-3.12}" "$venv" ||
  fail "there is no Python 3.12; install it (pyenv install 3.12) or name it with PYTHON312"
mapfile -t pinned < <("$venv/bin/python" - <<'PYTHON'
import re, tomllib
with open("pyproject.toml", "rb") as file:
    gpu = tomllib.load(file)["project"]["optional-dependencies"]["gpu"]
for name in ("torch", "megatron-core", "transformer-engine"):
    (version,) = (found[1] for line in gpu if (found := re.fullmatch(rf"{name}(?:\[.*\])?==(\S+)", line)))
    print(f"{name}=={version}")
PYTHON
)
[ "${#pinned[@]}" = 3 ] || fail "the gpu extra in pyproject.toml does not pin torch, megatron-core and transformer-engine"
echo "setup_gpu_stack: installing into $venv (half a minute from uv's cache) ..."
install=("${uv[@]}" pip install --quiet --python "$venv/bin/python" --compile-bytecode)
# without vLLM, which needs a GPU to run; torch brings Triton. Tests import peft; Transformer Engine the next three.
"${install[@]}" "${pinned[0]}" "${pinned[1]}" 'pytest>=8.4,<9.2' pytest-timeout pytest-xdist hypothesis cloudpickle \
  peft onnxscript nvdlfw-inspect pydantic -e .
# not on the module path: Megatron takes Transformer Engine for usable as soon as it is there
"${install[@]}" --no-deps --target "$venv/transformer-engine" "${pinned[2]}"
printf '%s' "$wanted" > "$stamp"
echo "setup_gpu_stack: done"
