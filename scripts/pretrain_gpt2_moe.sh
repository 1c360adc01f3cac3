#!/usr/bin/env bash
# GPT-2 with mixtures as Parm trains it on its testbed B: eight nodes of four GPUs, N_MP = N_ESP = 4, 8 experts.
set -euo pipefail

GPUS_PER_NODE="${GPUS_PER_NODE:-4}"
MODEL_ARGS=(@configs/models/gpt2_moe.args)
MOE_ARGS=(
    --tensor-model-parallel-size 4
    --expert-tensor-parallel-size 4
    --expert-model-parallel-size 8
    --moe-token-dispatcher-type alltoall
    --moe-parallel-schedule auto
    --balance-profile auto
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 32
)
source "$(dirname "$0")/pretrain.sh"
