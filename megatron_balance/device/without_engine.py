"""Completes megatron-core on a machine without Transformer Engine, with or without CUDA.

megatron-core supports such machines, but version 0.16.1 leaves some names undefined or defines them wrongly. Later
versions define them as below.

| name                                            | without Transformer Engine                       |
|-------------------------------------------------|--------------------------------------------------|
| `te_general_gemm` of the router                 | `None`; if undefined, the router raises NameError |
| `HAVE_TE` of multi-latent attention             | false; otherwise it tests a layer against a mock |
| `get_te_version()`                              | older than any version; `None` is not comparable |
| `l2_norm_impl` of the optimizer                 | `l2_norm`; the original waits for each gradient  |
"""

import torch


def complete() -> None:
    """Define the missing names. Has no effect if Transformer Engine is installed, or on a second call. This imports
    megatron-core, so `cpu.install` calls it last."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    if utils.get_te_version() is None:
        utils._te_version = Version("0.0.0")
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm


def l2_norm(
    chunk_size: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the norm [1] of all tensors together without host synchronization; arguments as in apex."""
    norms = torch._foreach_norm([tensor for tensors in lists for tensor in tensors], dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def skip_lone_sums(experts: torch.nn.Module) -> None:
    """Make experts' linear layers skip the sum of their outputs over a single rank. Without expert parallelism,
    megatron-core applies the sum's autograd function and then adds the second bias in place; torch refuses in-place
    changes of this function's output."""
    for module in experts.modules():
        if hasattr(module, "explicit_expert_comm"):
            module.explicit_expert_comm = True  # pyright: ignore[reportArgumentType]
