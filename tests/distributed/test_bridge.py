"""Balancing inside Megatron-Bridge's own training loop."""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.distributed.test_integrate import launched

PROGRAM = Path(__file__).with_name("bridge.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("megatron.bridge") is None, reason="scripts/test_bridge.sh installs it")
def test_megatron_bridge_learns_the_same() -> None:
    plain, balanced = (launched(PROGRAM, flags) for flags in ("--moe-layer-impl megatron", "--balance-policy top2"))
    losses = [re.findall(r"lm loss(?: value)?: (\S+)", text) for text in (plain, balanced)]
    # Six iterations, validation and test
    assert len(losses[0]) == 8 and losses[0] == losses[1]
    hosts = re.findall(r"balancing in iteration .* hosts added: (\d+)", balanced)
    assert len(hosts) == 3 and "0" not in hosts
