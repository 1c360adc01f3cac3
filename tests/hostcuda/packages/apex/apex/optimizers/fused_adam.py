"""apex's Adam."""

from typing import Any

import amp_C
import torch

from tests.hostcuda.packages import kernels

from ..multi_tensor_apply import multi_tensor_applier


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW in single precision; groups count their steps and have no `step` before the first step."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        **others: Any,
    ) -> None:
        kernels.check_others(f"{__name__}:FusedAdam.__init__", others)
        names = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**names, "weight_decay": weight_decay})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.set_grad_none = set_grad_none
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")

    def zero_grad(self) -> None:
        """Reset the gradients; unlike torch's method, this one takes no argument."""
        super().zero_grad(set_to_none=self.set_grad_none)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step every group that has parameters; a parameter without a gradient gets no state."""
        assert closure is None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for dtype in (torch.float16, torch.bfloat16, torch.float32):
                parameters = [one for one in group["params"] if one.grad is not None and one.dtype == dtype]
                if parameters:
                    self._step(group, parameters)

    def _step(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                for name in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter][name] = torch.zeros_like(parameter.data).float()
        moments = [[self.state[one][name] for one in parameters] for name in ("exp_avg", "exp_avg_sq")]
        multi_tensor_applier(
            amp_C.multi_tensor_adam,
            self._dummy_overflow_buf,
            [[one.grad for one in parameters], parameters, *moments],
            group["lr"],
            *group["betas"],
            group["eps"],
            group["step"],
            self.adam_w_mode,
            1 if group["bias_correction"] else 0,
            group["weight_decay"],
        )
