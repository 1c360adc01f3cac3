#!/usr/bin/env bash
# The first test to run on a machine with a GPU. It uses one GPU and takes at most eight minutes.
#
#   tests/gpu_smoke.sh [--cpu] [DIRECTORY]
#
# The output of each step goes to DIRECTORY/STEP.txt, and a table of all steps to DIRECTORY/summary.txt. The default is
# a new directory in runs/. A step that fails or exceeds its time limit does not stop the others. --cpu tries the steps
# without a GPU and allows four times the time. PYTHON is the interpreter of an environment with
# `pip install -e '.[gpu,dev]'`.
# Exit status: 0 if all steps passed, 1 if one did not, 2 without a CUDA device.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
PYTHON="${PYTHON:-python}"

CPU="" SCALE=1 SMALL=()
if [[ "${1:-}" == --cpu ]]; then
    CPU=yes SCALE=4 SMALL=(--iterations 2 --tokens 64 128 256 512 --hidden-size 64 --seq-length 64)
    shift
fi
GPUS="$("${PYTHON}" -W ignore -c 'import torch; print(torch.cuda.device_count())' 2>/dev/null)" || {
    echo "gpu_smoke.sh: ${PYTHON} has no torch: set PYTHON" >&2
    exit 2
}
if [[ "${GPUS}" == 0 && -z "${CPU}" ]]; then
    echo "gpu_smoke.sh: no CUDA device (--cpu tries the steps without one)" >&2
    exit 2
fi
DIRECTORY="${1:-runs/gpu_smoke_$(date +%Y%m%d_%H%M%S)}"
mkdir -p "${DIRECTORY}" || exit 2
SUMMARY="${DIRECTORY}/summary.txt"
: >"${SUMMARY}"
FAILED=0

# note STEP STATUS SECONDS: a row of the table
note() { printf '%-12s %-8s %5s s\n' "$@" | tee -a "${SUMMARY}"; }

# step NAME SECONDS COMMAND...: runs the command for at most SECONDS, the last 10 s of which are for its shutdown
step() {
    local name="$1" limit="$2" status=0 start="${SECONDS}"
    shift 2
    timeout --kill-after 10 "$((SCALE * limit - 10))" "$@" >"${DIRECTORY}/${name}.txt" 2>&1 </dev/null || status=$?
    ((status == 0)) || FAILED=1
    note "${name}" "exit ${status}" "$((SECONDS - start))"
}

VERSIONS='
import importlib.metadata
import torch

print("torch", torch.__version__, "CUDA", torch.version.cuda, "cuDNN", torch.backends.cudnn.version())
if torch.cuda.is_available():
    print("NCCL", torch.cuda.nccl.version(), torch.cuda.get_device_properties(0))
for package in ("megatron-core", "transformer-engine", "apex", "flash-attn", "triton", "numpy"):
    try:
        print(package, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        print(package, "is not installed")
'
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# 480 seconds in all
[[ -n "${CPU}" ]] || step gpu 15 nvidia-smi
step versions 25 "${PYTHON}" -W ignore -c "${VERSIONS}"
step experts 60 "${PYTHON}" -m pytest tests/unit/test_experts.py
step training 180 "${PYTHON}" -m pytest -m gpu tests
step one_gpu 70 "${PYTHON}" tools/bench/one_gpu.py "${SMALL[@]}"
# With biases, megatron-core's own layer does not train in a job of one rank
step step_time 70 "${PYTHON}" tools/bench/step_time.py --processes 1 --repeats 1 --cases swiglu
if ((GPUS == 1)); then
    # NCCL needs a GPU for each rank; one_gpu measures what needs no second rank
    note profile "no pair" 0
else
    step profile 60 "${PYTHON}" -m torch.distributed.run --standalone --nproc-per-node 2 tools/profile_cluster.py \
        --output "${DIRECTORY}/profile.json" @configs/models/tiny.args --micro-batch-size 8 \
        --expert-model-parallel-size 2
fi

echo "Logs and this table are in ${DIRECTORY}"
exit "${FAILED}"
