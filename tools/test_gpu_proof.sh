#!/usr/bin/env bash
# Tries tools/gpu_proof.sh as on a bare machine with a GPU, but without one: packs the bundle, unpacks it elsewhere, and
# runs every part with small sizes on Python 3.12, torch 2.11 and Triton 3.6 with nothing else but transformers and
# pytest, and without a network where the system allows that. PYTHON312=... names Python 3.12.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'test_gpu_proof: %s\n' "$*" >&2; exit 1; }

if command -v uv >/dev/null 2>&1; then uv=(uv); else uv=(.uv/bin/uv); fi
[ "${uv[0]}" = uv ] || [ -x .uv/bin/uv ] || fail "there is no uv; tools/setup_gpu_stack.sh installs it"
index="${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}}"
if [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi
python="${PYTHON312:-}"
if [ -z "$python" ] && command -v pyenv >/dev/null 2>&1 && version=$(pyenv latest 3.12 2>/dev/null); then
  python="$(pyenv root)/versions/$version/bin/python"
fi
python="${python:-python3.12}"

unset PYTHONDONTWRITEBYTECODE PYTHONPATH
venv=.venv-gpu-proof
if [ ! -e "$venv/.installed" ]; then
  "${uv[@]}" venv --quiet --allow-existing --no-python-downloads --python "$python" "$venv" || fail "no Python 3.12"
  # torch brings Triton 3.6; its interpreter, which a GPU does not need, fails with later versions of NumPy
  "${uv[@]}" pip install --quiet --python "$venv/bin/python" --compile-bytecode \
    torch==2.11.0 transformers==5.17.0 huggingface-hub==1.33.0 'pytest>=8.4,<9.2' 'numpy<2.4'
  "${uv[@]}" pip uninstall --quiet --python "$venv/bin/python" pydantic pydantic-core || true # comes with no other
  touch "$venv/.installed"
fi
"$venv/bin/python" -c 'import torch, triton; assert triton.__version__.startswith("3.6"), triton.__version__'

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
PYTHON="$python" tools/gpu_proof.sh pack "$scratch/bundle.tar.gz"
mkdir "$scratch/machine"
tar xzf "$scratch/bundle.tar.gz" -C "$scratch/machine"
alone=()
if unshare -rn true 2>/dev/null; then
  # shellcheck disable=SC2016  # for the inner shell
  alone=(unshare -rn sh -c 'ip link set lo up && exec "$@"' sh)
else
  echo "test_gpu_proof: unshare is not allowed here, so the network is not taken away"
fi
export PYTHON="$PWD/$venv/bin/python"
"${alone[@]}" "$scratch/machine/tools/gpu_proof.sh" --output "${1:-build/gpu_proof/tried}" --device cpu --small
# the kernels compile for H100 and B200 with this Triton too
echo "the Triton kernels, compiled:"
PYTHONPATH="$(echo "$scratch"/machine/build/gpu_proof/site/*):$PWD"
export PYTHONPATH
"$PYTHON" -m tests.gpu_stack.test_kernels
"$PYTHON" -m tests.gpu_stack.test_variants
echo "the output layer at the sizes of a GPU, on tensors that say they are one's:"
"$PYTHON" -m tests.gpu_stack.test_gpu_proof
echo "the local layers, on such tensors:"
"$PYTHON" -W ignore -m tests.gpu_stack.test_launches
