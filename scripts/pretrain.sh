# What the scripts pretrain_MODEL.sh have in common; they set MODEL_ARGS, MOE_ARGS and TRAINING_ARGS and source it.
#
#   scripts/pretrain_MODEL.sh CHECKPOINT_PATH TOKENIZER_MODEL DATA_PATH [flags of pretrain_gpt_moe.py ...]
#
# TOKENIZER_MODEL: a SentencePiece model, or a directory of a Hugging Face tokenizer. DATA_PATH: as preprocess_data.py
# wrote it, without suffix; or "mock". Under SLURM, see scripts/slurm/pretrain.sbatch. Elsewhere, on every node:
# NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, GPUS_PER_NODE. Later flags win. With --dry-run, one process checks the
# layout of all NNODES nodes. Relative paths begin in the checkout.
# shellcheck shell=bash

if (($# < 3)); then
    echo "usage: $0 CHECKPOINT_PATH TOKENIZER_MODEL DATA_PATH [flags ...]" >&2
    exit 2
fi
CHECKPOINT_PATH="$1" TOKENIZER_MODEL="$2" DATA_PATH="$3"
shift 3
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

# Tensor and sequence parallelism overlap only if kernels start in the order in which they were given
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"

GPUS="${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-8}}" NODES="${NNODES:-${SLURM_NNODES:-1}}"
# torchrun kills ranks 30 seconds after it was told to end, unless told otherwise: a checkpoint may take longer
DISTRIBUTED_ARGS=(
    --nproc-per-node "${GPUS}"
    --nnodes "${NODES}"
    --node-rank "${NODE_RANK:-${SLURM_NODEID:-0}}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
    --shutdown-timeout "${SHUTDOWN_TIMEOUT:-110}"
)

TOKENIZER=SentencePieceTokenizer
[[ -d "${TOKENIZER_MODEL}" ]] && TOKENIZER=HuggingFaceTokenizer
if [[ "${DATA_PATH}" == mock ]]; then
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size "${VOCAB_SIZE:-32000}")
else
    DATA_ARGS=(--data-path "${DATA_PATH}" --split "99,1,0")
    DATA_ARGS+=(--tokenizer-type "${TOKENIZER}" --tokenizer-model "${TOKENIZER_MODEL}")
fi

# What no source says, for all models alike; TRAINING_ARGS come later
COMMON_ARGS=(
    --train-iters 100000
    --lr 1e-4
    --min-lr 1e-5
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta2 0.95
    --clip-grad 1.0
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

CHECKPOINT_ARGS=(
    --save "${CHECKPOINT_PATH}"
    --load "${CHECKPOINT_PATH}"
    --save-interval 500
    --keep-last 3
    --async-save
    --exit-signal-handler
)

LOGGING_ARGS=(
    --log-interval 10
    --log-throughput
    --eval-interval 1000
    --eval-iters 10
    --tensorboard-dir "${CHECKPOINT_PATH}/tensorboard"
)
LAUNCHER=("${TORCHRUN:-torchrun}" "${DISTRIBUTED_ARGS[@]}")
if [[ " $* " == *" --dry-run "* ]]; then
    export WORLD_SIZE=$((NODES * GPUS)) LOCAL_WORLD_SIZE="${GPUS}"
    LAUNCHER=("${PYTHON:-python}")
fi
exec "${LAUNCHER[@]}" pretrain_gpt_moe.py "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${COMMON_ARGS[@]}" "${TRAINING_ARGS[@]}" "${CHECKPOINT_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
