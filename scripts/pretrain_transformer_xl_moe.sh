#!/usr/bin/env bash
# A decoder of the size of DEMI's Transformer-XL as DEMI trains it: one node of four GPUs, 16 experts, 200 sequences an
# iteration.
set -euo pipefail

GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
MODEL_ARGS=(@configs/models/transformer_xl_moe.args)
MOE_ARGS=(
    --expert-model-parallel-size 4
    --moe-token-dispatcher-type alltoall
    --balance-policy demi
    --balance-profile auto
)
TRAINING_ARGS=(
    --micro-batch-size 50
    --global-batch-size 200
    --lr 2.5e-4
)
source "$(dirname "$0")/pretrain.sh"
