"""The covering array of layouts, and the layouts that CI trains."""

import itertools

from megatron_balance.planning.policies import registered
from tests import layouts
from tests.layouts import Layout

CHOICES = {"a": ("a1", "a2", "a3"), "b": ("b1", "b2"), "c": ("c1", "c2", "c3", "c4"), "d": ("d1", "d2")}


def is_possible(layout: Layout) -> bool:
    """Exclude a2 with b2, and one triple of choices whose pairs are all possible."""
    return not {"a2", "b2"} <= {*layout.values()} and not {"a3", "c4", "d2"} <= {*layout.values()}


def test_any_two_choices_that_may_be_together_are_so() -> None:
    first = {"a": "a1", "b": "b1", "c": "c1", "d": "d2"}
    array, pairs = layouts.covering(CHOICES, is_possible, [first])
    assert array[0] == first
    assert all(is_possible(layout) and list(layout) == list(CHOICES) for layout in array)
    possible = [
        layout
        for names in itertools.product(*CHOICES.values())
        if is_possible(layout := dict(zip(CHOICES, names, strict=True)))
    ]
    wanted = {frozenset(pair) for layout in possible for pair in itertools.combinations(layout.items(), 2)}
    assert {*pairs} == wanted
    assert wanted == {frozenset(pair) for layout in array for pair in itertools.combinations(layout.items(), 2)}
    assert len(array) <= 15, "12 at least: three times four choices"
    assert layouts.covering(CHOICES, is_possible, [first]) == (array, pairs)


def test_ci_trains_what_is_likely_to_go_wrong() -> None:
    quick = layouts.QUICK.values()
    assert all(map(layouts.is_possible, quick))
    assert {layout["policy"] for layout in quick} == {*registered()}
    assert {"PP2", "PP2-interleaved"} <= {layout["stages"] for layout in quick}
    assert {"TP2"} <= {layout["tensor"] for layout in quick}
    assert {layouts.world_size(layout) for layout in quick} == {4, 8}
    for name in ("lend", "transfer", "ETP2", "blocking"):
        assert any({name, *layouts.GATHER} <= {*layout.values()} for layout in quick), name
    assert any({"2-replicas", *layouts.GATHER} <= {*layout.values()} for layout in quick)


def test_the_reference_has_nothing_that_is_optional() -> None:
    layout = layouts.layout_of("TP2", "PP2", "demi", "blockwise", "transfer", *layouts.GATHER, "3-chunks")
    flags = layouts.reference(layout)
    assert "--balance" not in flags and "--overlap" not in flags and "--moe-comm" not in flags
    assert "--pipeline-model-parallel-size 2" in flags and "--sequence-parallel" in flags
