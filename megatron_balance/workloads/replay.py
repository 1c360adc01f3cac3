"""Routers that repeat the choices of an earlier run (`--moe-routing-replay-path`).

The choices are those that `--moe-routing-trace-path` recorded. A record names its tokens by sample and position
(observe/routing.py), so the replay may have another layout: each rank reads the tokens that it has now, of its layers.
Scores, probabilities and losses are computed as usual, so gradients reach the scores of the repeated experts.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_balance.files.reading import check_regular, shown
from megatron_balance.workloads.forced_routing import BatchPart, ForcedChoices, routers_to_force

FLAG = "--moe-routing-replay-path"

ENTRIES = ("step", "layer", "topk", "num_experts", "seq_length", "samples", "positions")
"""Entries of a record that tell which choices it has. The last three are not in traces of Megatron-LM."""

ChoiceTables = dict[int, dict[int, np.ndarray]]
"""Layer from 1 -> sample -> experts [seq_length, K]; the number of experts stands where no record was found."""


@dataclass(frozen=True, kw_only=True)
class ReplayedModel:
    """The settings of a run that its recorded choices must fit."""

    layers: frozenset[int]
    """Numbers of the MoE layers of the whole model, from 1."""
    num_experts: int
    topk: int
    seq_length: int

    def check(self, record: dict[str, Any]) -> None:
        """Raise ValueError if a record is one of a run with other settings."""
        for flag, name in (
            ("--num-experts", "num_experts"),
            ("--moe-router-topk", "topk"),
            ("--seq-length", "seq_length"),
        ):
            if record[name] != getattr(self, name):
                recorded = f"was recorded with {flag} {shown(record[name])}"
                raise ValueError(f"{recorded}, and this run has {getattr(self, name)}; use the same number")


class _Lines(NamedTuple):
    """The lines of one iteration in one file: the bytes from `start` to `end`."""

    path: Path
    start: int
    end: int


class RecordedChoices:
    """The choices in a directory of traces, as an `ExpertChooser`. It reads the choices of an iteration when they are
    first needed, and keeps them until the next one.

    Args:
        layers: numbers of the layers whose choices this rank needs.
        consumed: returns the number of samples that all earlier iterations have read.

    Raises:
        ValueError: there is no trace, it is damaged, or its run had other settings than `model`.
    """

    def __init__(
        self,
        directory: Path,
        model: ReplayedModel,
        layers: Sequence[int] = (),
        consumed: Callable[[], int] = int,
    ) -> None:
        self.flag = f"{FLAG} {directory}"
        self.model = model
        self.layers = frozenset(layers)
        self.consumed = consumed
        self._lines = self._index(directory)
        self._loaded: tuple[int, ChoiceTables] | None = None
        """The latest iteration that was needed, and its choices."""
        found = {record["layer"] + 1 for record, _ in self._records(min(self._lines))}
        if found != model.layers:
            here = f"layers {sorted(model.layers)} of this run have experts"
            raise ValueError(f"{self.flag}: has choices for layers {sorted(found)}, but {here}; replay the same model")

    def check_iterations(self, first: int, end: int) -> None:
        """Raise ValueError unless all iterations from `first` to before `end` are recorded, counted from 0."""
        missing = next((step for step in range(first, end) if step not in self._lines), None)
        if missing is None:
            return
        has = f"has iterations {min(self._lines) + 1} to {max(self._lines) + 1}, and lacks {missing + 1}"
        raise ValueError(f"{self.flag}: {has}; record it, or train only those (--load, --train-iters)")

    def check_end(self, end: int) -> None:
        """Raise ValueError unless all iterations from the first recorded one to before `end` are recorded."""
        self.check_iterations(min(end - 1, *self._lines), end)

    def __call__(
        self, tokens: np.ndarray, *, layer: int, step: int, total_tokens: int, num_experts: int, topk: int
    ) -> np.ndarray:
        """Return the recorded experts of tokens, [T, K].

        ValueError: a token's choices are missing; the message names it.
        """
        sample_T, position_T = np.divmod(tokens, self.model.seq_length)
        samples, place_T = np.unique(sample_T + self.consumed(), return_inverse=True)
        if self._loaded is None or self._loaded[0] != step:
            self._loaded = step, self._load(step, set(samples.tolist()))
        tables = self._loaded[1][layer]
        absent_SK = self._empty()
        choices_TK = np.stack([tables.get(sample, absent_SK) for sample in samples.tolist()])[place_T, position_T]
        missing_T = (choices_TK == num_experts).any(1)
        if missing_T.any():
            token = int(missing_T.argmax())
            where = f"iteration {step + 1}, layer {layer}, sample {samples[place_T[token]]}, token {position_T[token]}"
            reasons = "another --global-batch-size or --rampup-batch-size, dropped tokens, or a missing file of a rank"
            raise ValueError(f"{self.flag}: lacks {where} ({reasons}); record the run again")
        return choices_TK

    def _index(self, directory: Path) -> dict[int, list[_Lines]]:
        """Return the lines of every iteration in all files, and check their entries."""
        paths = sorted(directory.glob("router_trace_rank*.jsonl"))
        lines: dict[int, list[_Lines]] = defaultdict(list)
        for path in paths:
            check_regular(path, FLAG)
            start = 0
            steps: dict[int, list[int]] = {}
            with path.open("rb") as file:
                for line in file:
                    end = start + len(line)
                    # The last line may be incomplete, if the run was killed
                    if line.endswith(b"\n"):
                        step = self._head(path, line)["step"]
                        steps[step] = [steps.get(step, [start])[0], end]
                    start = end
            for step, (start, end) in steps.items():
                lines[step].append(_Lines(path, start, end))
        if not lines:
            raise ValueError(f"{self.flag}: has no routing trace; record one with --moe-routing-trace-path")
        return dict(lines)

    def _head(self, path: Path, line: bytes) -> dict[str, Any]:
        """Return the entries of a line except the choices, which are its last entry."""
        try:
            record = json.loads(line.partition(b', "top_indices": ')[0] + b"}")
        except ValueError as error:
            raise ValueError(f"{self.flag}: {path.name} has a line that is no record; record the run again") from error
        if not isinstance(record, dict) or any(name not in record for name in ENTRIES):
            wants = f"records without {', '.join(ENTRIES)}, which --moe-routing-trace-path of this program writes"
            raise ValueError(f"{self.flag}: {path.name} has {wants}; record the run again")
        try:
            self.model.check(record)
        except ValueError as error:
            raise ValueError(f"{self.flag}: {error}") from error
        return record

    def _records(self, step: int) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Yield the records of an iteration without their choices, and their lines."""
        for path, start, end in self._lines.get(step, ()):
            with path.open("rb") as file:
                file.seek(start)
                while start < end:
                    line = file.readline()
                    start += len(line)
                    yield self._head(path, line), line

    def _load(self, step: int, samples: set[int]) -> ChoiceTables:
        """Return the choices of an iteration for this rank's layers and these samples."""
        model = self.model
        tables: ChoiceTables = {layer: {} for layer in self.layers}
        for record, line in self._records(step):
            first, end = record["samples"]
            own = samples.intersection(range(first, end))
            layer = record["layer"] + 1
            if layer not in tables or not own:
                continue
            positions = np.concatenate([np.arange(*run) for run in record["positions"]])
            choices_TK = np.array(json.loads(line)["top_indices"])
            if not self._are_choices(choices_TK, len(positions) * (end - first)):
                raise ValueError(f"{self.flag}: a record of iteration {step + 1} is damaged; record the run again")
            for sample in own:
                found_PK = choices_TK[sample - first :: end - first]
                table = tables[layer].setdefault(sample, self._empty())
                known_PK = table[positions]
                if ((known_PK != found_PK) & (known_PK != model.num_experts)).any():
                    where = f"layer {layer} and sample {sample} in iteration {step + 1}"
                    remedy = "the directory has traces of several runs; record one into an empty directory"
                    raise ValueError(f"{self.flag}: has different choices for {where}; {remedy}")
                table[positions] = found_PK
        return tables

    def _are_choices(self, choices_TK: np.ndarray, tokens: int) -> bool:
        """Return whether each of `tokens` tokens has K different experts, in ascending order."""
        if choices_TK.shape != (tokens, self.model.topk):
            return False
        inside = (choices_TK >= 0) & (choices_TK < self.model.num_experts)
        return bool(inside.all() and (np.diff(choices_TK, axis=1) > 0).all())

    def _empty(self) -> np.ndarray:
        """Return the table of a sample without records, [seq_length, K]."""
        model = self.model
        shape = model.seq_length, model.topk
        return np.full(shape, model.num_experts, dtype=np.min_scalar_type(model.num_experts))


