"""Number of tokens that the routers send to each expert."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter

from megatron_balance.device.versions import number_of


class LoadRecorder:
    """Counts, for each MoE layer, the tokens routed to each expert in this rank's latest training forward pass.

    It hooks into the routers, so it works with any MoE layer.
    """

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        self.counts: dict[int, torch.Tensor] = {}
        for chunk in model:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._count)

    def _count(self, router: TopKRouter, inputs: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        # With recomputation, the first pass runs without gradients; only the second is counted
        if router.training and torch.is_grad_enabled():
            self.counts[number_of(router)] = output[1].detach().sum(0)

    def gather(self, groups: ProcessGroupCollection) -> dict[int, list[int]]:
        """Return the tokens per expert of every MoE layer of the model, over all ranks; every rank calls this."""
        own = {}
        for layer, counts in sorted(self.counts.items()):
            total = counts.clone()
            # Tokens are split over data-parallel ranks, and over tensor-parallel ranks by sequence
            dist.all_reduce(total, group=groups.tp_dp_cp)
            own[layer] = total.tolist()
        stages: list[dict[int, list[int]]] = [{}] * groups.pp.size()
        dist.all_gather_object(stages, own, group=groups.pp)
        return dict(sorted(entry for stage in stages for entry in stage.items()))

    def table(self, groups: ProcessGroupCollection) -> str:
        """Format the result of `gather` as a table, with each layer's balance; every rank calls this."""
        loads = self.gather(groups)
        experts = max((len(counts) for counts in loads.values()), default=0)
        width = max(7, *(len(str(count)) + 1 for counts in loads.values() for count in counts), 7)
        header = "layer |" + "".join(f"{f'e{expert}':>{width}}" for expert in range(experts)) + " | max/mean"
        lines = ["tokens per expert, last microbatch of the last iteration:", header, "-" * len(header)]
        for layer, counts in loads.items():
            balance = max(counts) * len(counts) / max(1, sum(counts))
            lines.append(f"{layer:5d} |" + "".join(f"{count:{width}d}" for count in counts) + f" | {balance:8.2f}")
        return "\n".join(lines)
