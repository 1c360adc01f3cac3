#!/usr/bin/env bash
# Runs tests/gpu/campaign.py, which has the usage: everything that one GPU can say about this package, in nine minutes.
#
# PYTHON is an interpreter with torch. The wheels in .cache/gpu_wheels, which scripts/gpu_wheels.sh fetches, complete it
# on a machine without a network.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
SITE=""
if compgen -G ".cache/gpu_wheels/*.whl" >/dev/null; then
    SITE="$(mktemp -d)"
    "${PYTHON}" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "${SITE}" .cache/gpu_wheels/*.whl
fi
export PYTHONPATH="${SITE:+${SITE}:}${PWD}${PYTHONPATH:+:${PYTHONPATH}}"
exec "${PYTHON}" -m tests.gpu.campaign "$@"
