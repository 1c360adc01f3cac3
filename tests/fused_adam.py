"""A stand-in for Transformer Engine's FusedAdam, which needs CUDA: the same state, kept and asked for in the same way.

Main parameters may be the optimizer's, moments in bfloat16; groups have no `step` before the first one; a state that
holds anything is taken to be whole.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as core
from megatron.core.optimizer import distrib_optimizer, optimizer_config

MODULE = "transformer_engine.pytorch.optimizers"


class FusedAdam(torch.optim.Optimizer):
    """AdamW in single precision, whatever its state is kept in."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode and master_weight_dtype == torch.float32 and not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.master_weights, self.store_param_remainders = master_weights, store_param_remainders
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self.gradient = "decoupled_grad" if use_decoupled_grad else "grad"

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """Zero moments, and a main parameter or what it has more than the parameter."""
        state = self.state[param]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(param, dtype=self.dtypes[name])
        if self.master_weights:
            state["master_param"] = (
                torch.zeros_like(param, dtype=torch.int16) if store_param_remainders else param.detach().float()
            )

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """A state in single precision; remainders as they are."""
        value = self.state[param][name]
        assert value.dtype == (torch.int16 if self._is_remainder(param, name) else self.dtypes[name]), name
        return value if value.dtype == torch.int16 else value.float()

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        """The inverse of `get_unscaled_state`."""
        dtype = torch.int16 if self._is_remainder(param, name) else torch.float32
        assert value.dtype == dtype, (name, value.dtype)
        kept = torch.int16 if dtype == torch.int16 else self.dtypes[name]
        self.state[param].setdefault(name, torch.empty_like(param, dtype=kept)).copy_(value)

    def _is_remainder(self, param: torch.Tensor, name: str) -> bool:
        return self.store_param_remainders and name == "master_param" and param.dtype == torch.bfloat16

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """torch's, with all states in single precision."""
        found = super().state_dict()
        numbers = (number for group in found["param_groups"] for number in group["params"])
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            if number in found["state"]:
                names = self.state[parameter]
                found["state"][number] = {name: self.get_unscaled_state(parameter, name) for name in names}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's, which casts states to the parameter's type, and then the states as they are."""
        super().load_state_dict(state_dict)
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, parameter in zip(numbers, self._parameters(), strict=True):
            if number in state_dict["state"]:
                self.state[parameter] = {}
                for name, value in state_dict["state"][number].items():
                    remainder = self._is_remainder(parameter, name)
                    self.set_scaled_state(parameter, name, value if remainder else value.float())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step of every group that has parameters."""
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    remainder = self._is_remainder(parameter, "master_param")
                    self.initialize_state(parameter, remainder)
                if getattr(parameter, self.gradient, None) is not None:
                    self._step(group, parameter)

    def _step(self, group: dict[str, Any], parameter: torch.Tensor) -> None:
        gradient, (beta1, beta2) = getattr(parameter, self.gradient).float(), group["betas"]
        mean = beta1 * self.get_unscaled_state(parameter, "exp_avg") + (1 - beta1) * gradient
        square = beta2 * self.get_unscaled_state(parameter, "exp_avg_sq") + (1 - beta2) * gradient**2
        unbiased, scale = mean / (1 - beta1 ** group["step"]), (square / (1 - beta2 ** group["step"])).sqrt()
        apart = self.master_weights and parameter.dtype != torch.float32
        main = self.get_unscaled_state(parameter, "master_param") if apart else parameter
        main = main - group["lr"] * (unbiased / (scale + group["eps"]) + group["weight_decay"] * main)
        self.set_scaled_state(parameter, "exp_avg", mean)
        self.set_scaled_state(parameter, "exp_avg_sq", square)
        if apart:
            self.set_scaled_state(parameter, "master_param", main)
        parameter.copy_(main)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Let megatron-core believe that Transformer Engine's optimizers, and nothing else of it, are there."""
    module = ModuleType(MODULE)
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, {MODULE: module}),
        mock.patch.multiple(core, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False, is_te_min_version=lambda *_: True),
        mock.patch.multiple(distrib_optimizer, Adam=FusedAdam, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True),
        mock.patch.object(optimizer_config, "is_te_min_version", lambda *_: True),
    ):
        yield
