#!/usr/bin/env bash
# Creates .venv in the checkout with everything that training and the tests need. A repeated run installs only if the
# requirements have changed. Other scripts source this file, which sets PYTHON and TORCHRUN.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ROOT}/.venv"
STAMP="${VENV}/requirements.installed"

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup.sh: python3 must be 3.11 or newer" >&2
    exit 1
fi

if ! cat "${ROOT}/requirements-ci.txt" "${ROOT}/pyproject.toml" 2>/dev/null | cmp -s - "${STAMP}"; then
    echo "Installing into ${VENV} ..."
    [[ -x "${VENV}/bin/python" ]] || python3 -m venv "${VENV}"
    # Install the pinned torch first: packages that depend on torch would otherwise pull its newest build
    "${VENV}/bin/python" -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' "${ROOT}/requirements-ci.txt")"
    "${VENV}/bin/python" -m pip install --quiet --disable-pip-version-check \
        -r "${ROOT}/requirements-ci.txt" -e "${ROOT}[hf,zfp,report,dev]"
    cat "${ROOT}/requirements-ci.txt" "${ROOT}/pyproject.toml" >"${STAMP}"
fi

export PYTHON="${VENV}/bin/python"
export TORCHRUN="${VENV}/bin/torchrun"
