#!/usr/bin/env bash
# Runs the test of balancing inside Megatron-Bridge, which the script installs in .cache. Arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh develop
source scripts/fetch.sh

# Megatron-Bridge asks for packages that need CUDA; the test replaces these
BRIDGE=0.3.1
bridge="${PWD}/.cache/megatron-bridge-${BRIDGE}"
fetch "${bridge}" "megatron-bridge==${BRIDGE}" omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 hydra-core==1.3.2 \
    einops==0.8.1 six==1.17.0

PYTHONPATH="${bridge}${PYTHONPATH:+:${PYTHONPATH}}" "${PYTHON}" -m pytest --slow tests/distributed/test_bridge.py "$@"
