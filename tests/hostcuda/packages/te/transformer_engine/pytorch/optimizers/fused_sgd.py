"""Transformer Engine's SGD."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import required

from tests.hostcuda.packages import kernels


class FusedSGD(torch.optim.Optimizer):
    """SGD in single precision."""

    def __init__(
        self,
        params: Iterable,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool | None = None,
    ) -> None:
        names = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**names, "nesterov": nesterov})
        self.wd_after_momentum = wd_after_momentum
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                first = "momentum_buffer" not in state
                if first:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                lists = [[parameter.grad], [parameter], [state["momentum_buffer"]]]
                kernels.check_lists(self._dummy_overflow_buf, lists, 3)
                kernels.sgd(
                    parameter,
                    parameter.grad,
                    state["momentum_buffer"],
                    group["weight_decay"],
                    group["momentum"],
                    group["dampening"],
                    group["lr"],
                    group["nesterov"],
                    first,
                    self.wd_after_momentum,
                )
