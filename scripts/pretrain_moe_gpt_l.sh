#!/usr/bin/env bash
# MoE-GPT-L as Pro-Prophet trains it: four nodes of four GPUs, one expert on each, 16384 tokens an iteration.
set -euo pipefail

GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
MODEL_ARGS=(@configs/models/moe_gpt_l.args)
MOE_ARGS=(
    --expert-model-parallel-size 16
    --moe-token-dispatcher-type alltoall
    --balance-policy pro_prophet
    --balance-overlap blockwise
    --balance-profile auto
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 16
)
source "$(dirname "$0")/pretrain.sh"
