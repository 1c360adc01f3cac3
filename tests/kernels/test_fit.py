"""The kernel of `fit` under Triton's interpreter: to the bit."""

import pytest
import torch
from hypothesis import given, settings

from megatron_balance.kernels import fit as kernel
from megatron_balance.planning.fit import BUSIEST, ORDERS
from tests.kernels.equal import fits_equal, zipf
from tests.unit.test_fit import cases


@settings(deadline=None, max_examples=20)
@given(cases())
def test_the_kernel_is_the_function(case: dict) -> None:
    fits_equal([case], "cpu")


@pytest.mark.parametrize("order", ORDERS)
def test_many_ranks_and_several_layers(order: int) -> None:
    fits_equal(zipf(0, ranks=20, order=order), "cpu")


@pytest.mark.parametrize(("far", "near", "other"), [(0.5, 20, 20), (1.0, 10, 10), (2.0, 10, 20)])
def test_equal_rooms_and_equal_costs(far: float, near: int, other: int) -> None:
    # Rank 3 has 20 tokens too many, and two equal experts. A move to another node would be as good, but not better
    rooms = [other, other, near, 0, other, other]
    loads = [40 - room for room in rooms]
    loads[3] = 60
    case = {"experts": [[], [], [], [(30, 4), (30, 5)], [], []], "loads": loads, "capacities": [40] * 6}
    fits_equal([{**case, "slots": [1] * 6, "node_size": 2, "far": far, "reaches_far": True, "order": BUSIEST}], "cpu")


def test_values_up_to_the_limit() -> None:
    # Two equal ranks above and two below: all keys have large values
    many = 2**42 - 4
    case = {"experts": [[(many, 0)], [(many, 1)], [], []], "loads": [many, many, 0, 0], "capacities": [many // 2] * 4}
    fits_equal([{**case, "slots": [1] * 4, "node_size": 2, "far": 1.0, "reaches_far": True, "order": BUSIEST}], "cpu")


def arguments(**others: torch.Tensor) -> dict:
    per_rank = {name: torch.zeros(1, 2, dtype=torch.int64) for name in ("loads_LD", "capacities_LD", "slots_LD")}
    tokens = torch.zeros(1, 2, 3, dtype=torch.int64)
    return {"tokens_LDS": tokens, "experts_LDS": tokens, **per_rank, "num_experts": 6, "node_size": 2, **others}


def test_the_host_reads_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors without values, for a kernel that does nothing
    monkeypatch.setattr(kernel, "fit_kernel", {(1,): lambda *tensors, **constants: None})
    given = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in arguments().items()
    }
    assert kernel.fit(**given).quotas_LED.shape == (1, 6, 2)
