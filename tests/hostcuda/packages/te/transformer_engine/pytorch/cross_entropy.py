"""Cross entropy of logits that are sharded over the vocabulary."""

from typing import Any

import torch
import torch.distributed as dist

from tests.hostcuda.packages import kernels


class CrossEntropyFunction(torch.autograd.Function):
    """Computes in single precision; the gradient has the input's dtype and overwrites its memory."""

    @staticmethod
    def forward(
        ctx: Any,
        inp: torch.Tensor,
        target: torch.Tensor,
        group: dist.ProcessGroup | None,
        ignore_idx: int,
        is_cg_capturable: bool,
    ) -> torch.Tensor:
        rows, columns, vocabulary = inp.shape
        assert target.numel() == rows * columns, "Each token needs a target token ID."
        kernels.on_device(inp=inp, target=target)
        rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        logits = inp.float().view(-1, vocabulary)
        wanted = target.reshape(-1)
        local = wanted - rank * vocabulary
        here = (local >= 0) & (local < vocabulary)
        largest = logits.amax(-1)
        total = (logits - largest[:, None]).exp().sum(-1)
        found = logits.gather(1, torch.where(here, local, 0)[:, None])[:, 0]
        parts = torch.stack([largest, total, torch.where(here, found, -torch.inf)])[None]
        if ranks > 1:
            gathered = parts.new_empty(ranks, *parts.shape[1:])
            dist.all_gather_into_tensor(gathered, parts.contiguous(), group=group)
            parts = gathered
        peak = parts[:, 0].amax(0)
        denominator = (parts[:, 1] * (parts[:, 0] - peak).exp()).sum(0)
        kept = wanted != ignore_idx
        loss = torch.where(kept, denominator.log() + peak - parts[:, 2].amax(0), 0.0)
        gradient = (logits - peak[:, None]).exp() / denominator[:, None]
        columns_here = torch.arange(vocabulary, device=inp.device)
        gradient -= (columns_here == local[:, None]).float()
        inp.copy_((gradient * kept[:, None]).view(inp.shape))
        ctx.save_for_backward(inp.detach())
        ctx.is_cg_capturable = is_cg_capturable
        return loss.view(rows, columns)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        (gradient,) = ctx.saved_tensors
        kernels.on_device(grad_output=grad_output)
        # The real function waits for the device here, too
        if ctx.is_cg_capturable or not torch.equal(grad_output, torch.tensor(1.0, device=grad_output.device)):
            gradient.mul_(grad_output.contiguous()[..., None])
        return gradient, None, None, None, None


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: dist.ProcessGroup | None = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    _input: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the loss of each token, in the shape of `target`.

    Args:
        inp: [rows, columns, this rank's part of the vocabulary]; the gradient overwrites it.
        target: [rows, columns].
    """
    if label_smoothing or reduce_loss or _input is not None:
        raise NotImplementedError("parallel_cross_entropy: label_smoothing, reduce_loss, _input")
    return CrossEntropyFunction.apply(inp, target, dist_process_group, ignore_idx, is_cg_capturable)
