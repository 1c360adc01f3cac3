"""workloads/replay.py: any layout reads the traces of any other; refusals. Runs are in distributed/test_replay.py."""

import json
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.observe.routing import RoutingTrace
from megatron_balance.workloads.forced_routing import BatchPart
from megatron_balance.workloads.replay import RecordedChoices, ReplayedModel

SEQUENCE = 8
EXPERTS = 5
TOPK = 2
BATCH = 8
"""Samples of a global batch."""

MODEL = ReplayedModel(layers=frozenset({1, 3}), num_experts=EXPERTS, topk=TOPK, seq_length=SEQUENCE)
FLAG = "^--moe-routing-replay-path "


class Layout(SimpleNamespace):
    data: int
    context: int
    sequence: int
    micro: int
    """Samples of a microbatch."""

    def parts(self) -> Iterator[BatchPart]:
        for data, context, sequence in product(range(self.data), range(self.context), range(self.sequence)):
            yield BatchPart(
                seq_length=SEQUENCE,
                data_rank=data,
                data_ranks=self.data,
                context_rank=context,
                context_ranks=self.context,
                sequence_rank=sequence,
                sequence_ranks=self.sequence,
            )

    @property
    def microbatches(self) -> int:
        return BATCH // (self.data * self.micro)


layouts = st.builds(
    Layout,
    data=st.sampled_from([1, 2]),
    context=st.sampled_from([1, 2]),
    sequence=st.sampled_from([1, 2]),
    micro=st.sampled_from([1, 2, 4]),
)


def chosen(layer: int, step: int) -> np.ndarray:
    """Return all choices of an iteration, [BATCH * SEQUENCE, K], ascending."""
    random = np.random.default_rng([layer, step])
    return np.sort([random.permutation(EXPERTS)[:TOPK] for _ in range(BATCH * SEQUENCE)], axis=1)


def tokens_of(part: BatchPart, layout: Layout, microbatch: int) -> np.ndarray:
    """Return the global-batch indices of a microbatch's tokens in the router's order: by position, then by sample."""
    return part.tokens(microbatch, layout.micro).T.ravel()


def record(directory: Path, layout: Layout, steps: range = range(2)) -> None:
    """Write the traces of all ranks of a layout."""
    for rank, part in enumerate(layout.parts()):
        now = [0]
        trace = RoutingTrace(
            [], directory, rank, part, step=partial(now.__getitem__, 0), consumed=lambda now=now: now[0] * BATCH
        )
        for now[0] in steps:
            for microbatch, layer in product(range(layout.microbatches), sorted(MODEL.layers)):
                map_TE = torch.zeros(
                    SEQUENCE // layout.context // layout.sequence * layout.micro, EXPERTS, dtype=torch.bool
                )
                own_TK = chosen(layer, now[0])[tokens_of(part, layout, microbatch)]
                map_TE.scatter_(1, torch.from_numpy(own_TK), True)
                router: Any = SimpleNamespace(layer_number=layer, topk=TOPK, training=True)
                trace._note(router, None, (map_TE.float(), map_TE))
            trace.flush()


def replayed(directory: Path, tokens: np.ndarray, layer: int = 3, step: int = 1, batch: int = BATCH) -> np.ndarray:
    recorded = RecordedChoices(directory, MODEL, sorted(MODEL.layers), consumed=lambda: step * batch)
    shape = {"total_tokens": BATCH * SEQUENCE, "num_experts": EXPERTS, "topk": TOPK}
    return recorded(tokens, layer=layer, step=step, **shape)


@settings(max_examples=10)
@given(written=layouts, read=layouts)
def test_every_layout_reads_what_any_other_wrote(written: Layout, read: Layout) -> None:
    with TemporaryDirectory() as directory:
        record(Path(directory), written)
        for part in read.parts():
            recorded = RecordedChoices(Path(directory), MODEL, [1, 3], consumed=lambda: BATCH)
            tokens = np.concatenate([tokens_of(part, read, microbatch) for microbatch in range(read.microbatches)])
            for layer in (1, 3):
                shape = {"total_tokens": BATCH * SEQUENCE, "num_experts": EXPERTS, "topk": TOPK}
                found_TK = recorded(tokens, layer=layer, step=1, **shape)
                assert np.array_equal(found_TK, chosen(layer, 1)[tokens])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    record(tmp_path, Layout(data=2, context=1, sequence=1, micro=2))
    return tmp_path


