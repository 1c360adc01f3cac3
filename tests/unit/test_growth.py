"""tools/bench/growth.py at a small size."""

import pytest

import growth


def test_tables_have_a_row_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [*growth.plans([4], 1)]
    assert [row.split()[:2] for row in found[1:]] == [["4", name] for name in growth.POLICIES]
    assert all(int(row.split()[3]) <= int(row.split()[4]) for row in found[1:])
    assert [row.split()[:2] for row in [*growth.split([4, 8], 1)][1:]] == [["4", "256"], ["8", "256"]]
    monkeypatch.setattr(growth, "SCHEDULES", ((2, 3),))
    assert [row.split()[:3] for row in [*growth.schedule([], 1)][1:]] == [["2", "3", "56"]]
