"""Predicts from an operator's name and arguments whether its results vary on CUDA."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DOCUMENTED: dict[str, tuple[str, ...]] = {
    **{f"torch.nn.Conv{kind}d": ("convolution", "convolution_backward") for kind in (1, 2, 3)},
    **{f"torch.nn.ConvTranspose{kind}d": ("convolution", "convolution_backward") for kind in (1, 2, 3)},
    **{f"torch.nn.ReplicationPad{kind}d": (f"replication_pad{kind}d_backward",) for kind in (1, 2, 3)},
    **{f"torch.nn.ReflectionPad{kind}d": (f"reflection_pad{kind}d_backward",) for kind in (1, 2, 3)},
    **{f"torch.nn.MaxUnpool{kind}d": (f"max_unpool{max(kind, 2)}d",) for kind in (1, 2, 3)},
    **{f"torch.nn.AdaptiveAvgPool{kind}d": (f"_adaptive_avg_pool{kind}d_backward",) for kind in (2, 3)},
    **{f"torch.nn.FractionalMaxPool{kind}d": (f"fractional_max_pool{kind}d_backward",) for kind in (2, 3)},
    "torch.nn.AdaptiveMaxPool2d": ("adaptive_max_pool2d_backward",),
    "torch.nn.AvgPool3d": ("avg_pool3d_backward",),
    "torch.nn.MaxPool3d": ("max_pool3d_with_indices_backward",),
    "torch.nn.NLLLoss": ("nll_loss_forward", "nll_loss2d_forward"),
    "torch.nn.CTCLoss": ("_ctc_loss_backward",),
    "torch.nn.EmbeddingBag": ("_embedding_bag_backward", "_embedding_bag_dense_backward"),
    "torch.nn.functional.interpolate": tuple(
        f"upsample_{kind}_backward" for kind in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    ),
    "torch.nn.functional.grid_sample": ("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    "torch.bmm": ("bmm",),
    # Documented for CPU tensors only
    "torch.Tensor.__getitem__": (),
    "torch.Tensor.index_put": ("index_put", "_index_put_impl"),
    **{f"torch.Tensor.{name}": (name.removesuffix("_"),) for name in ("put_", "scatter_add_", "index_copy", "scatter")},
    **{f"torch.Tensor.{name}": (name.removesuffix("_"),) for name in ("scatter_reduce", "resize_")},
    # The backward passes of these write
    "torch.gather": ("scatter_add",),
    **{f"torch.{name}": ("index_add",) for name in ("index_select", "repeat_interleave", "index_add")},
    **{f"torch.{name}": (name,) for name in ("histc", "bincount", "cumsum")},
    "torch.median": ("median", "nanmedian"),
}
"""Name in the documentation of `torch.use_deterministic_algorithms` -> operators to look for."""

UNDOCUMENTED = ("embedding_dense_backward",)
"""Operators that megatron-core calls nondeterministic and avoids under `--deterministic-mode`."""

_SUSPECTS = {name for names in DOCUMENTED.values() for name in names} | {*UNDOCUMENTED}


class Operators(TorchDispatchMode):
    """Records the operators that run, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self.nondeterministic: list[str] = []
        """Operators whose results on CUDA may vary from run to run."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        self.all.append(str(func))
        if namespace == "aten":
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            plain = name.removesuffix("_")
            if plain in _SUSPECTS and _varies(plain, func._overloadname, given):
                self.nondeterministic.append(str(func))
        return func(*args, **kwargs)


def _varies(name: str, overload: str, given: dict[str, Any]) -> bool:
    """Return whether the documented condition holds. Indexed writes vary only where two have the same target."""
    tensor = given.get("self")
    if name == "bmm":
        return tensor.is_sparse
    if name == "cumsum":
        return (given.get("dtype") or tensor.dtype).is_floating_point
    if name == "bincount":
        return given.get("weights") is not None
    if name in ("median", "nanmedian"):
        return "dim" in given
    if name == "resize":
        return tensor.is_quantized
    if name in ("_embedding_bag_backward", "_embedding_bag_dense_backward"):
        return given["mode"] == 1
    if name == "scatter":
        return "src" in given and _repeats_along(given["dim"], given["index"])
    if name in ("scatter_add", "scatter_reduce"):
        return _repeats_along(given["dim"], given["index"])
    if name in ("index_add", "index_copy", "put"):
        return _repeats_along(0, given["index"].reshape(-1))
    if name in ("index_put", "_index_put_impl"):
        # With `accumulate`, CUDA sorts the targets and adds in their order
        return not given.get("accumulate", False) and _repeats_among(given["indices"])
    return True


def _repeats_along(dim: int, index: torch.Tensor) -> bool:
    """Return whether a line of `index` along `dim` repeats a number."""
    return index.ndim > 0 and bool((index.sort(dim).values.diff(dim=dim) == 0).any())


def _repeats_among(indices: list[torch.Tensor | None]) -> bool:
    """Return whether the index tensors together address one element twice."""
    numbers = [index for index in indices if index is not None and index.dtype not in (torch.bool, torch.uint8)]
    if not numbers:
        return False
    places = torch.stack([index.reshape(-1) for index in torch.broadcast_tensors(*numbers)])
    return places.unique(dim=1).shape[1] < places.shape[1]
