"""Initial weights drawn by the host's generator, so that a run on a GPU begins with the weights of the run on a CPU."""

import torch

from megatron_balance.device.cpu import TORCH_CUDA

STATES = ("get_rng_state", "set_rng_state", "manual_seed")


def install() -> None:
    """Let this process, for the rest of its life, draw all random numbers of initial weights in host memory.

    Runs must not draw other random numbers on the device: they have no dropout.
    """
    from megatron.core.tensor_parallel import random

    for name in STATES:
        setattr(torch.cuda, name, TORCH_CUDA[name])
    torch.cuda.random.get_rng_state = random._get_cuda_rng_state = TORCH_CUDA["get_rng_state"]
    torch.cuda.random.set_rng_state = random._set_cuda_rng_state = TORCH_CUDA["set_rng_state"]
    torch.nn.init.normal_ = _normal


def _normal(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, generator: None = None) -> torch.Tensor:
    # In half precision, versions of torch draw other numbers
    with torch.no_grad():
        return tensor.copy_(torch.empty(tensor.shape, dtype=torch.float32, device="cpu").normal_(mean, std))
