#!/usr/bin/env bash
# Installs the requirements and runs every check: format, lint, types, tests. Arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
# Many tests start processes, each of which would compile the sources again
unset PYTHONDONTWRITEBYTECODE
source scripts/setup.sh develop

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
# One core compiles what all tests import, and the loops that they share, while the other one prepares everything else
"${PYTHON}" -c "import tests.preload" &
loops=$!
source scripts/fetch.sh
"${PYTHON}" -m ruff format --check .
"${PYTHON}" -m ruff check .
# Otherwise, every worker would rewrite the assertions of all files. Errors are left to the run below
"${PYTHON}" -m pytest --collect-only >/dev/null || true
# The tests may start before all types are checked
found="$(mktemp)"
"${PYTHON}" -m pyright >"${found}" 2>&1 &
types=$!
wait "${loops}"
# Every rank of a test is a separate process, so more threads would only compete for the cores. Ranks wait for each other:
# more tests than there are cores keep these busy
status=0
OMP_NUM_THREADS=1 "${PYTHON}" -m pytest -n 3 --dist worksteal "$@" || status=$?
wait "${types}" || status=$?
cat "${found}"
rm "${found}"
exit "${status}"