def test_iterations(trace: Path) -> None:
    recorded = RecordedChoices(trace, MODEL)
    recorded.check_iterations(0, 2)
    recorded.check_end(2)
    with pytest.raises(ValueError, match=f"{FLAG}.*has iterations 1 to 2, and lacks 3; .*--train-iters"):
        recorded.check_iterations(1, 4)
    with pytest.raises(ValueError, match="lacks 3"):
        recorded.check_end(3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_experts": 6}, "--num-experts 5, and this run has 6"),
        ({"topk": 1}, "--moe-router-topk 2, and this run has 1"),
        ({"seq_length": 4}, "--seq-length 8, and this run has 4"),
        ({"layers": frozenset({1, 2, 3})}, r"layers \[1, 3\], but layers \[1, 2, 3\] of this run"),
    ],
)
def test_another_model(trace: Path, change: dict, told: str) -> None:
    with pytest.raises(ValueError, match=f"{FLAG}.*{told}"):
        RecordedChoices(trace, ReplayedModel(**(vars(MODEL) | change)))


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{FLAG}.*has no routing trace; .*--moe-routing-trace-path"):
        RecordedChoices(tmp_path, MODEL)


def test_a_trace_of_megatron_lm(tmp_path: Path) -> None:
    line = {"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 0, "rank": 0, "num_tokens": 1, "topk": 2}
    (tmp_path / "router_trace_rank0.jsonl").write_text(json.dumps(line | {"top_indices": [[0, 1]]}) + "\n")
    with pytest.raises(ValueError, match=f"{FLAG}.*records without .*samples, positions"):
        RecordedChoices(tmp_path, MODEL)


def test_a_line_that_was_cut_off_counts_as_missing(trace: Path) -> None:
    path = trace / "router_trace_rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    tokens = np.arange(BATCH * SEQUENCE)
    assert np.array_equal(replayed(trace, tokens, step=0), chosen(3, 0))
    with pytest.raises(ValueError, match="lacks iteration 2, layer 3, sample 14, token 0"):
        replayed(trace, tokens)


@pytest.mark.parametrize("row", [[1, 1], [1, EXPERTS], [1, 2, 3]])
def test_a_damaged_record(trace: Path, row: list[int]) -> None:
    path = trace / "router_trace_rank0.jsonl"
    *lines, last = path.read_text().splitlines()
    record = json.loads(last)
    record["top_indices"] = [row for _ in record["top_indices"]]
    path.write_text("\n".join([*lines, json.dumps(record), ""]))
    with pytest.raises(ValueError, match=f"{FLAG}.* a record of iteration 2 is damaged"):
        replayed(trace, np.arange(BATCH * SEQUENCE))


def test_a_rank_without_a_file(trace: Path) -> None:
    (trace / "router_trace_rank0.jsonl").unlink()
    with pytest.raises(ValueError, match="lacks iteration 2, layer 3, sample 8, token 0"):
        replayed(trace, np.arange(BATCH * SEQUENCE))


def test_another_batch_size(trace: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks iteration 2, layer 3, sample 16, .*--global-batch-size"):
        replayed(trace, np.arange(BATCH * SEQUENCE), batch=2 * BATCH)


def test_traces_of_two_runs_in_one_directory(trace: Path) -> None:
    lines = (trace / "router_trace_rank0.jsonl").read_text().splitlines()
    changed = json.loads(lines[-1])
    changed["top_indices"] = [sorted((expert + 1) % EXPERTS for expert in row) for row in changed["top_indices"]]
    (trace / "router_trace_rank9.jsonl").write_text(json.dumps(changed) + "\n")
    with pytest.raises(ValueError, match=f"{FLAG}.*different choices for layer 3 .*several runs"):
        replayed(trace, np.arange(BATCH * SEQUENCE))
