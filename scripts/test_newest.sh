#!/usr/bin/env bash
# Runs the tests with the newest megatron-core that pyproject.toml accepts. This version declares that it needs a Python
# newer than 3.11, but works with 3.11. The script installs it in .cache, where it precedes the environment's version,
# which stays unchanged. Arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

MEGATRON_CORE=0.19.2
TRITON=3.7.1 # the version for torch 2.13; megatron-core imports it even where nothing can run it

# fetch DIRECTORY PIP_ARGUMENT...: installs into DIRECTORY without dependencies, unless DIRECTORY exists
fetch() {
    local target="$1" && shift
    [[ -d "${target}" ]] && return
    rm -rf "${target}.part"
    "${PYTHON}" -m pip install --quiet --disable-pip-version-check --no-deps --target "${target}.part" "$@"
    mv "${target}.part" "${target}"
}

core="${PWD}/.cache/megatron-core-${MEGATRON_CORE}" triton="${PWD}/.cache/triton-${TRITON}"
fetch "${core}" --ignore-requires-python "megatron-core==${MEGATRON_CORE}"
fetch "${triton}" "triton==${TRITON}"

# `megatron` is a namespace package: the first directory on PYTHONPATH with a `megatron.core` provides it, here and in
# every process that a test starts
export PYTHONPATH="${core}:${triton}${PYTHONPATH:+:${PYTHONPATH}}"
found="$("${PYTHON}" -W ignore -c 'from megatron.core.package_info import __shortversion__ as v; print(v)')"
if [[ "${found}" != "${MEGATRON_CORE}" ]]; then
    echo "test_newest.sh: Python imports megatron-core ${found}, not ${MEGATRON_CORE}" >&2
    exit 1
fi

OMP_NUM_THREADS=1 "${PYTHON}" -m pytest -n 2 --dist worksteal "$@"
