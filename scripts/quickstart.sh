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

# One thread per process: four processes share the cores already
OMP_NUM_THREADS=1 "${TORCHRUN}" --nproc-per-node 4 --nnodes 1 --master-addr localhost --master-port "${MASTER_PORT:-29555}" \
    pretrain_gpt_moe.py --yaml-cfg configs/quickstart.yaml "$@"
