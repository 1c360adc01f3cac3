"""Routers that choose experts by a synthetic workload (`--moe-router-force-workload`), so that imbalance repeats.

A choice depends only on the workload, the seed, the step and the token's index in the global batch, so every layout
sees the same logical workload. The hook is megatron-core's router replay: the chosen experts replace the top-k, while
probabilities, z-loss and auxiliary losses are still computed from the router's logits.
"""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from megatron_balance.device.recomputation import PassMemory
from megatron_balance.device.versions import number_of
from megatron_balance.job.groups import sequence_chunks
from megatron_balance.workloads.synthetic import workload_choices


@dataclass(frozen=True, kw_only=True)
class BatchPart:
    """The tokens of a global batch that one rank's routers see."""

    seq_length: int
    """Number of tokens of a whole sample."""
    data_rank: int
    data_ranks: int
    """Consecutive microbatches go to consecutive data-parallel ranks."""
    sequence_rank: int = 0
    sequence_ranks: int = 1
    """If tensor-parallel ranks route different tokens, each rank has an equal, contiguous part of them."""
    context_rank: int = 0
    context_ranks: int = 1
    """Each context-parallel rank has its `sequence_chunks` of every sequence."""

    @classmethod
    def of(cls, groups: ProcessGroupCollection, seq_length: int, divided: bool) -> "BatchPart":
        """Return this rank's part. `divided`: whether each tensor-parallel rank routes a part of each sequence."""
        return cls(
            seq_length=seq_length,
            data_rank=groups.dp.rank(),
            data_ranks=groups.dp.size(),
            sequence_rank=groups.tp.rank() if divided else 0,
            sequence_ranks=groups.tp.size() if divided else 1,
            context_rank=groups.cp.rank(),
            context_ranks=groups.cp.size(),
        )

    def samples(self, tokens: int) -> int:
        """Return the number of samples in a microbatch of which this rank has `tokens` tokens."""
        return tokens * self.sequence_ranks * self.context_ranks // self.seq_length

    def first_sample(self, microbatch: int, samples: int) -> int:
        """Return the global-batch index of the first of this rank's `samples` consecutive samples of a microbatch."""
        return (microbatch * self.data_ranks + self.data_rank) * samples

    def positions(self) -> np.ndarray:
        """Return the places in a sample of the tokens that this rank has of it, [tokens of a sample], in its order."""
        positions = np.arange(self.seq_length)
        if self.context_ranks > 1:
            chunks = np.split(positions, 2 * self.context_ranks)
            held = sequence_chunks(self.context_rank, self.context_ranks)
            positions = np.concatenate([chunks[chunk] for chunk in held])
        return np.split(positions, self.sequence_ranks)[self.sequence_rank]

    def tokens(self, microbatch: int, samples: int) -> np.ndarray:
        """Return the global-batch indices of this rank's tokens of a microbatch, [samples, tokens of each]."""
        first = self.first_sample(microbatch, samples)
        return np.arange(first, first + samples)[:, None] * self.seq_length + self.positions()


class ExpertChooser(Protocol):
    """Returns the experts of tokens, [T, K], K different ones for each token.

    `tokens` [T] are indices among the `total_tokens` of the global batch of iteration `step`, from 0; `layer` is the
    number of the router's layer, from 1.
    """

    def __call__(
        self, tokens: np.ndarray, *, layer: int, step: int, total_tokens: int, num_experts: int, topk: int
    ) -> np.ndarray: ...


def by_workload(workload: str, seed: int) -> ExpertChooser:
    """Return the ExpertChooser of a synthetic workload, a name in workloads.synthetic.NAMES."""
    return lambda tokens, *, layer, **sizes: workload_choices(workload, tokens=tokens, seed=seed + layer, **sizes)


