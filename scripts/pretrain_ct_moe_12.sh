#!/usr/bin/env bash
# CT-MoE-12 as ScheMoE trains it: eight nodes of four GPUs, one expert on each. The paper also compresses what is sent:
# --moe-comm-codec zfp; that changes what is learned, a little.
set -euo pipefail

GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
MODEL_ARGS=(@configs/models/ct_moe_12.args)
MOE_ARGS=(
    --expert-model-parallel-size 32
    --moe-token-dispatcher-type alltoall
    --moe-comm-alltoall pipe
    --moe-comm-chunks auto
    --moe-comm-order optsche
    --balance-profile auto
)
TRAINING_ARGS=(
    --micro-batch-size 16
    --global-batch-size 512
)
source "$(dirname "$0")/pretrain.sh"
