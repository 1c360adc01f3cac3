"""Dispatch without host synchronization: `--moe-flex-rows bound`.

HybridEP's kernels compute the numbers of rows, and the experts' products read the numbers on the device. The host
allocates room for an upper bound on the rows that this rank can receive. Rows after the received ones are
uninitialized: products stop at the last received row, and HybridEP's combine (also the backward pass of its dispatch)
ignores the rest. If an expert has several hosts, the device also assigns rows to hosts.
"""

from collections.abc import Callable
from functools import partial

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.moe_utils import get_capacity
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.device.host_memory import to_device
from megatron_balance.flow.device_plan import DevicePlan, DeviceTables, tokens_until
from megatron_balance.flow.dispatcher import ArrivedRows, AtOnceDispatcher, PendingRows, Route
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.flow.grouped_gemm import grouped_mm_is_fast
from megatron_balance.flow.plan import Choices
from megatron_balance.flow.reroute import fixed_targets, reroute_in_order, reroute_to
from megatron_balance.observe.profiler import record_function
from megatron_balance.placement.placement import Placement
from megatron_balance.placement.splits import SplitName

OPTIONS = {
    "num_sms_dispatch_api": ("moe_flex_dispatcher_num_sms", "moe_hybridep_num_sms"),
    "num_sms_combine_api": ("moe_flex_dispatcher_num_sms", "moe_hybridep_num_sms"),
    "num_sms_preprocessing_api": ("moe_hybridep_num_sms_preprocessing",),
    "num_blocks_permute": ("moe_hybridep_num_blocks_permute",),
    "num_blocks_unpermute": ("moe_hybridep_num_blocks_unpermute",),
    "fused": ("moe_permute_fusion_into_hybridep",),
}
"""Argument of megatron-core's dispatch -> names of its config field in versions of megatron-core, preferred name
first."""


def check_device(experts: GroupedExperts) -> None:
    """Raise ValueError if megatron-core found no HybridEP, or if torch has no grouped kernel for the experts' weights
    (their precision and sizes) on this GPU. Weights that are not on a GPU, as in a dry run, are not checked."""
    weights = [linear.weight for linear in (experts.linear_fc1, experts.linear_fc2)]
    if not weights[0].is_cuda:
        return
    if fused_a2a.hybrid_ep_dispatch is None:
        raise ValueError(
            "--moe-flex-dispatcher-backend hybridep: needs the package deep_ep, from DeepEP's branch hybrid-ep; "
            "install it or use --moe-token-dispatcher-type alltoall"
        )
    if not all(grouped_mm_is_fast(weight.mT) for weight in weights):
        raise ValueError(
            "--moe-flex-rows bound: needs --bf16, compute capability 9.x or 10.x, and --hidden-size and "
            "--moe-ffn-hidden-size that are multiples of 8; use counted"
        )


def most_rows(config: TransformerConfig, sources: int, tokens: int, slots: int) -> int:
    """Return an upper bound on the rows that a rank with `slots` slots receives if each source has `tokens` tokens."""
    each = tokens * min(config.moe_router_topk, slots)
    if config.moe_expert_capacity_factor is not None:
        assert config.num_moe_experts is not None
        chosen = tokens * config.moe_router_topk
        factor = config.moe_expert_capacity_factor
        each = min(each, slots * int(get_capacity(chosen, config.num_moe_experts, factor)))
    return sources * each


class DeviceDispatcher(AtOnceDispatcher):
    """Sends rows by HybridEP into a buffer for the maximum number of rows."""

    plans_on_host = False

    def __init__(self, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        self.config = config
        self.group = groups.tp_ep
        chosen = {name: [field for field in fields if hasattr(config, field)] for name, fields in OPTIONS.items()}
        self.options = {name: getattr(config, fields[0]) for name, fields in chosen.items() if fields}
        self._placed: tuple[Placement, SplitName, torch.Tensor | DeviceTables] | None = None
        """Latest placement and split and, on the device, each expert's only target, or the tables for
        `tokens_until`."""

    def prepare(self, tokens_TH: torch.Tensor, choices: Choices, placement: Placement | None) -> PendingRows:
        return PendingRows(self._decide)

    def _decide(self, plan: DevicePlan) -> Route:
        placement = plan.placement
        if self._placed is None or self._placed[0] is not placement or self._placed[1] != plan.split:
            device = torch.device("cuda", torch.cuda.current_device())
            target_E = fixed_targets(placement, plan.split, self.group.rank())
            found = DeviceTables.of(placement, device) if target_E is None else to_device(target_E, device)
            self._placed = placement, plan.split, found
        found = self._placed[2]
        if isinstance(found, torch.Tensor):
            return partial(self._dispatch, placement, partial(reroute_to, found, placement=placement))
        with record_function("plan"):
            until_EK = tokens_until(plan.load(), found, self.group.rank(), plan.node_size)
        options = {"physicals_EK": found.physicals_EK, "until_EK": until_EK, "num_physical": placement.num_physical}
        return partial(self._dispatch, placement, partial(reroute_in_order, **options))

    def _dispatch(
        self,
        placement: Placement,
        reroute: Callable[[torch.Tensor, torch.Tensor], Choices],
        tokens_TH: torch.Tensor,
        choices: Choices,
    ) -> ArrivedRows:
        slots = placement.slots_per_rank
        probs_TP, map_TP = reroute(*choices)
        rows = most_rows(self.config, self.group.size(), len(tokens_TH), slots)
        more = {name: value for name, value in self.options.items() if name == "fused"}
        with self.exchanging(tokens_TH, map_TP, probs_TP) as arrived:
            rows_RH, probs_R, _, tokens_S, handle = fused_a2a.hybrid_ep_dispatch(
                x=tokens_TH,
                routing_map=map_TP,
                probs=probs_TP.float(),
                group=self.group,
                num_local_experts=slots,
                num_permuted_tokens=rows,
                **self.options,
            )
            # Some versions write the numbers to pinned memory, in order with this stream's later reads
            tokens_S = tokens_S.to(rows_RH.device, non_blocking=True)
            arrived += rows_RH, probs_R, tokens_S

        def combine(rows_RH: torch.Tensor) -> torch.Tensor:
            with self.exchanging(rows_RH) as arrived:
                found = fused_a2a.hybrid_ep_combine(
                    rows_RH, handle=handle, num_permuted_tokens=rows, pad_multiple=None, **more
                )
                arrived.append(found)
            return found

        return ArrivedRows(tokens_TH, rows_RH, probs_R, tokens_S, combine)
