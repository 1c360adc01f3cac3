#!/usr/bin/env bash
# Fetches triton to .cache, for the tests of kernels. It stays out of .venv, because megatron-core behaves differently if
# it finds triton. Other scripts source this file after setup.sh, and fetch more packages with `fetch`.
set -euo pipefail

# The version for torch 2.13
TRITON=3.7.1

# fetch DIRECTORY PIP_ARGUMENT...: installs into DIRECTORY without dependencies, unless DIRECTORY exists
fetch() {
    local target="$1" && shift
    [[ -d "${target}" ]] && return
    rm -rf "${target}.part"
    "${PYTHON}" -m pip install --quiet --disable-pip-version-check --no-deps --target "${target}.part" "$@"
    mv "${target}.part" "${target}"
}

TRITON_DIRECTORY="${ROOT}/.cache/triton-${TRITON}"
fetch "${TRITON_DIRECTORY}" "triton==${TRITON}"
