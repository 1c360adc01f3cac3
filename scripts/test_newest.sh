#!/usr/bin/env bash
# Runs the tests with the newest megatron-core that pyproject.toml accepts. This version declares that it needs a Python
# newer than 3.11, but works with 3.11. The script installs it in .cache, where it precedes the environment's version,
# which stays unchanged. Arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh develop
source scripts/fetch.sh

MEGATRON_CORE=0.19.2
core="${PWD}/.cache/megatron-core-${MEGATRON_CORE}"
fetch "${core}" --ignore-requires-python "megatron-core==${MEGATRON_CORE}"

# `megatron` is a namespace package: the first directory on PYTHONPATH with a `megatron.core` provides it, here and in
# every process that a test starts. It imports triton even where nothing can run it
export PYTHONPATH="${core}:${TRITON_DIRECTORY}${PYTHONPATH:+:${PYTHONPATH}}"
found="$("${PYTHON}" -W ignore -c 'from megatron.core.package_info import __shortversion__ as v; print(v)')"
if [[ "${found}" != "${MEGATRON_CORE}" ]]; then
    echo "test_newest.sh: Python imports megatron-core ${found}, not ${MEGATRON_CORE}" >&2
    exit 1
fi

OMP_NUM_THREADS=1 "${PYTHON}" -m pytest -n 4 --dist worksteal "$@"
