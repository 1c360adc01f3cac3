"""Loads of a simulated run (`simulate.py --load`): drawn from a distribution, from a workload, or from a recorded run.

Every team, microbatch and source rank draws its own tokens from the popularity of experts. So teams have different
loads from the same distribution, as replicas of a run do.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from megatron_balance.workloads.synthetic import NAMES, load_matrix

if TYPE_CHECKING:
    from megatron_balance.simulate.job import LoadSource

DISTRIBUTIONS = {
    "zipf": lambda rank_E, generator, value: (1.0 + rank_E) ** -value,
    "gamma": lambda rank_E, generator, value: generator.gamma(value**-2, size=len(rank_E)),
}
"""Name -> popularity of experts in random order; the value is the exponent, or the standard deviation over the mean."""

WIDEST = 10.0
"""Largest standard deviation over the mean of `gamma`: beyond it, all experts may have a popularity of zero."""

SAMPLE = 512
"""Tokens per source rank that determine the popularity under a workload."""

Popularity = Callable[[int, int], np.ndarray]
"""Iteration, layer -> [D, E] share of each expert in each source rank's choices."""


def drawn_loads(
    popularity: Popularity, topk: int, tokens: int, seed: int = 0, spread: float = 0.0, sharing: int = 1
) -> "LoadSource":
    """Return loads of an expert-parallel group, drawn from the popularity of its experts.

    Args:
        tokens: tokens of one source rank in a microbatch; a token never chooses an expert twice.
        spread: standard deviation of the logarithm of an expert's popularity among microbatches, because the tokens of
            a sequence are alike.
        sharing: number of consecutive ranks that have parts of the same sequences.
    """

    def draw(iteration: int, layer: int, team: int, microbatches: int) -> np.ndarray:
        shares_DE = popularity(iteration, layer)
        ranks, experts = shares_DE.shape
        generator = np.random.default_rng((seed, iteration, layer, team))
        drawn_BDE = generator.standard_normal((microbatches, -(-ranks // sharing), experts))
        weights_BDE = shares_DE * np.exp(spread * drawn_BDE.repeat(sharing, 1)[:, :ranks])
        shares_BDE = weights_BDE / weights_BDE.sum(2, keepdims=True)
        return _at_most(generator.multinomial(tokens * topk, shares_BDE), tokens)

    return draw


def _at_most(counts_BDE: np.ndarray, most: int) -> np.ndarray:
    """Move the excess above `most` to the experts with the fewest tokens, in place; return the counts."""
    for counts_E in counts_BDE.reshape(-1, counts_BDE.shape[-1]):
        excess = int(np.maximum(counts_E - most, 0).sum())
        if excess:
            np.minimum(counts_E, most, out=counts_E)
            for expert in np.argsort(counts_E, kind="stable"):
                taken = min(excess, most - int(counts_E[expert]))
                counts_E[expert] += taken
                excess -= taken
    return counts_BDE


def distribution(text: str, num_ranks: int, num_experts: int, seed: int = 0) -> Popularity:
    """Return the popularity of `zipf:EXPONENT`, `gamma:DEVIATION` or a name of `workloads.NAMES`.

    Each layer has its own popular experts, which stay popular. ValueError: the text is none of these.
    """
    name, _, value = text.partition(":")
    if name in NAMES and not value:

        def of_workload(iteration: int, layer: int) -> np.ndarray:
            counts_DE = load_matrix(name, num_ranks, num_experts, 1, SAMPLE, seed=seed + layer, step=iteration)
            return counts_DE / counts_DE.sum(1, keepdims=True)

        return of_workload
    try:
        number = float(value)
        weigh = DISTRIBUTIONS[name]
    except (KeyError, ValueError):
        choices = ", ".join(NAMES)
        raise ValueError(
            f"--load {text}: give even, zipf:EXPONENT, gamma:DEVIATION, a directory of --balance-log-dir, or one of "
            f"{choices}"
        ) from None
    if name == "gamma" and not 0 < number <= WIDEST:
        raise ValueError(f"--load {text}: the standard deviation over the mean must be above 0, and at most {WIDEST}")

    def popularity(iteration: int, layer: int) -> np.ndarray:
        generator = np.random.default_rng((seed, layer))
        weights_E = weigh(generator.permutation(num_experts), generator, number)
        return np.tile(weights_E / weights_E.sum(), (num_ranks, 1))

    return popularity


def even_loads(num_ranks: int, num_experts: int, topk: int, tokens: int) -> "LoadSource":
    """Return loads in which every expert gets the same from every source rank, up to whole tokens."""
    whole, rest = divmod(tokens * topk, num_experts)
    first_D = np.arange(num_ranks)[:, None] * rest
    counts_DE = whole + ((np.arange(num_experts) - first_D) % num_experts < rest).astype(np.int64)
    return lambda iteration, layer, team, microbatches: np.tile(counts_DE, (microbatches, 1, 1))


def recorded(counts: Mapping[int, np.ndarray], num_ranks: int, num_experts: int, first: int = 0) -> Popularity:
    """Return the popularity in a recorded run; iterations and layers beyond the recorded ones start over.

    Args:
        first: index of the recorded iteration to begin with; negative: from the end.
        counts: MoE layer -> [B, D, E] as in `observe.load_log.LoggedLoads`.

    Raises:
        ValueError: the run had another number of experts.
    """
    layers = [counts[layer] for layer in sorted(counts)]
    if layers[0].shape[2] != num_experts:
        raise ValueError(
            f"--load: the recorded run has {layers[0].shape[2]} experts, and this one has {num_experts}; record a run "
            "with as many, because no rule says how popular another number of experts would be"
        )

    def popularity(iteration: int, layer: int) -> np.ndarray:
        recorded_NDE = layers[(layer - 1) % len(layers)]
        counts_DE = recorded_NDE[(first + iteration) % len(recorded_NDE)]
        if len(counts_DE) != num_ranks:
            counts_DE = np.tile(counts_DE.sum(0), (num_ranks, 1))
        counts_DE = np.maximum(counts_DE, 0) + 1e-9
        return counts_DE / counts_DE.sum(1, keepdims=True)

    return popularity
