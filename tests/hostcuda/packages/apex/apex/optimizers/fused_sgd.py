"""apex's SGD."""

from typing import Any

import amp_C
import torch
from torch.optim.optimizer import required

from ..multi_tensor_apply import multi_tensor_applier


class FusedSGD(torch.optim.Optimizer):
    """SGD in single precision."""

    def __init__(
        self,
        params: Any,
        lr: Any = required,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        names = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**names, "nesterov": nesterov})
        self.wd_after_momentum = wd_after_momentum
        self.set_grad_none = set_grad_none
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")

    def zero_grad(self) -> None:
        """Reset the gradients; unlike torch's method, this one takes no argument."""
        super().zero_grad(set_to_none=self.set_grad_none)

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
                multi_tensor_applier(
                    amp_C.multi_tensor_sgd,
                    self._dummy_overflow_buf,
                    [[parameter.grad], [parameter], [state["momentum_buffer"]]],
                    group["weight_decay"],
                    group["momentum"],
                    group["dampening"],
                    group["lr"],
                    group["nesterov"],
                    first,
                    self.wd_after_momentum,
                    1.0,
                )
