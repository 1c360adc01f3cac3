"""Rotary position embeddings."""

import torch

from tests.hostcuda.packages import kernels


def _rotate_half(t: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2)
    first, second = t.chunk(2, -1)
    return torch.cat((-second, first), -1)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Return rotated queries or keys.

    Args:
        t: [sequence, batch, heads, channels].
        freqs: angles, [at least sequence, 1, 1, at most channels], in single precision.
    """
    assert tensor_format != "thd" or cu_seqlens is not None, "cu_seqlens must not be None when tensor_format is 'thd'."
    if tensor_format != "sbhd" or start_positions is not None or cp_size > 1 or not fused:
        raise NotImplementedError("apply_rotary_pos_emb: other formats, start_positions, context parallelism, unfused")
    kernels.on_device(t=t, freqs=freqs)
    kernels.require(t.dim() == 4 and freqs.dim() == 4, "expected 4D tensor")
    kernels.require(freqs.shape[1:3] == (1, 1), "expected the second and third dims of the freqs tensor equal 1")
    kernels.require(t.shape[0] <= freqs.shape[0], "expected freqs tensor has a longer sequence length than input")
    kernels.require(t.shape[3] >= freqs.shape[3], "expected the last dim of the input tensor not to be smaller")
    angles = freqs.float()[: t.shape[0]]
    cos = angles.cos().to(t.dtype)
    sin = angles.sin().to(t.dtype)
    turned = t[..., : freqs.shape[-1]]
    passed = t[..., freqs.shape[-1] :]
    return torch.cat((turned * cos + _rotate_half(turned, interleaved) * sin, passed), -1)
