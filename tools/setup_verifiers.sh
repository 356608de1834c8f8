#!/usr/bin/env bash
# Makes .venv-verifiers: verifiers with the taskset of tests/integration/test_verifiers.py. Idempotent.
# Needs .venv (tools/setup_env.sh), and a package index: 97 packages, 0.6 GB.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv-verifiers/bin/python
if "$python" -c 'import gtpo_adder' 2>/dev/null; then
  exit 0
fi
.venv/bin/python -m venv .venv-verifiers
echo "setup_verifiers: installing into .venv-verifiers (a few minutes) ..."
"$python" -m pip install --quiet 'verifiers==0.4.0'
echo "$PWD/tests/verifiers" > "$("$python" -c 'import site; print(site.getsitepackages()[0])')/gtpo_tests.pth"
