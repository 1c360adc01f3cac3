#!/usr/bin/env bash
# Trains a model from configs/models with its layout: parallel sizes, batch size, balancing and communication.
#
#   scripts/pretrain.sh MODEL CHECKPOINT_PATH TOKENIZER_MODEL DATA_PATH [flags of pretrain_gpt_moe.py ...]
#
# The layout is configs/layouts/MODEL.args or, for a family such as ct_moe_12 and ct_moe_16,
# configs/layouts/ct_moe.args. TOKENIZER_MODEL is a SentencePiece model or the directory of a Hugging Face tokenizer.
# DATA_PATH is the output of preprocess_data.py without its suffix, or "mock". If a flag occurs twice, the last value
# wins. Relative paths start at the root of the checkout. For several nodes, set NNODES, NODE_RANK, MASTER_ADDR,
# MASTER_PORT and GPUS_PER_NODE on each of them; for SLURM, see scripts/slurm/pretrain.sbatch. With --dry-run, one
# process checks the layout of all NNODES nodes, by default on the nodes and the cluster that the layout names.
set -euo pipefail

if (($# < 4)); then
    echo "usage: $0 MODEL CHECKPOINT_PATH TOKENIZER_MODEL DATA_PATH [flags ...]" >&2
    exit 2
fi
NAME="$1" CHECKPOINT_PATH="$2" TOKENIZER_MODEL="$3" DATA_PATH="$4"
shift 4
cd "$(dirname "$0")/.."

MODEL="configs/models/${NAME}.args" LAYOUT="configs/layouts/${NAME}.args"
[[ -f "${LAYOUT}" ]] || LAYOUT="configs/layouts/${NAME%_*}.args"
for file in "${MODEL}" "${LAYOUT}"; do
    if [[ ! -f "${file}" ]]; then
        echo "$0: ${NAME}: there is no ${file}; models are the files of configs/models, without .args" >&2
        exit 2
    fi
done

# megatron-core's tensor-parallel layers overlap communication with computation only if kernels start in the order of
# their launch. Anything else is held up by it: chunks, Trans and Agg wait in one queue with the experts.
TENSOR_PARALLEL="$({ grep -hv '^#' "${MODEL}" "${LAYOUT}"; printf '%s\n' "$@"; } | tr ' =' '[\n*]' |
    awk 'last == "--tensor-model-parallel-size" { size = $0 } { last = $0 } END { print size + 0 }')"
if ((TENSOR_PARALLEL > 1)) && [[ " $* " != *" --tp-comm-overlap "* ]]; then
    export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
fi

# Experts' rows change in number with every microbatch; segments that grow keep the GPU's memory in one piece
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}}"

# Prints what a comment of the layout says, such as "# Nodes: 4"
layout_says() { sed -n "s/^# $1: //p" "${LAYOUT}"; }

LAYOUT_GPUS="$(layout_says "GPUs per node")" DRY=() DEFAULT_NODES=1
if [[ " $* " == *" --dry-run "* ]]; then
    CLUSTER="$(layout_says Cluster)" DEFAULT_NODES="$(layout_says Nodes)"
    [[ -z "${CLUSTER}" ]] || DRY=(--balance-profile "${CLUSTER}")
fi
GPUS="${GPUS_PER_NODE:-${LAYOUT_GPUS:-${SLURM_GPUS_ON_NODE:-8}}}"
NODES="${NNODES:-${SLURM_NNODES:-${DEFAULT_NODES}}}"
RANK="${NODE_RANK:-${SLURM_NODEID:-$([[ "${NODES}" != 1 ]] || echo 0)}}"

refuse() {
    echo "$0: $1" >&2
    exit 2
}
[[ "${NODES}" =~ ^[1-9][0-9]*$ ]] || refuse "NNODES=${NODES}: give the number of nodes, at least 1"
# Nodes with the same number, or that look for node 0 at different addresses, would wait for each other in silence
if [[ " $* " != *" --dry-run "* ]]; then
    if [[ ! "${RANK}" =~ ^[0-9]+$ ]] || ((10#${RANK} >= NODES)); then
        refuse "NODE_RANK=${RANK}: set it to the number of this node, from 0 to NNODES - 1; NNODES is ${NODES}"
    fi
    [[ "${SLURM_LOCALID:-0}" == 0 ]] ||
        refuse "SLURM_LOCALID=${SLURM_LOCALID}: one task per node starts all of its processes; use --ntasks-per-node=1"
    case "${NODES} ${MASTER_ADDR:-}" in
    "1 "*) ;;
    *" " | *" localhost"* | *" ip6-l"* | *" 127."* | *" ::1" | *" 0.0.0.0")
        refuse "MASTER_ADDR=${MASTER_ADDR:-}: every node needs the same address of node 0; NNODES is ${NODES}"
        ;;
    *) getent ahosts "${MASTER_ADDR}" >/dev/null || refuse "MASTER_ADDR=${MASTER_ADDR}: this node knows no such host" ;;
    esac
fi
# By default torchrun kills its ranks 30 seconds after SIGTERM; saving a checkpoint may take longer
DISTRIBUTED_ARGS=(
    --nproc-per-node "${GPUS}"
    --nnodes "${NODES}"
    --node-rank "${RANK}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
    --shutdown-timeout "${SHUTDOWN_TIMEOUT:-110}"
)

TOKENIZER=SentencePieceTokenizer
[[ -d "${TOKENIZER_MODEL}" ]] && TOKENIZER=HuggingFaceTokenizer
MOCK_ARGS=()
if [[ "${DATA_PATH}" == mock ]]; then
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer)
    MOCK_ARGS=(--vocab-size "${VOCAB_SIZE:-32000}") # unless the model has one
else
    DATA_ARGS=(--data-path "${DATA_PATH}" --split "99,1,0")
    DATA_ARGS+=(--tokenizer-type "${TOKENIZER}" --tokenizer-model "${TOKENIZER_MODEL}")
fi

# Settings that no paper gives, the same for all models; a layout overrides them
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
    --cross-entropy-loss-fusion
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
exec "${LAUNCHER[@]}" pretrain_gpt_moe.py "${MOCK_ARGS[@]}" "@${MODEL}" "${DATA_ARGS[@]}" "${COMMON_ARGS[@]}" \
    "@${LAYOUT}" "${DRY[@]}" "${CHECKPOINT_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
