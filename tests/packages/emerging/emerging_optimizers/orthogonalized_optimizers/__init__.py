"""The base class of Muon, and the factors of its updates."""

from collections.abc import Callable
from typing import Any

import torch


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Subtracts `lr` times `orthogonalize` of an averaged gradient, after decoupled weight decay."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
        *,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
        nesterov: bool | None = None,
        use_nesterov: bool | None = None,
    ) -> None:
        assert weight_decay_method == "decoupled"
        # Version 0.1 has other names
        self.rate = "momentum" if use_nesterov is None else "momentum_beta"
        super().__init__(params, {"lr": lr, self.rate: momentum, "weight_decay": weight_decay})
        self.nesterov = bool(nesterov or use_nesterov)
        self.fp32_matmul_prec = fp32_matmul_prec
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None or not skip_non_grad_params:
                self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update all parameters that have a gradient."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self.fp32_matmul_prec)
        for group in self.param_groups:
            self._init_group(group)
            options = {name: value for name, value in group.items() if name != "params"}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                average = self.state[parameter]["momentum_buffer"]
                average.lerp_(parameter.grad, 1 - group[self.rate])
                direction = parameter.grad.lerp(average, group[self.rate]) if self.nesterov else average
                update = self.orthogonalize(parameter, direction, **options)
                parameter.sub_(update, alpha=group["lr"])
        torch.set_float32_matmul_precision(precision)

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return the update of a matrix."""
        assert grad.dim() == 2, "only a matrix can be orthogonalized"
        return self.scaled_orthogonalize_fn(grad)


class AdaptiveMuon(OrthogonalizedOptimizer):
    """Only a name that megatron-core imports."""


def get_muon_scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    """Return the factor of the update of a matrix [size_out, size_in]."""
    square = {"spectral": max(size_out, size_in), "unit_rms_norm": size_out / size_in}
    return (square | {"shape_scaling": max(1, size_out / size_in)})[mode] ** 0.5
