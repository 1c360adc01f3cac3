#!/usr/bin/env bash
# Qwen3-30B-A3B on nodes of eight GPUs with 80 GB: two nodes or more.
set -euo pipefail

MODEL_ARGS=(@configs/models/qwen3_30b_a3b.args)
MOE_ARGS=(
    --expert-model-parallel-size 8
    --pipeline-model-parallel-size 2
    --moe-token-dispatcher-type alltoall
    --balance-policy pro_prophet
    --balance-overlap blockwise
    --balance-profile auto
    --moe-comm-alltoall auto
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --bf16
)
source "$(dirname "$0")/pretrain.sh"
