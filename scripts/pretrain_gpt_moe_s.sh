#!/usr/bin/env bash
# GPT-MoE-S as FlexMoE trains it: four nodes of eight A100, one expert on each GPU. The paper's batch is not said.
set -euo pipefail

MODEL_ARGS=(@configs/models/gpt_moe_s.args)
MOE_ARGS=(
    --expert-model-parallel-size 32
    --moe-token-dispatcher-type alltoall
    --balance-policy flexmoe
    --balance-profile auto
    --moe-comm-alltoall auto
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 128
    --bf16
)
source "$(dirname "$0")/pretrain.sh"
