"""How often the host waits, and what it queues: compared with tests/golden/waits and work, which `waits.py` writes."""

from pathlib import Path

import pytest

from tests.hostcuda.runs import watched
from tests.hostcuda.waits import (
    CASES,
    COLUMNS,
    GOLDEN,
    KINDS,
    OPTIMIZER,
    PLAIN,
    SIZES,
    WORLD_SIZE,
    golden,
    growth,
    texts,
)
from tests.variants import variants

QUICK = ("bf16", "transformer_engine")


@pytest.mark.parametrize("name", variants([*CASES], QUICK))
def test_the_host_waits_as_often_and_queues_as_much_as_it_did(device_ranks, name: str) -> None:
    """A change that removes waits or work must regenerate the tables."""
    case = CASES[name]
    expected = {kind: golden(kind, name).read_text() for kind in KINDS}
    assert texts(device_ranks(WORLD_SIZE, case.machine), case) == expected


def test_what_flags_ask_for_is_read_without_another_wait(device_ranks) -> None:
    plain = f"{PLAIN} --bf16 {OPTIMIZER}"
    asked = "--log-params-norm --log-num-zeros-in-grad --moe-per-layer-logging"
    ranks = device_ranks(WORLD_SIZE)
    usual, more = (ranks.run(watched, f"{plain} {flags}", 2)[0] for flags in ("", asked))
    assert more.synchronizations == usual.synchronizations and not more.complaints
    assert more.curve == usual.curve


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "blockwise", "exact", "two_scales"])
def test_pairs_add_no_wait(device_ranks, name: str) -> None:
    flags = f"{PLAIN} {CASES[name].flags} --global-batch-size {6 * WORLD_SIZE}"
    ranks = device_ranks(WORLD_SIZE)
    alone, paired = (ranks.run(watched, f"{flags} {more}", 2)[0] for more in ("", "--overlap-moe-expert-parallel-comm"))
    assert not paired.complaints
    assert sum(paired.synchronizations.values()) == sum(alone.synchronizations.values())


DOCUMENTED = Path(__file__).parents[2] / "docs" / "measurements" / "host_waits.md"


@pytest.mark.parametrize("name", CASES)
def test_the_documented_sums_are_those_of_the_tables(name: str) -> None:
    *_, last = (GOLDEN / "waits" / f"{name}_0.16.txt").read_text().splitlines()
    sums = last.replace(".", "0").split()[: len(COLUMNS)]
    assert f"| {' | '.join(sums)} |" in DOCUMENTED.read_text()


def test_waits_grow_with_layers_and_microbatches() -> None:
    """3 waits per layer and microbatch, 5 per layer, 7 per microbatch, 11 per iteration."""
    key = ("op", None)
    found = {size: {key: 3 * size[0] * size[1] + 5 * size[0] + 7 * size[1] + 11} for size in SIZES}
    assert growth(found) == {key: (3, 5, 7, 11)}
