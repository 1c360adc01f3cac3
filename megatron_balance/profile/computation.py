"""Seconds of a layer outside its routed experts, by kind of kernel (profile/kernel_times.py)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.profile.cluster_profile import ClusterProfile
from megatron_balance.profile.flops import attended_keys, attended_width, attention_matrices, mlp_flops
from megatron_balance.profile.kernel_times import ACTIVATION, Kernels, Passes, cast, product, weights_passes


@dataclass(frozen=True)
class Computation:
    """The computation of one rank on a microbatch, in layers outside routed experts."""

    kernels: Kernels
    config: TransformerConfig
    tokens: float
    """Tokens of a microbatch on a context-parallel rank; tensor-parallel ranks share them."""
    length: int
    """Tokens of a sequence."""

    @property
    def _ranks(self) -> int:
        return self.config.tensor_model_parallel_size

    def _products(self, matrices: Sequence[tuple[float, float]]) -> Passes:
        """Return the seconds of products whose weights tensor-parallel ranks share, by their larger side."""
        found = []
        for inputs, outputs in matrices:
            split = (inputs / self._ranks, outputs) if inputs > outputs else (inputs, outputs / self._ranks)
            found.append(product(self.kernels, self.tokens, *split))
            found.append(cast(self.kernels, self.tokens, *split))
            found.append(weights_passes(self.kernels, 1, inputs * outputs / self._ranks, 1))
        return Passes(0.0, 0.0).plus(*found)

    def _moved(self, forward: float, backward: float, kernels: int) -> Passes:
        """Return the seconds of other kernels that read and write so many numbers per token."""
        share = ACTIVATION * self.tokens / self._ranks
        read = self.kernels.read
        return Passes(read(share * forward, kernels), read(share * backward, 2 * kernels))

    def attention(self) -> Passes:
        """Return the seconds of a layer's self-attention, both norms and both residual sums."""
        config = self.config
        core, moved = self.attention_parts()
        repeated = 0.0
        if "core_attn" in recomputed(config):
            repeated += core.forward
        if "mla_up_proj" in recomputed(config):
            repeated += self._products(attention_matrices(config)[1:4:2]).forward
        return self._products(attention_matrices(config)).plus(core, moved, Passes(0.0, repeated))

    def attention_parts(self) -> tuple[Passes, Passes]:
        """Return the seconds of attention's core, and of all that is no product."""
        config = self.config
        heads = attended_width(config)
        kernels = self.kernels
        # A ring attends to the keys of one rank after the other
        steps = config.context_parallel_size if str(config.cp_comm_type) == "p2p" else 1
        keys = attended_keys(config, self.length) + steps * kernels.half_keys
        # Each key costs two products: the score, and the weighted value
        passes = kernels.attention.times(2 * self.tokens * keys * heads / self._ranks)
        hidden = config.hidden_size
        # Forward: two norms (read, write) and two sums (read two, write one); rotated queries and keys
        return passes, self._moved(10 * hidden + 2 * heads, 14 * hidden + 3 * heads, 10)

    def mlp(self, inner: int, module: str = "mlp") -> Passes:
        """Return the seconds of a dense MLP, or of shared experts (`module` is its name for recomputation)."""
        gated = self.config.gated_linear_unit
        hidden = self.config.hidden_size
        moved = self._moved((3 if gated else 2) * inner, (6 if gated else 3) * inner, 2)
        passes = self._products([(hidden, (2 if gated else 1) * inner), (inner, hidden)]).plus(moved)
        return passes.plus(Passes(0.0, passes.forward if module in recomputed(self.config) else 0.0))

    def routing(self) -> Passes:
        """Return the seconds of a router, and of copying rows by expert and summing results, before any exchange."""
        config = self.config
        assert config.num_moe_experts is not None
        hidden = config.hidden_size
        rows = config.moe_router_topk if config.moe_token_dispatcher_type == "alltoall" else 0
        copied = 2 * (rows + 1) * hidden
        return self._moved(hidden + copied + 4 * config.num_moe_experts, 2 * hidden + copied, 20)

    def head(self, vocabulary: int) -> Passes:
        """Return the seconds of logits and their loss."""
        # The loss reads logits in 32 bits for the maximum, the sum and the gradient
        loss = self._moved(6 * vocabulary, 4 * vocabulary, 6)
        return self._products([(self.config.hidden_size, vocabulary)]).plus(loss)

    def joining(self) -> Passes:
        """Return the seconds to project two states to one, for multi-token prediction."""
        return self._products([(2 * self.config.hidden_size, self.config.hidden_size)])


def recomputed(config: TransformerConfig) -> Collection[str]:
    """Return the modules that selective recomputation repeats."""
    return config.recompute_modules or () if config.recompute_granularity == "selective" else ()


def kernels_of(profile: ClusterProfile, config: TransformerConfig) -> Kernels:
    """Return a profile's kernels; if it has none, kernels that are all as fast as experts."""
    if profile.kernels is not None:
        return profile.kernels
    assert config.moe_ffn_hidden_size is not None
    row = Passes(profile.forward.seconds_per_token, profile.backward.seconds_per_token)
    each = row.times(1 / mlp_flops(config, config.moe_ffn_hidden_size))
    return Kernels(product=each, half_width=0.0, start=0.0, attention=each, memory=0.0, launch=0.0)


def non_expert_passes(
    profile: ClusterProfile, config: TransformerConfig, tokens: int, seq_length: int, dense_layers: int = 0
) -> Passes:
    """Return the seconds of one block's non-MoE part, T_FNEC and T_BNEC of Eq. 8 (Pro-Prophet section V-B).

    Args:
        tokens: tokens of one microbatch, on all ranks that share its attention.
        dense_layers: number of dense layers between this block's MoE layer and the next one.
    """
    assert config.ffn_hidden_size is not None
    computation = Computation(kernels_of(profile, config), config, tokens, seq_length)
    dense = computation.attention().plus(computation.mlp(config.ffn_hidden_size)).times(dense_layers)
    shared = config.moe_shared_expert_intermediate_size
    more = [computation.mlp(shared, "shared_experts")] if shared else []
    return computation.attention().plus(computation.routing(), dense, *more)
