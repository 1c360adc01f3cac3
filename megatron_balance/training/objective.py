"""The objective of a run: the mean loss per token, the losses of predictions, and the auxiliary losses of routers.

Each loss is weighted relative to the mean loss per token by its coefficient, in every layout. With
`--calculate-per-token-loss`, gradients are summed, then divided by the number of unmasked tokens of the global batch.
The other losses are means over other numbers, and need the number of unmasked tokens in the backward pass. So the last
pipeline stage reads all microbatches of an iteration at its start.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.utils import is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from megatron_balance.flow.routers import take_losses
from megatron_balance.training.data import Batch, prediction_mask

LOGGED = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Value of `--moe-router-load-balancing-type` -> name in the log."""

Loss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
"""Summed loss of a microbatch, its number of tokens, and sums with numbers of tokens for the log, by name."""


class PredictingModel(GPTModel):
    """A GPT that leaves the losses of predictions to the objective; megatron-core's weights depend on the layout."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losses: list[torch.Tensor] = []
        """Losses [b, s] of the latest microbatch: one for each depth of prediction, then the model's own."""

    def compute_language_model_loss(self, labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Compute the loss as the base does; it calls this for each depth of prediction, then for the model."""
        assert self.config.mtp_num_layers is not None
        if len(self.losses) > self.config.mtp_num_layers:
            self.losses.clear()
        losses = super().compute_language_model_loss(labels, logits)
        self.losses.append(losses)
        return losses if len(self.losses) > self.config.mtp_num_layers else losses.detach()


class Objective:
    """Adds up the losses of one rank's microbatches, and means of all ranks' losses for the log."""

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, routed: ProcessGroupCollection
    ) -> None:
        """`routed` has the groups over which routers reduce auxiliary losses (`ParallelDispatch.router_groups`)."""
        self.config = config
        self.groups = groups
        self.routed = routed
        self.depths = config.mtp_num_layers or 0
        self.router_losses: list[str] = []
        if config.num_moe_experts is not None:
            balancing = config.moe_router_load_balancing_type
            kinds = [balancing] if isinstance(balancing, str) else balancing
            z_loss = [] if config.moe_z_loss_coeff is None else ["z_loss"]
            self.router_losses = [*(LOGGED[kind] for kind in kinds if kind in LOGGED), *z_loss]
        self.tokens: torch.Tensor | None = None
        """[1 + depths]: number of unmasked tokens of the iteration's global batch, then of those with a token to
        predict at each depth; None without `--calculate-per-token-loss`."""
        self.per_microbatch: torch.Tensor | None = None
        """[]: mean number of unmasked tokens per microbatch; None if `tokens` is None."""

    def begin(self, data: list[Iterator[Batch]], microbatches: int) -> list[Iterator[Batch]]:
        """Begin an iteration; the caller takes its microbatches from the returned iterators. Every rank calls this."""
        if not self.config.calculate_per_token_loss or not (self.depths or self.router_losses):
            return data
        tokens = torch.zeros(1 + self.depths, device=torch.cuda.current_device())
        if is_pp_last_stage(self.groups.pp):
            batches = list(islice(data[-1], microbatches))
            for batch in batches:
                masks = [batch["loss_mask"], *(batch[prediction_mask(depth)] for depth in range(1, 1 + self.depths))]
                tokens += torch.stack(masks).sum((1, 2))
            dist.all_reduce(tokens, group=self.groups.dp_cp)
            data = [*data[:-1], iter(batches)]
        if self.groups.pp.size() > 1:
            dist.broadcast(tokens, dist.get_process_group_ranks(self.groups.pp)[-1], group=self.groups.pp)
        self.tokens = tokens
        self.per_microbatch = tokens[0] / (microbatches * self.groups.dp.size())
        return data

    def router_weight(self, _: torch.Tensor | int) -> torch.Tensor:
        """Return the factor of a microbatch's router losses, as `flow.routers.Weight`."""
        assert self.per_microbatch is not None
        return self.per_microbatch

    def loss(self, model: torch.nn.Module, batch: Batch, losses: torch.Tensor) -> Loss:
        """Return the loss of a microbatch for megatron-core's schedules; `losses` [b, s] are those of every token."""
        loss, tokens, logged = token_loss(batch["loss_mask"], losses)
        if not self.depths or not model.training:
            return loss, tokens, logged
        whole: Any = get_attr_wrapped_model(model, "losses")
        for depth, predicted in enumerate(whole[:-1], 1):
            mask = batch[prediction_mask(depth)]
            total = (predicted.float() * mask).sum()
            logged[f"mtp_{depth} loss"] = torch.stack([total.detach(), mask.sum()])
            if torch.is_grad_enabled():
                loss = loss + total * self._prediction_weight(depth, batch, tokens)
        return loss, tokens, logged

    def mean_router_losses(self, layers: list[int], microbatches: int) -> tuple[dict[str, torch.Tensor], dict]:
        """Return the router losses of an iteration, averaged over all ranks: means [] over MoE layers, and [layers].

        Every rank calls this after the last backward pass. `layers`: 1 for each MoE layer, 0 for each dense one.
        """
        if not self.router_losses:
            return {}, {}
        # [losses, layers]
        values = take_losses(self.router_losses, len(layers))
        # Stages without MoE layers take part, too, and so log the same
        dist.all_reduce(values, group=self.groups.pp)
        dist.all_reduce(values, group=self.routed.tp_dp_cp)
        values /= microbatches * self.groups.dp.size()
        means = values.sum(1) / max(1, sum(layers))
        return dict(zip(self.router_losses, means, strict=True)), dict(zip(self.router_losses, values, strict=True))

    def _prediction_weight(self, depth: int, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Return the factor of a microbatch's summed loss at `depth`, given its number of unmasked `tokens`."""
        assert self.config.mtp_loss_scaling_factor is not None
        scale = self.config.mtp_loss_scaling_factor / self.depths
        if self.tokens is not None:
            return scale * self.tokens[0] / self.tokens[depth].clamp(min=1)
        # The schedule divides by this rank's tokens, and gradients are averaged over the ranks of a sequence
        scale *= self.groups.cp.size()
        return scale * tokens.clamp(min=1) / batch["predictable"][depth - 1].clamp(min=1)


def token_loss(loss_mask: torch.Tensor | None, losses: torch.Tensor) -> Loss:
    """Return a microbatch's summed loss, its number of tokens, and both for the log; both arguments are [b, s]."""
    assert loss_mask is not None, "only the last pipeline stage computes losses"
    mask = loss_mask.reshape(-1).float()
    loss = (losses.reshape(-1).float() * mask).sum()
    tokens = mask.sum()
    # The schedule divides `loss` in place, so the log needs a copy
    return loss, tokens.int(), {"lm loss": torch.stack([loss.detach(), tokens]).clone()}
