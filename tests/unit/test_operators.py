"""tests/operators.py finds all operators that torch documents, and no others."""

import re
from collections.abc import Callable

import pytest
import torch

from tests.operators import DOCUMENTED, Operators


def test_all_that_torch_documents_is_known() -> None:
    listed = torch.use_deterministic_algorithms.__doc__.partition("The following normally-nondeterministic")[2]
    listed = listed.partition("In addition, several operations")[0]
    names = re.findall(r"\* :(?:func|class):`([\w.]+)`", listed)
    assert len(names) > 40
    assert {*names} == {*DOCUMENTED}


TWICE = torch.tensor([1, 0, 1])
ONCE = torch.tensor([2, 0, 1])


def gather_backward(index: torch.Tensor) -> None:
    torch.ones(3, requires_grad=True).gather(0, index).sum().backward()


def index_select_backward(index: torch.Tensor) -> None:
    torch.ones(3, requires_grad=True).index_select(0, index).sum().backward()


BY_INDEX: dict[str, Callable[[torch.Tensor], object]] = {
    "scatter_add": lambda index: torch.zeros(3).scatter_add_(0, index, torch.ones(3)),
    "scatter_add of rows": lambda index: torch.zeros(3, 2).scatter_add(
        0, index[:, None].expand(-1, 2), torch.ones(3, 2)
    ),
    "scatter": lambda index: torch.zeros(3).scatter(0, index, torch.ones(3)),
    "index_add": lambda index: torch.zeros(3).index_add_(0, index, torch.ones(3)),
    "index_copy": lambda index: torch.zeros(3).index_copy(0, index, torch.ones(3)),
    "index_put": lambda index: torch.zeros(3, 2).index_put_((index, index % 2), torch.ones(3)),
    "put": lambda index: torch.zeros(3).put_(index, torch.ones(3)),
    "gather": gather_backward,
    "index_select": index_select_backward,
}


@pytest.mark.parametrize("write", BY_INDEX.values(), ids=BY_INDEX)
def test_writes_to_one_place_are_found(write: Callable[[torch.Tensor], object]) -> None:
    for index, found in ((TWICE, 1), (ONCE, 0)):
        with Operators() as operators:
            write(index)
        assert len(operators.nondeterministic) == found, operators.all


OTHERS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "cumsum": (lambda: torch.ones(3).cumsum(0), lambda: torch.ones(3).int().cumsum(0)),
    "bincount": (lambda: TWICE.bincount(torch.ones(3)), lambda: TWICE.bincount()),
    "median": (lambda: torch.ones(3).median(0), lambda: torch.ones(3).median()),
    "histc": (lambda: torch.ones(3).histc(), lambda: torch.ones(3).sum()),
    "scatter": (lambda: torch.zeros(3).scatter(0, TWICE, torch.ones(3)), lambda: torch.zeros(3).scatter(0, TWICE, 1.0)),
    "index_put": (
        lambda: torch.zeros(3).index_put_((TWICE,), torch.ones(3)),
        lambda: torch.zeros(3).index_put_((TWICE,), torch.ones(3), accumulate=True),
    ),
    "embedding": (
        lambda: torch.nn.functional.embedding(TWICE, torch.ones(3, 2, requires_grad=True)).sum().backward(),
        lambda: torch.nn.functional.embedding(TWICE, torch.ones(3, 2)),
    ),
}


@pytest.mark.parametrize(("varying", "same"), OTHERS.values(), ids=OTHERS)
def test_conditions_are_those_documented(varying: Callable[[], object], same: Callable[[], object]) -> None:
    for call, found in ((varying, 1), (same, 0)):
        with Operators() as operators:
            call()
        assert len(operators.nondeterministic) == found, operators.all
