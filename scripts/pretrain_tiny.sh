#!/usr/bin/env bash
# The model of scripts/quickstart.sh, on four GPUs or on a CPU (--distributed-backend gloo).
set -euo pipefail

GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
MODEL_ARGS=(@configs/models/tiny.args)
MOE_ARGS=(
    --expert-model-parallel-size 4
    --moe-token-dispatcher-type alltoall
    --balance-policy pro_prophet
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 16
    --train-iters 200
    --lr 2e-3
    --min-lr 2e-4
    --lr-warmup-iters 20
)
source "$(dirname "$0")/pretrain.sh"
