"""Print what this machine has; fail if it cannot run the campaign's steps."""

import importlib.metadata
import os
import sys

PACKAGES = (
    *("megatron-core", "transformer-engine", "apex", "triton", "numpy", "numba", "scipy", "pytest", "hypothesis"),
    *("pytest-xdist", "pytest-timeout", "zfpy"),
)


def main() -> int:
    import megatron.core
    import numba
    import torch

    print("Python", sys.version.split()[0], "torch", torch.__version__, "CUDA", torch.version.cuda)
    print("cores", os.cpu_count(), "numba's threads", numba.get_num_threads(), megatron.core.__file__)
    for package in PACKAGES:
        try:
            print(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            print(package, "is not installed")
    if not torch.cuda.is_available():
        return 0 if "--cpu" in sys.argv else 2
    print("NCCL", torch.cuda.nccl.version(), "cuDNN", torch.backends.cudnn.version())
    print(torch.cuda.get_device_properties(0), "driver sees CUDA", torch.version.cuda)
    return 0


if __name__ == "__main__":
    sys.exit(main())
