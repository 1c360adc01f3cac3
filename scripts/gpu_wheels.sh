#!/usr/bin/env bash
# Fetches the wheels that tests/gpu_campaign.sh installs on a machine without a network, which has Python 3.12 and
# PyTorch, but not megatron-core. They go to .cache/gpu_wheels.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"

WHEELS=.cache/gpu_wheels
PLATFORMS=()
for glibc in 2_28 2_27 2_24 2_17; do PLATFORMS+=(--platform "manylinux_${glibc}_x86_64"); done

rm -rf "${WHEELS}"
"${PYTHON}" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${PLATFORMS[@]}" --platform manylinux2014_x86_64 --dest "${WHEELS}" \
    megatron-core==0.16.1 zfpy==1.0.1.post0
ls -l "${WHEELS}"
