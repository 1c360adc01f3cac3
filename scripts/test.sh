#!/usr/bin/env bash
# Installs the requirements and runs every check: format, lint, types, tests. Arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh develop
source scripts/fetch.sh

# Many tests start processes, each of which would compile the sources again
unset PYTHONDONTWRITEBYTECODE

"${PYTHON}" -m ruff format --check .
"${PYTHON}" -m ruff check .
# The other core compiles the loops that all tests share
"${PYTHON}" -c "import tests.preload" &
"${PYTHON}" -m pyright
# Otherwise, every worker would rewrite the assertions of all files. Errors are left to the run below
"${PYTHON}" -m pytest --collect-only >/dev/null || true
wait $!
# Every rank of a test is a separate process, so more threads would only compete for the cores. Ranks wait for each other:
# twice as many tests as there are cores keep these busy
OMP_NUM_THREADS=1 "${PYTHON}" -m pytest -n 4 --dist worksteal "$@"
