"""observe/routing.py: the exact format, which passes are recorded, and resumed traces."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_balance.observe.routing import RoutingTrace
from megatron_balance.workloads.forced_routing import BatchPart

RECORD = (
    '{"step": 4, "stage": "pre_dispatch", "block": "decoder", "layer": 2, "rank": 3, "num_tokens": 2, "topk": 2, '
    '"num_experts": 5, "seq_length": 1, "samples": [8, 10], "positions": [[0, 1]], "top_indices": [[1, 4], [0, 4]]}\n'
)
PART = BatchPart(seq_length=1, data_rank=1, data_ranks=2)


def open_trace(directory: Path, step: Callable[[], int] = lambda: 4, first_step: int = 0) -> RoutingTrace:
    return RoutingTrace([], directory, 3, PART, step=step, consumed=lambda: 6, first_step=first_step)


def routing_map(*choices: tuple[int, ...]) -> torch.Tensor:
    chosen = torch.zeros(len(choices), 5, dtype=torch.bool)
    for token, experts in enumerate(choices):
        chosen[token, list(experts)] = True
    return chosen


def route(trace: RoutingTrace, map_TE: torch.Tensor, layer: int = 3, topk: int = 2, training: bool = True) -> None:
    """Make one router call, as its forward hook sees it."""
    router = SimpleNamespace(layer_number=layer, topk=topk, training=training)
    trace._note(router, None, (map_TE.float(), map_TE))


def path_in(directory: Path, rank: int = 3) -> Path:
    return directory / f"router_trace_rank{rank}.jsonl"


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write_steps(directory: Path, numbers: range, first_step: int = 0) -> None:
    now = iter(numbers)
    trace = open_trace(directory, lambda: next(now), first_step)
    for _ in numbers:
        route(trace, routing_map((1, 4), (0, 4)))
        trace.flush()
    trace.flush(last=True)


def test_format(tmp_path: Path) -> None:
    trace = open_trace(tmp_path / "new" / "directory")
    route(trace, routing_map((4, 1), (0, 4)))
    assert path_in(tmp_path / "new" / "directory").read_text() == ""
    trace.flush()
    assert path_in(tmp_path / "new" / "directory").read_text() == RECORD
    route(trace, routing_map((2,)), layer=1, topk=1)
    trace.flush(last=True)
    last = path_in(tmp_path / "new" / "directory").read_text().removeprefix(RECORD)
    assert (
        last.count("\n") == 1
        and '"layer": 0, "rank": 3, "num_tokens": 1, "topk": 1, ' in last
        and '"top_indices": [[2]]' in last
    )


def test_only_training_passes_with_gradients(tmp_path: Path) -> None:
    trace = open_trace(tmp_path)
    route(trace, routing_map((0, 1)), training=False)
    with torch.no_grad():
        route(trace, routing_map((0, 1)))
    trace.flush(last=True)
    assert path_in(tmp_path).read_text() == ""


@pytest.mark.parametrize(
    "map_TE",
    [routing_map((0, 1), (2,)), routing_map((0, 1, 2), (3,)), routing_map((0, 1, 2), (0, 1))],
    ids=["dropped", "as many in total", "padded"],
)
def test_tokens_without_exactly_topk_experts_leave_no_record(tmp_path: Path, map_TE: torch.Tensor) -> None:
    trace = open_trace(tmp_path)
    route(trace, map_TE)
    route(trace, routing_map((1, 4), (0, 4)))
    trace.flush(last=True)
    # The first microbatch is missing
    assert path_in(tmp_path).read_text() == RECORD.replace("[8, 10]", "[12, 14]")


def test_a_rank_without_tokens(tmp_path: Path) -> None:
    trace = open_trace(tmp_path)
    route(trace, routing_map())
    trace.flush(last=True)
    assert json.loads(path_in(tmp_path).read_text())["top_indices"] == []


def test_a_new_run_starts_an_empty_trace(tmp_path: Path) -> None:
    write_steps(tmp_path, range(3))
    write_steps(tmp_path, range(2))
    assert steps(path_in(tmp_path)) == [0, 1]


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    write_steps(tmp_path, range(12))
    write_steps(tmp_path, range(9, 11), first_step=9)
    assert steps(path_in(tmp_path)) == list(range(11))
    write_steps(tmp_path, range(11, 13), first_step=11)
    assert steps(path_in(tmp_path)) == list(range(13))


@pytest.mark.parametrize("damage", [lambda text: text[:-1], lambda text: text + '{"step": 5', lambda text: text + "\n"])
def test_a_line_that_was_cut_off_goes_away(tmp_path: Path, damage: Callable[[str], str]) -> None:
    write_steps(tmp_path, range(5))
    whole = path_in(tmp_path).read_text()
    path_in(tmp_path).write_text(damage(whole))
    write_steps(tmp_path, range(0), first_step=9)
    kept = path_in(tmp_path).read_text()
    assert whole.startswith(kept) and steps(path_in(tmp_path)) in ([0, 1, 2, 3], [0, 1, 2, 3, 4])
    assert not kept or kept.endswith("\n")