class ReplayedChoices(ForcedChoices):
    """The recorded choices of one router in training. In evaluation, the router chooses by its scores."""

    usual: RouterReplay | None = None
    """Chooses in evaluation; None: megatron-core's top-k."""

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, *groups_and_default: Any, **_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [T, K] of the chosen experts, from high to low, and the experts [T, K]. The router also
        passes the number of groups of experts, the number of groups of a token, and its own top-k."""
        if not self.router.training:
            *groups, default = groups_and_default
            usual: Any = self.usual
            if usual is not None:
                return usual.get_replay_topk(scores, topk, *groups, default)
            return default(scores, topk, *groups)
        chosen_TK, choices_TK = super().get_replay_topk(scores, topk)
        # In the order of top-k, on which the last bit of a sum over the chosen experts depends
        choices_TK = choices_TK.gather(1, chosen_TK.argsort(dim=1, descending=True, stable=True))
        return scores.gather(1, choices_TK), choices_TK


def replay_routing(
    model: Sequence[torch.nn.Module],
    recorded: RecordedChoices,
    part: BatchPart,
    *,
    step: Callable[[], int],
    microbatches: Callable[[], int],
) -> None:
    """Make all routers of `model` repeat recorded choices in training; arguments as in `force_routing`.

    Raises:
        ValueError: a router cannot take given choices.
    """
    for router, decided in routers_to_force(model, recorded.flag):
        choices = ReplayedChoices(router, recorded, part, step=step, microbatches=microbatches, decided=decided)
        choices.usual = router.router_replay
        router.router_replay = choices
