#!/usr/bin/env bash
# From nothing to a mixture-of-experts GPT that learns from real text, on this machine's CPU: installs, builds a corpus
# out of the Python standard library, and trains with 4 expert-parallel processes. Arguments go to pretrain_gpt_moe.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh

DATA="data/quickstart"
if [[ ! -f "${DATA}/english_text_document.idx" ]]; then
    echo "Building the corpus in ${DATA} ..."
    "${PYTHON}" tools/make_sample_corpus.py --output-dir "${DATA}"
    "${PYTHON}" tools/train_tokenizer.py --input "${DATA}/code.jsonl" "${DATA}/english.jsonl" \
        --vocab-size 4096 --output-prefix "${DATA}/tokenizer"
    for domain in code english; do
        "${PYTHON}" -W ignore tools/preprocess_data.py --input "${DATA}/${domain}.jsonl" --output-prefix "${DATA}/${domain}" \
            --tokenizer-type SentencePieceTokenizer --tokenizer-model "${DATA}/tokenizer.model" --append-eod --workers 2
    done
fi

DISTRIBUTED_ARGS=(--nproc-per-node 4 --nnodes 1 --master-addr localhost --master-port "${MASTER_PORT:-29555}")
MODEL_ARGS=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
MOE_ARGS=(
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 1e-2
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 4
)
DATA_ARGS=(
    --data-path 0.8 "${DATA}/code_text_document" 0.2 "${DATA}/english_text_document" --split 98,2,0
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "${DATA}/tokenizer.model" --num-workers 0
    --data-cache-path "${DATA}/cache"
)
TRAINING_ARGS=(
    --micro-batch-size 4 --global-batch-size 16 --train-iters 200 --seed 1234
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --clip-grad 1.0
)
LOGGING_ARGS=(--log-interval 10 --eval-interval 100 --eval-iters 4 --log-throughput --log-tokens-per-expert)

# One thread per process: four processes share the cores already
OMP_NUM_THREADS=1 "${TORCHRUN}" "${DISTRIBUTED_ARGS[@]}" pretrain_gpt_moe.py \
    "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${DATA_ARGS[@]}" "${TRAINING_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