class ForcedChoices(RouterReplay):
    """The forced choices of one router.

    In each iteration, a router is called for all microbatches in order, once for every kind of pass: with gradients,
    without gradients (recomputation's first pass, or the search for a fault), and in evaluation, which cycles through
    the same microbatches. Recomputation uses the microbatch of its first pass again.
    """

    def __init__(
        self,
        router: TopKRouter,
        choose: ExpertChooser,
        part: BatchPart,
        *,
        step: Callable[[], int],
        microbatches: Callable[[], int],
        decided: Callable[[], list[int]] = list,
    ) -> None:
        """`decided` returns the microbatches of the current pass, for recomputation (`PassMemory.of`)."""
        # Do not call the base's constructor: it adds every instance to a global list that is never cleared
        self.router = router
        self.choose = choose
        self.part = part
        self.step = step
        self.microbatches = microbatches
        self.decided = decided
        self._calls: Counter[str] = Counter()
        self._calls_of_step: int | None = None
        self._drawn: tuple[int, ...] | None = None
        """Arguments of `_draw` that led to `_choices`."""

    def get_replay_topk(
        self, scores: torch.Tensor, topk: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores [T, K] of the chosen experts, and the experts [T, K], for `scores` [T, E].

        The router orders tokens by sequence position, then by sample.
        """
        step = self.step()
        total = self.microbatches()
        microbatch = self._microbatch(step, total)
        drawn = step, total, self.part.samples(len(scores)), scores.shape[1], topk
        if drawn != self._drawn:
            self._choices = self._draw(*drawn)
            self._drawn = drawn
        choices_TK = torch.from_numpy(self._choices[microbatch].astype(np.int64)).to(scores.device)
        return scores.gather(1, choices_TK), choices_TK

    def _draw(self, step: int, microbatches: int, samples: int, num_experts: int, topk: int) -> np.ndarray:
        """Return this rank's choices in an iteration, [microbatches, T, K], in the smallest type that holds them."""
        indices = np.array([self.part.tokens(microbatch, samples) for microbatch in range(microbatches)])
        choices = self.choose(
            indices.swapaxes(1, 2).ravel(),
            layer=number_of(self.router),
            step=step,
            total_tokens=microbatches * self.part.data_ranks * samples * self.part.seq_length,
            num_experts=num_experts,
            topk=topk,
        )
        return choices.reshape(microbatches, -1, topk).astype(np.min_scalar_type(num_experts))

    def _microbatch(self, step: int, total: int) -> int:
        """Return the microbatch of a call, and count the call."""
        decided = self.decided()
        if decided and torch.is_grad_enabled():
            return decided.pop()
        if step != self._calls_of_step:
            self._calls = Counter()
            self._calls_of_step = step
        kind = "evaluation" if not self.router.training else "first" if not torch.is_grad_enabled() else "gradients"
        microbatch = self._calls[kind] % total
        self._calls[kind] += 1
        if not torch.is_grad_enabled():
            decided.append(microbatch)
        return microbatch


def force_routing(
    model: Sequence[torch.nn.Module],
    workload: str,
    part: BatchPart,
    *,
    seed: int,
    step: Callable[[], int],
    microbatches: Callable[[], int],
) -> None:
    """Make all routers of `model` choose by the workload: K different experts for each token.

    Args:
        workload: a name in workloads.synthetic.NAMES.
        seed: MoE layer number n (from 1) adds n to it.
        step: returns the iteration in progress, from 0; a resumed run continues with the workload of its iteration.
        microbatches: returns the number of microbatches per data-parallel rank in the iteration in progress.

    Raises:
        ValueError: the choices of a router cannot be forced.
    """
    choose = by_workload(workload, seed)
    for router, decided in routers_to_force(model, f"--moe-router-force-workload {workload}"):
        if router.router_replay is not None:
            raise ValueError(
                f"--moe-router-force-workload {workload}: --moe-enable-routing-replay already gives the choices; "
                "leave one of them out"
            )
        router.router_replay = ForcedChoices(
            router, choose, part, step=step, microbatches=microbatches, decided=decided
        )


def routers_to_force(
    model: Sequence[torch.nn.Module], flag: str
) -> Iterator[tuple[TopKRouter, Callable[[], list[int]]]]:
    """Yield each router, and the function that returns the microbatches of its current pass (`PassMemory.of`).

    Raises:
        ValueError: a router cannot take given choices; the message begins with `flag`.
    """
    for chunk in model:
        memory = PassMemory(chunk)
        for router in chunk.modules():
            if not isinstance(router, TopKRouter):
                continue
            if router.config.moe_router_fusion:
                raise ValueError(f"{flag}: --moe-router-fusion does not support given choices; leave one of them out")
            if router.routing_type in ("sinkhorn", "quantile_balancing"):
                raise ValueError(
                    f"{flag}: --moe-router-load-balancing-type {router.routing_type} does not support given choices; "
                    "use none"
                )
            yield router, functools.partial(memory.of, router)
