#!/usr/bin/env bash
# Tries tools/gpu_proof.sh as on a bare machine with a GPU, but without one: packs the archives, unpacks them elsewhere
# in any order, and runs every part with small sizes on Python 3.12, torch 2.11 and Triton 3.6 with nothing else but
# transformers, pytest and pyarrow, and without a network where the system allows that. vLLM's build for GPUs cannot run
# here: it is loaded, with a driver's library that can do nothing, and takes our engine's arguments.
# PYTHON312=... names Python 3.12.
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
if [ "$(cat "$venv/.installed" 2>/dev/null || true)" != 2 ]; then
  "${uv[@]}" venv --quiet --allow-existing --no-python-downloads --python "$python" "$venv" || fail "no Python 3.12"
  # torch brings Triton 3.6; its interpreter, which a GPU does not need, fails with later versions of NumPy
  "${uv[@]}" pip install --quiet --python "$venv/bin/python" --compile-bytecode \
    torch==2.11.0 transformers==5.17.0 huggingface-hub==1.33.0 'pytest>=8.4,<9.2' 'numpy<2.4' pyarrow pandas accelerate
  "${uv[@]}" pip uninstall --quiet --python "$venv/bin/python" pydantic pydantic-core psutil || true # come with no other
  echo 2 > "$venv/.installed"
fi
"$venv/bin/python" -c 'import torch, triton; assert triton.__version__.startswith("3.6"), triton.__version__'

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
PYTHON="$python" tools/gpu_proof.sh pack "$scratch/bundle.tar.gz" --archive-mib 44 --group engine --group peers
du -ch "$scratch"/bundle.*.tar.gz | tail -1
export PYTHON="$PWD/$venv/bin/python"
mkdir "$scratch/machine"
proof="$scratch/machine/tools/gpu_proof.sh"
output="${1:-build/gpu_proof/tried}"
for number in $(seq "$(find "$scratch" -name 'bundle.*.tar.gz' | wc -l)" -1 1); do # the last one first
  tar xzf "$scratch/bundle.$number.tar.gz" -C "$scratch/machine"
  [ "$number" != 2 ] || [ ! -e "$proof" ] || fail "the repository was in another archive than the first"
done
mv "$scratch/machine/build/gpu_proof/pieces/engine.1" "$scratch"
"$proof" --output "$scratch/lacking" --device cpu --small --part engine && fail "a part ran without what it needs"
grep -q 'bundle.2.tar.gz' "$scratch/lacking/gpu_proof.md" || fail "nothing says which archive is missing"
mv "$scratch/engine.1" "$scratch/machine/build/gpu_proof/pieces"

alone=()
if unshare -rn true 2>/dev/null; then
  # shellcheck disable=SC2016  # for the inner shell
  alone=(unshare -rn sh -c 'ip link set lo up && exec "$@"' sh)
else
  echo "test_gpu_proof: unshare is not allowed here, so the network is not taken away"
fi
"${alone[@]}" "$proof" --output "$output" --device cpu --small
PYTHONPATH="$(printf '%s:' "$scratch"/machine/build/gpu_proof/unpacked/*/site-packages)$PWD"
export PYTHONPATH
echo "vLLM's build for GPUs, loaded, with our engine's arguments:"
"${alone[@]}" "$PYTHON" -m tests.gpu_stack.bare_engine
# the kernels compile for H100 and B200 with this Triton too
echo "the Triton kernels, compiled:"
"$PYTHON" -m tests.gpu_stack.test_kernels
"$PYTHON" -m tests.gpu_stack.test_variants
echo "the output layer at the sizes of a GPU, on tensors that say they are one's:"
"$PYTHON" -m tests.gpu_stack.test_gpu_proof
