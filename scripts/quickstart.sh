#!/usr/bin/env bash
# Trains a small mixture-of-experts GPT on real text on this machine's CPU: installs the requirements, builds a corpus
# from the Python standard library, trains with 4 expert-parallel processes without balancing and then with it, and
# compares both runs in a table and an HTML report. Arguments are passed to pretrain_gpt_moe.py in both runs, but
# --balance-* flags only in the second run.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh run

DATA="data/quickstart"
RUNS="runs/quickstart"
TOKEN_BYTES=512 # hidden size 128 in float32
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

# train NAME FLAG...: runs configs/quickstart.yaml and writes its metrics to runs/quickstart/NAME
train() {
    local name="$1" && shift
    # The report would count event files of an earlier run as this run's
    rm -rf "${RUNS:?}/${name}"
    # One thread per process, because the four processes already share the cores
    OMP_NUM_THREADS=1 "${TORCHRUN}" --nproc-per-node 4 --standalone \
        pretrain_gpt_moe.py --yaml-cfg configs/quickstart.yaml --tensorboard-dir "${RUNS}/${name}/tensorboard" "$@"
}

# Balancing flags have no effect without a policy
plain=() last=""
for argument in "$@"; do
    [[ "${argument}" == --* ]] && last="${argument}"
    [[ "${last}" == --balance-* ]] || plain+=("${argument}")
done

echo "1 of 2: without balancing"
train before --balance-policy none "${plain[@]}"
echo "2 of 2: with balancing"
train after --balance-policy quota --balance-overlap blockwise --moe-comm-alltoall pipe \
    --balance-profile configs/clusters/cpu.yaml \
    --balance-log-dir "${RUNS}/after/loads" --balance-timeline "${RUNS}/after/timeline" "$@"

"${PYTHON}" tools/report.py --title "Quick start: before and after balancing" --token-bytes "${TOKEN_BYTES}" \
    --before-tensorboard-dir "${RUNS}/before/tensorboard" --tensorboard-dir "${RUNS}/after/tensorboard" \
    --balance-log-dir "${RUNS}/after/loads" --balance-timeline "${RUNS}/after/timeline" --output "${RUNS}/report.html"
echo "Four processes share this machine's cores, so an even load saves no time here. Simulated with the loads of this run:"
echo "Mixtral-8x7B on four nodes of ${CLUSTER:-H100 GPUs}"
"${PYTHON}" -W ignore tools/simulate.py --cluster "${CLUSTER:-configs/clusters/h100_measured.yaml}" --nodes 4 --load "${RUNS}/after/loads" \
    --compare balance-policy=none,quota,pro_prophet @configs/models/mixtral_8x7b.args --bf16 --micro-batch-size 1 \
    --global-batch-size 64 --use-distributed-optimizer --moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 \
    --pipeline-model-parallel-size 4 --balance-overlap blockwise
