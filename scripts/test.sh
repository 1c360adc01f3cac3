#!/usr/bin/env bash
# Installs what is needed and runs every check: format, lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

"${PYTHON}" -m ruff format --check .
"${PYTHON}" -m ruff check .
"${PYTHON}" -m pyright
# Each rank of a test is a process of its own: more threads would only fight over the cores
OMP_NUM_THREADS=1 "${PYTHON}" -m pytest "$@"
