"""Every accepted pair of features trains like a run without them."""

import pytest

from tests import features
from tests.distributed import runs
from tests.distributed.runs import deviation

ITERATIONS = 3

TOGETHER = [pair for pair in features.PAIRS if not features.alternatives(*pair) and features.refusal(*pair) is None]


@pytest.mark.slow
@pytest.mark.parametrize("pair", TOGETHER, ids="-".join)
def test_pairs_follow_the_plain_run(ranks, curve_of, profiles, pair: tuple[str, str]) -> None:
    flags = features.flags_of(*pair)
    world_size = features.world_size(*pair)
    balanced = "--balance-policy" in flags
    if balanced:
        flags += f" --balance-profile {profiles[2]}"
    curve, hosts = ranks(world_size).run(runs.train_hosts, flags, ITERATIONS)[0]
    assert (sum(hosts) > 0) == balanced
    wanted = curve_of(features.reference(*pair), ITERATIONS, world_size)
    assert deviation(curve, wanted) <= (2e-2 if "codec" in pair else 1e-5)
