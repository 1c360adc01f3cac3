#!/usr/bin/env bash
# Creates .venv in the checkout.
#
#   scripts/setup.sh run [TORCH]        everything that training, conversion and reports need
#   scripts/setup.sh develop [TORCH]    also everything that the tests and checks need
#
# requirements-ci.txt fixes the versions. With another version of TORCH, the environment is .cache/torch-TORCH. A repeated
# run installs only if the requirements have changed. Other scripts source this file, which sets PYTHON and TORCHRUN.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
TORCH="${2:-}"
VENV="${ROOT}/.venv"
[[ -z "${TORCH}" ]] || VENV="${ROOT}/.cache/torch-${TORCH}"

case "${1:-}" in
    run) EXTRAS=hf,zfp,report STAMPS=("${VENV}/installed.run") ;;
    develop) EXTRAS=hf,zfp,report,dev STAMPS=("${VENV}/installed.develop" "${VENV}/installed.run") ;;
    *)
        echo "usage: setup.sh run|develop" >&2
        exit 2
        ;;
esac

if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 11, 7))'; then
    echo "setup.sh: python3 must be 3.11.7 or newer (docs/installation.md says why)" >&2
    exit 1
fi

# requirements: prints the fixed versions, with TORCH in its place and setuptools free, of which torch 2.11 wants an older one
requirements() { sed "${TORCH:+s/^torch==.*/torch==${TORCH}/; /^setuptools==/d}" "${ROOT}/requirements-ci.txt"; }

if ! { requirements && cat "${ROOT}/pyproject.toml"; } 2>/dev/null | cmp -s - "${STAMPS[0]}"; then
    echo "Installing into ${VENV} ..."
    [[ -x "${VENV}/bin/python" ]] || python3 -m venv "${VENV}"
    requirements >"${VENV}/constraints.txt"
    INSTALL=("${VENV}/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "${VENV}/constraints.txt")
    # pip would compile four times as many files as the tests import. Python compiles a file when it is first imported
    if [[ "$1" == develop && ! -e "${VENV}/installed.run" && -z "${PYTHONDONTWRITEBYTECODE:-}" ]]; then
        INSTALL+=(--no-compile)
    fi
    # Install the pinned torch first: packages that depend on torch would otherwise pull its newest build
    "${INSTALL[@]}" torch
    "${INSTALL[@]}" -e "${ROOT}[${EXTRAS}]"
    cat "${VENV}/constraints.txt" "${ROOT}/pyproject.toml" | tee "${STAMPS[@]}" >/dev/null
fi

export PYTHON="${VENV}/bin/python"
export TORCHRUN="${VENV}/bin/torchrun"
