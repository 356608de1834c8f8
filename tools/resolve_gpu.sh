#!/usr/bin/env bash
# What a GPU cluster installs can be resolved: the gpu extra, the same with nemo-run, and the list of docker/Dockerfile,
# for Python 3.12 on Linux. Nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=(uv)
command -v uv >/dev/null 2>&1 || uv=(.uv/bin/uv)

resolve() {
  local name="$1"
  shift
  echo "resolve: $name"
  "${uv[@]}" pip compile --quiet --python-version 3.12 --python-platform x86_64-unknown-linux-gnu "$@" >/dev/null
}

resolve 'gpu' pyproject.toml --extra gpu
resolve 'gpu,launch' pyproject.toml --extra gpu --extra launch
printf '%s\n' 'torch==2.13.0' setuptools wheel pybind11 'transformer-engine[core_cu13,pytorch]==2.20.2' '.[gpu,launch]' |
  resolve 'docker/Dockerfile' -
