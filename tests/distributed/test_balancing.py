"""Contract 1 in training: with any policy, a run follows the run without a policy, in every layout."""

import sys
from functools import cached_property

import pytest
import torch
import torch.distributed as dist

from megatron_balance.device.compiled import Compiled
from megatron_balance.flow.experts import GroupedExperts
from megatron_balance.training.loop import train_step
from megatron_balance.training.run import Run
from tests.distributed import runs
from tests.distributed.policies import TOLERANCE, check_follows, with_policy
from tests.distributed.runs import Curve, deviation

ITERATIONS = 3

EP4 = "--expert-model-parallel-size 4"
EP2 = "--expert-model-parallel-size 2"
HOT = "--moe-router-force-workload hot_experts"
HOT4 = f"{EP4} {HOT}"
POLICIES = ("quota", "pro_prophet", "fastermoe", "top2", "top3", "flexmoe", "demi")

CASES = [
    (f"{EP4} {HOT}", "exact", "pro_prophet"),
    (f"{EP2} --moe-router-force-workload rotating_hotspot --global-batch-size 16", "two scales", "flexmoe"),
    # A first, a middle and a last microbatch
    (f"{EP4} --moe-router-force-workload rotating_hotspot --global-batch-size 24", "blockwise", "demi"),
    (f"{EP2} {HOT} --num-layers 4 --moe-layer-freq [0]*1+[1,0]*1+[1]", "blockwise", "quota"),
    (f"{EP2} {HOT} --moe-expert-capacity-factor 1.0", "predicted", "top2"),
]
"""(flags, mode, policy). test_layouts.py trains all pairs of policies and layouts."""

SLOW = [
    (f"{EP4} {HOT} --optimizer sgd --lr 1e-1", "blockwise", "quota"),
    (
        f"{EP2} {HOT} --recompute-granularity selective --recompute-modules moe --disable-bias-linear "
        "--moe-shared-expert-intermediate-size 48",
        *("blockwise", "top2"),
    ),
]
OPTIONS = {
    "--moe-layer-freq": "--balance-interval 3",
    "--moe-expert-capacity-factor": "--balance-token-split proportional --balance-predictor linear",
}
"""Flag of the model -> flags of balancing that are added to it."""


@pytest.mark.parametrize(
    ("plain", "mode", "policy"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_policies_change_nothing_that_is_learned(
    ranks, curve_of, length, profiles, plain: str, mode: str, policy: str
) -> None:
    more = " ".join(options for flag, options in OPTIONS.items() if flag in plain)
    balanced = f"{with_policy(plain, policy, mode, profiles)} {more}"
    # Features of the model need no replicas
    world_size = 2 if more else 4
    check_follows(ranks, curve_of, plain, balanced, length(ITERATIONS), world_size)


def train_shared(flags: str, iterations: int) -> tuple[Curve, int]:
    """Train, and return the curve and the largest number of ranks that an expert of the first MoE layer had."""
    run = runs.build(flags)
    reports = []
    most = 0
    for _ in range(iterations):
        reports.append(train_step(run))
        most = max(most, *(len({*hosts}) for hosts in run.balancer.layers[1].last.placements[-1].hosts))
    return runs.curve_of(reports), most


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_demi_shares_experts_and_orders_their_chunks(ranks, curve_of, profiles, hosts: int) -> None:
    demi = f"--balance-demi-hosts {hosts} --moe-comm-chunks auto --moe-comm-order demi"
    flags = f"{with_policy(HOT4, 'demi', 'blockwise', profiles)} {demi}"
    for curve, most in ranks(4).run(train_shared, flags, ITERATIONS):
        assert (most > 1) == (hosts > 1)
        assert deviation(curve, curve_of(HOT4, ITERATIONS)) <= TOLERANCE


def replicas(flags: str) -> list[torch.Tensor]:
    """Train, check that this rank's experts equal those of all data-parallel replicas, and return them."""
    run = runs.build(flags)
    guests = 0
    for _ in range(3):
        train_step(run)
        guests += run.balancer.layers[1].last.placements[-1].added_hosts
    experts = [parameter.detach() for parameter in experts_of(run).parameters()]
    for parameter in experts:
        others = [torch.empty_like(parameter) for _ in range(run.groups.expt_dp.size())]
        dist.all_gather(others, parameter, group=run.groups.expt_dp)
        assert len(others) == 2 and all(torch.equal(other, parameter) for other in others)
    # A policy may drop guests that no longer pay
    assert guests
    return experts


@pytest.mark.parametrize("optimizer", ["", pytest.param("--use-distributed-optimizer", marks=pytest.mark.slow)])
def test_replicas_stay_equal(ranks, profiles, optimizer: str) -> None:
    ranks(4).run(replicas, with_policy(f"{EP2} {optimizer} {HOT}", "pro_prophet", "predicted", profiles))


def experts_of(run: Run) -> GroupedExperts:
    return next(module for module in run.model[0].modules() if isinstance(module, GroupedExperts))


def precisions(flags: str) -> tuple[Curve, set[torch.dtype], set[torch.dtype]]:
    """Return the curve, the dtypes of the weights and the dtypes of the gradients."""
    found: list[Run] = []
    curve = runs.train_curve(flags, 3, found.append)
    experts = experts_of(found[0])
    slots = range(len(experts.home_experts) + experts.linear_fc1.guests[0].weight.shape[0])
    weights = {tensor.dtype for slot in slots for tensor in experts.weights_of(slot)}
    return curve, weights, {tensor.dtype for slot in slots for tensor in experts.gradients_of(slot)}


def test_bf16_guests_are_like_bf16_experts(ranks, profiles) -> None:
    flags = f"{HOT4} --bf16"
    plain = ranks(4).run(runs.train_curve, flags, 3)[0]
    curve, weights, gradients = ranks(4).run(precisions, with_policy(flags, "top2", "exact", profiles))[0]
    assert (weights, gradients) == ({torch.bfloat16}, {torch.float32})
    assert deviation(curve, plain) < 1e-2


def compiled_late(flags: str) -> list[str]:
    """Return the names of the loops that are compiled in the first iterations and not before."""
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron_balance.")]:
        for loop in vars(module).values():
            if isinstance(loop, Compiled):
                vars(loop).pop("_code", None)
    run = runs.build(flags)
    late = []
    compile_loop = Compiled._code.func

    def note(loop: Compiled) -> object:
        late.append(loop.__name__)
        return compile_loop(loop)

    with pytest.MonkeyPatch.context() as patch:
        noting = cached_property(note)
        noting.__set_name__(Compiled, "_code")
        patch.setattr(Compiled, "_code", noting)
        for _ in range(2):
            train_step(run)
    return late


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        ("quota", "blockwise"),
        ("top2", "two scales"),
        *(pytest.param(name, "blockwise", marks=pytest.mark.slow) for name in ("none", *POLICIES[1:])),
    ],
)
def test_no_iteration_waits_for_a_compiler(ranks, profiles, policy: str, mode: str) -> None:
    flags = f"{EP2} {HOT}"
    if policy != "none":
        flags = with_policy(flags, policy, mode, profiles)
    assert ranks(2).run(compiled_late, flags) == [[], []]
