# syntax=docker/dockerfile:1
#
#   docker build --target cpu -t megatron-balance:cpu .              training on CPUs
#   docker build --target cpu-develop -t megatron-balance:test .     the same, with the tests and all checks
#   docker build --target cuda -t megatron-balance:cuda .            Transformer Engine and NVIDIA's apex, for CUDA 13
#   docker build --target cuda-develop -t megatron-balance:gpu .     the same, with the tests and all checks
#
# requirements-ci.txt pins the Python packages. Versions of apt packages are not pinned, because Debian and Ubuntu keep
# only the newest one:
# hadolint global ignore=DL3008

FROM python:3.11-slim-bookworm AS cpu
# By default, pip installs PyTorch with CUDA, which runs on CPUs, too. For the smaller build without it, give the index
# that https://pytorch.org/get-started/locally names for CPUs: pip prefers its `+cpu` version
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /opt/megatron_balance
COPY pyproject.toml requirements-ci.txt README.md LICENSE ./
COPY scripts/setup.sh scripts/
COPY megatron_balance megatron_balance
RUN scripts/setup.sh run
COPY . .
RUN useradd --create-home --uid 1000 user && chown user: .
USER 1000
ENV PATH=/opt/megatron_balance/.venv/bin:$PATH
CMD ["python", "pretrain_gpt_moe.py", "--help"]


FROM cpu AS cpu-develop
ARG PIP_EXTRA_INDEX_URL
USER 0
# The tests compile a device in host memory
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
RUN scripts/setup.sh develop
USER 1000
CMD ["scripts/test.sh"]


FROM nvidia/cuda:13.0.3-cudnn-devel-ubuntu24.04 AS cuda-base
# Without libibverbs1 and ibverbs-providers, NCCL uses TCP where there is InfiniBand. Triton compiles with gcc and the
# headers of Python when a run starts.
RUN apt-get update \
    && apt-get install --no-install-recommends -y \
        git ibverbs-providers libibverbs1 ninja-build python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/megatron_balance
ENV PATH=/opt/megatron_balance/.venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONDONTWRITEBYTECODE=1
COPY requirements-ci.txt ./
RUN python3 -m venv .venv && pip install --constraint requirements-ci.txt torch


FROM cuda-base AS cuda-wheels
# megatron-core 0.16.1 asks for Transformer Engine 2.9 to 2.11. NVIDIA's apex is available only as source; the
# package that `pip install apex` installs is unrelated
ARG TRANSFORMER_ENGINE=2.11.0
ARG APEX=10417aceddd7d5d05d7cbf7b0fc2daad1105f8b4
ARG TORCH_CUDA_ARCH_LIST="8.0;8.9;9.0;10.0"
ARG MAX_JOBS=8
RUN pip install setuptools==80.9.0 wheel==0.45.1 packaging==25.0 pybind11==3.0.1 \
    && NVTE_FRAMEWORK=pytorch pip wheel --no-build-isolation --no-deps --wheel-dir /wheels \
        "transformer-engine==${TRANSFORMER_ENGINE}" "transformer-engine-cu13==${TRANSFORMER_ENGINE}" \
        "transformer-engine-torch==${TRANSFORMER_ENGINE}"
RUN APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip wheel --no-build-isolation --no-deps --wheel-dir /wheels \
        "apex @ git+https://github.com/NVIDIA/apex.git@${APEX}"


FROM cuda-base AS cuda
COPY pyproject.toml README.md LICENSE ./
COPY scripts/setup.sh scripts/
COPY megatron_balance megatron_balance
RUN scripts/setup.sh run
RUN --mount=type=bind,from=cuda-wheels,source=/wheels,target=/wheels \
    pip install --constraint requirements-ci.txt /wheels/*.whl
COPY . .
# The image's user `ubuntu`, who needs write access to the volume for checkpoints
RUN chown 1000: .
USER 1000
CMD ["python", "pretrain_gpt_moe.py", "--help"]


FROM cuda AS cuda-develop
USER 0
RUN scripts/setup.sh develop
USER 1000
CMD ["tests/gpu_campaign.sh"]
