"""training/optimizer_state.py: Adam in one pass over a CPU's memory."""

from types import SimpleNamespace

import pytest
import torch

from megatron_balance.training.optimizer_state import fuse

META = torch.device("meta")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_fused_steps_equal_others(kind: type[torch.optim.Adam]) -> None:
    torch.manual_seed(0)
    start = [torch.randn(shape, dtype=torch.float64) for shape in ((3, 4, 5), (7,), (0,))]
    gradients = [[torch.randn_like(tensor) for tensor in start] for _ in range(5)]
    trained = []
    for fused in (False, True):
        parameters = [tensor.clone().requires_grad_() for tensor in start]
        inner = kind(parameters, lr=0.1, weight_decay=0.1)
        if fused:
            fuse(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)]))  # pyright: ignore[reportArgumentType]
        assert all(bool(group["fused"]) == fused for group in inner.param_groups)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.clone()
            inner.step()
        trained.append(parameters)
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_other_devices_and_optimizers_are_left_alone() -> None:
    elsewhere = torch.optim.AdamW([torch.zeros(2, device=META, requires_grad=True)])
    sgd = torch.optim.SGD([torch.zeros(2, requires_grad=True)])
    for inner in (elsewhere, sgd):
        before = [dict(group) for group in inner.param_groups]
        fuse(SimpleNamespace(optimizer=inner))  # pyright: ignore[reportArgumentType]
        assert all(old.get("fused") == new.get("fused") for old, new in zip(before, inner.param_groups, strict=True))
