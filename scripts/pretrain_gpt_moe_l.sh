#!/usr/bin/env bash
# GPT-MoE-L as FlexMoE trains it: eight nodes of eight A100, one expert on each GPU. The paper's batch is not said.
set -euo pipefail

MODEL_ARGS=(@configs/models/gpt_moe_l.args)
MOE_ARGS=(
    --expert-model-parallel-size 64
    --moe-token-dispatcher-type alltoall
    --balance-policy flexmoe
    --balance-profile auto
    --moe-comm-alltoall auto
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 256
    --bf16
)
source "$(dirname "$0")/pretrain.sh"
