"""Routers whose choices come from a synthetic workload (`--moe-router-force-workload`), so that imbalance repeats.

A choice depends on the workload, the seed, the step and the token's place in the global batch alone, so every layout
sees the same logical workload. megatron-core's own hook for decided choices is used, its router replay: the chosen
experts replace the top-k, while probabilities, z-loss and auxiliary losses remain those of the router's logits.

Shape suffixes: T tokens of one router call, K choices per token, E logical experts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_balance.workloads.workloads import workload_choices


@dataclass(frozen=True)
class Workload:
    """What the choices are derived from, besides the step and the token; layer number n (from 1) adds n to the seed."""

    name: str
    """A name in observe.workloads.WORKLOADS."""

    seed: int


@dataclass(frozen=True)
class BatchPart:
    """Which tokens of a global batch one rank's routers see."""

    seq_length: int
    """Tokens per sample, whole."""

    data_rank: int
    data_ranks: int
    """Consecutive microbatches of samples go to consecutive data-parallel ranks."""

    sequence_rank: int = 0
    sequence_ranks: int = 1
    """Where they route other tokens, each tensor-parallel rank has an equal, contiguous part of every sequence."""

    @classmethod
    def of(cls, groups: ProcessGroupCollection, seq_length: int, divided: bool) -> "BatchPart":
        """This rank's part; `divided`: tensor-parallel ranks route a part of each sequence each."""
        split = (groups.tp.rank(), groups.tp.size()) if divided else (0, 1)
        return cls(seq_length, groups.dp.rank(), groups.dp.size(), *split)

    def samples(self, tokens: int) -> int:
        """Samples in a microbatch of which this rank has so many tokens."""
        return tokens * self.sequence_ranks // self.seq_length

    def token_ranges(self, microbatch: int, samples: int) -> list[range]:
        """For each sample of a microbatch, the indices of this rank's tokens among all of the global batch.

        Args:
            microbatch: its number in the iteration, from 0.
            samples: `--micro-batch-size`.
        """
        length = self.seq_length // self.sequence_ranks
        first = (microbatch * self.data_ranks + self.data_rank) * samples
        starts = [(first + i) * self.seq_length + self.sequence_rank * length for i in range(samples)]
        return [range(start, start + length) for start in starts]


class ForcedChoices(RouterReplay):
    """The decided choices of one router.

    Within an iteration a router meets the microbatches in order, once in every kind of pass: with gradients, without
    (the first pass of recomputation, or a repetition), and in evaluation, which goes round the same microbatches.
    """

    def __init__(
        self,
        router: TopKRouter,
        workload: Workload,
        part: BatchPart,
        step: Callable[[], int],
        microbatches: Callable[[], int],
    ) -> None:
        # Not the base's constructor: it adds every instance to a list that nothing ever shortens
        assert router.layer_number is not None
        self.router, self.part = router, part
        self.workload, self.seed = workload.name, workload.seed + router.layer_number
        self.step, self.microbatches = step, microbatches
        self._calls: Counter[str] = Counter()
        self._calls_of_step: int | None = None

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The scores [T, K] of the chosen experts, and these [T, K], for `scores` [T, E].

        Tokens are in the router's order: sequence positions, and for each of them the samples.
        """
        step, total = self.step(), self.microbatches()
        microbatch = self._next_call(step) % total
        samples = self.part.samples(len(scores))
        tokens = total * self.part.data_ranks * samples * self.part.seq_length
        choices = [
            workload_choices(self.workload, scores.shape[1], topk, indices, tokens, self.seed, step)
            for indices in self.part.token_ranges(microbatch, samples)
        ]
        choices_TK = torch.from_numpy(np.stack(choices, axis=1).reshape(-1, topk)).to(scores.device)
        return scores.gather(1, choices_TK), choices_TK

    def _next_call(self, step: int) -> int:
        """How many calls of this kind the iteration has had before."""
        if step != self._calls_of_step:
            self._calls, self._calls_of_step = Counter(), step
        kind = "evaluation" if not self.router.training else "first" if not torch.is_grad_enabled() else "gradients"
        self._calls[kind] += 1
        return self._calls[kind] - 1


def force_routing(
    model: Sequence[torch.nn.Module],
    workload: Workload,
    part: BatchPart,
    step: Callable[[], int],
    microbatches: Callable[[], int],
) -> None:
    """Make all routers of `model` choose by the workload, K different experts for each token.

    Args:
        step: the iteration in progress, from 0; a resumed run goes on with its iteration's workload.
        microbatches: of the iteration in progress, on each data-parallel rank.

    Raises:
        ValueError: a router that does not let its choices be decided.
    """
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                _refuse(module, workload)
                module.router_replay = ForcedChoices(module, workload, part, step, microbatches)


def _refuse(router: TopKRouter, workload: Workload) -> None:
    flag = f"--moe-router-force-workload {workload.name}"
    if router.config.moe_router_fusion:
        raise ValueError(f"{flag}: --moe-router-fusion cannot be told what to choose; leave one of them out")
    if router.routing_type in ("sinkhorn", "quantile_balancing"):
        raise ValueError(
            f"{flag}: --moe-router-load-balancing-type {router.routing_type} cannot be told what to choose; use none"
        )
    if router.router_replay is not None:
        raise ValueError(f"{flag}: --moe-enable-routing-replay decides the choices already; leave one of them out")
