#!/usr/bin/env bash
# Runs the tests with the oldest torch that pyproject.toml accepts, in an environment of its own. It is PyPI's build for
# CUDA, which needs no GPU. Arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh develop 2.11.0
source scripts/fetch.sh

OMP_NUM_THREADS=1 "${PYTHON}" -m pytest -n 4 --dist worksteal "$@"
