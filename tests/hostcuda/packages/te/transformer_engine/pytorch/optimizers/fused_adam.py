"""Transformer Engine's Adam.

The optimizer may hold main parameters, and moments may be in bfloat16. Groups have no `step` before the first step. A
parameter state that is not empty counts as complete.
"""

from collections.abc import Iterable
from typing import Any

import torch

from tests.hostcuda.packages import kernels

from .multi_tensor_apply import multi_tensor_adam, multi_tensor_applier

MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Adam or AdamW in single precision, regardless of the dtype of its state."""

    multi_tensor_adam = staticmethod(multi_tensor_adam)

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **others: Any,
    ) -> None:
        kernels.check_others("transformer_engine.pytorch.optimizers.fused_adam:FusedAdam.__init__", others)
        self.name_to_dtype_map = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        self.name_to_dtype_map["master_param"] = master_weight_dtype
        if not {*self.name_to_dtype_map.values()} <= {torch.float32, torch.bfloat16}:
            raise NotImplementedError("FusedAdam: state in fp16 or fp8")
        if master_weights and master_weight_dtype != torch.float32:
            raise RuntimeError("FusedAdam only supports fp32/fp16 master weights.")
        names = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**names, "weight_decay": weight_decay})
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Reset the gradients that `step` uses; by default, set them to None."""
        if not self.use_decoupled_grad:
            super().zero_grad(set_to_none=set_to_none in (None, True))
            return
        for parameter in self._parameters():
            if set_to_none in (None, True):
                parameter.decoupled_grad = None
            else:
                parameter.decoupled_grad.zero_()

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """Create zero moments, and a main parameter or its remainder beyond the parameter."""
        for name in MOMENTS:
            self._initialize_state(param, name, zero_buffer=True)
        if self.master_weights:
            self._initialize_state(param, "master_param", False, store_param_remainders)
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", param.clone().detach().float())

    def _initialize_state(
        self, param: torch.Tensor, state_name: str, zero_buffer: bool, store_param_remainders: bool = False
    ) -> None:
        dtype = torch.int16 if store_param_remainders else self.name_to_dtype_map[state_name]
        new = torch.zeros if zero_buffer or store_param_remainders else torch.empty
        self.state[param][state_name] = new(param.shape, dtype=dtype, device=param.device)

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """Return a state in single precision; return remainders unchanged."""
        value = self.state[param][state_name]
        remainder = self._is_remainder(param, state_name)
        assert value.dtype == (torch.int16 if remainder else self.name_to_dtype_map[state_name]), state_name
        return value if remainder else value.float()

    def set_scaled_state(self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor) -> None:
        """Store a state, as the inverse of `get_unscaled_state`."""
        remainder = self._is_remainder(param, state_name)
        assert unscaled_state.dtype == (torch.int16 if remainder else torch.float32), (state_name, unscaled_state.dtype)
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name, False, remainder)
        self.state[param][state_name].copy_(unscaled_state)

    def _is_remainder(self, param: torch.Tensor, name: str) -> bool:
        return self.store_param_remainders and name == "master_param" and param.dtype == torch.bfloat16

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict with all states in single precision."""
        found = super().state_dict()
        numbers = (number for group in found["param_groups"] for number in group["params"])
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            if number in found["state"]:
                names = found["state"][number]
                found["state"][number] = {name: self.get_unscaled_state(parameter, name) for name in names}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, which casts states to the parameter's dtype, and then restore the states' own dtypes."""
        super().load_state_dict(state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = {}
                for name, value in state_dict["state"][number].items():
                    if value is not None:
                        remainder = self._is_remainder(parameter, name)
                        self.set_scaled_state(parameter, name, value if remainder else value.float())

    @torch.no_grad()
    def step(self, closure: None = None, grad_scaler: None = None) -> None:
        """Step every group that has parameters; parameters without a gradient get a state, too."""
        assert closure is None and grad_scaler is None
        gradient = "decoupled_grad" if self.use_decoupled_grad else "grad"
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter, self._is_remainder(parameter, "master_param"))
            stepped = [one for one in group["params"] if getattr(one, gradient, None) is not None]
            halves = [one for one in stepped if one.dtype != torch.float32]
            if len({one.dtype for one in halves}) > 1:
                raise RuntimeError("FusedAdam does not support a mix of float16 and bfloat16 model weights.")
            # A parameter in single precision is its own main parameter
            self._step(group, halves, gradient, (*MOMENTS, "master_param") if self.master_weights else MOMENTS)
            self._step(group, [one for one in stepped if one.dtype == torch.float32], gradient, MOMENTS)

    def _step(
        self, group: dict[str, Any], parameters: list[torch.Tensor], gradient: str, names: tuple[str, ...]
    ) -> None:
        if not parameters:
            return
        states = [[self.get_unscaled_state(one, name) for one in parameters] for name in names]
        multi_tensor_applier(
            self.multi_tensor_adam,
            self._dummy_overflow_buf,
            [[getattr(one, gradient) for one in parameters], [one.data for one in parameters], *states],
            group["lr"],
            *group["betas"],
            group["eps"],
            group["step"],
            self.adam_w_mode,
            1 if group["bias_correction"] else 0,
            group["weight_decay"],
        )
        for name, values in zip(names, states, strict=True):
            for parameter, value in zip(parameters, values, strict=True):
                if self.state[parameter][name] is not value:
                    self.set_scaled_state(parameter, name, value)
