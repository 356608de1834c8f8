#!/usr/bin/env bash
# What one GPU has left to prove, as one JSON file and one table: docs/gpu_proof.md. PYTHON names another Python.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE
exec "${PYTHON:-python3}" -m benchmarks.gpu_proof "$@"
