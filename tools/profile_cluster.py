"""Measure a cluster for `--balance-profile FILE`: the links between expert-parallel ranks, and the run's experts.

    torchrun --nproc-per-node 8 tools/profile_cluster.py --output profile.json <the flags of the training run>

The run's flags give the layout, expert shape, precision and load. Flags for data, tokenizer, learning rate and length
may be left out, because nothing is trained.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_balance.device import cpu, quiet

if TYPE_CHECKING:
    from megatron_balance.profile.cluster_profile import ClusterProfile, Fit, Throughput

STAND_INS = (
    (("lr",), "--lr 1e-3"),
    (("train_iters", "train_samples"), "--train-iters 1"),
    (("data_path", "train_data_path", "mock_data"), "--mock-data"),
    (("tokenizer_type",), "--tokenizer-type NullTokenizer --vocab-size 100"),
)
"""Placeholders for flags that training requires and measuring does not use: alternative fields, and flags for one."""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, metavar="FILE", required=True, help="the JSON file to write")
    own, flags = parser.parse_known_args(argv)
    # Both must run before megatron.core is imported
    quiet.silence_expected_warnings()
    cpu.install()
    import torch.distributed as dist

    from megatron_balance.build.profiles import measure_cluster
    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.cli.checks import Machine
    from megatron_balance.job import groups, job
    from megatron_balance.job.layout import build_groups

    launch = job.Launch.from_environment()
    try:
        config = parse_args(with_stand_ins(flags), Machine.here(launch.world_size)).config
        shape = config.transformer
        expert_parallel = shape.expert_model_parallel_size
        expert_tensor = shape.expert_tensor_parallel_size
        if expert_parallel == 1:
            raise ValueError(
                "--expert-model-parallel-size 1: nothing to measure; give the flags of the training run, with experts"
            )
        topology = job.node_topology(launch, config.comm.moe_comm_node_size)
        node_size = groups.expert_node_size(topology, expert_parallel, expert_tensor)
    except ValueError as error:
        raise SystemExit(f"profile_cluster.py: error: {error}") from error

    job.start(launch, config.launch.distributed_backend, config.launch.distributed_timeout_minutes)
    process_groups = build_groups(shape, config.train.seed, config.launch.distributed_timeout_minutes)
    is_first = launch.rank == 0
    profile = measure_cluster(config, process_groups, node_size)
    try:
        if is_first:
            profile.save(own.output)
            print("\n".join(table(profile)), flush=True)
    except OSError as error:
        raise SystemExit(f"profile_cluster.py: error: --output {own.output}: {error.strerror}") from error
    finally:
        dist.destroy_process_group()


def with_stand_ins(flags: Sequence[str]) -> list[str]:
    """Return the command line with placeholders for required flags that the user left out."""
    from megatron_balance.cli.arguments import build_parser, yaml_flags

    parser = build_parser()
    values = vars(parser.parse_args([*yaml_flags(parser, flags), *flags]))
    missing = [text for names, text in STAND_INS if not any(values[name] for name in names)]
    return [*flags, *" ".join(missing).split()]


def table(profile: "ClusterProfile") -> Iterator[str]:
    """Format the profile as a table, line by line. A missing kind of group shows the one used in its place."""
    from megatron_balance.measure.measure import group_kinds

    kinds = group_kinds(profile.num_ranks, profile.node_size)
    yield f"{profile.num_ranks} expert-parallel ranks in nodes of {profile.node_size}"
    yield f"{'':12} {'group':5} {'alpha (us)':>12} {'GB/s':>9} {'residual %':>11} {'held-out %':>11}"
    for collective, lines in profile.links.items():
        for kind, line in lines.items():
            same = kind != "ep" and kinds[kind] == kinds["ep"]
            yield f"{collective:12} {kind:5} {'as ep':>12}" if same else _row(collective, kind, line)
    for name, line in profile.all_to_alls.items():
        yield _row(name, "ep", line)
    yield f"{'':12} {'':5} {'launch (us)':>12} {'us each':>9} {'residual %':>11} {'held-out %':>11}"
    batches = {"messages": profile.messages, **{f"{kind}-batch": lines for kind, lines in profile.launches.items()}}
    for name, lines in batches.items():
        for level, line in lines.items():
            yield f"{name:12} {level:5} {line.alpha * 1e6:12.1f} {line.beta * 1e6:9.3g} {_errors(line)}"
    for kind, seconds in profile.starts.items():
        yield f"{f'{kind}-start':18} {seconds * 1e6:12.1f}"
    if profile.parallel is not None:
        mp, esp, *lines = profile.parallel
        yield f"{mp} ranks with the same tokens, {esp} shards"
        for name, line in zip(profile.parallel._fields[2:], lines, strict=True):
            if line is not None:
                yield _row(name, "", line)
    yield f"{'experts':18} {'overhead(us)':>12} {'us/token':>9} {'residual %':>11} {'held-out %':>11}"
    for name, line in (("forward", profile.forward), ("backward", profile.backward)):
        yield f"{name:18} {line.overhead * 1e6:12.1f} {line.seconds_per_token * 1e6:9.3g} {_errors(line)}"
    if profile.rates:
        yield f"{'rates of ranks':18} {' '.join(f'{rate:.2f}' for rate in profile.rates)}"


def _row(name: str, kind: str, line: "Fit") -> str:
    rate = 1e-9 / line.beta if line.beta else float("inf")
    return f"{name:12} {kind:5} {line.alpha * 1e6:12.1f} {rate:9.3g} {_errors(line)}"


def _errors(line: "Fit | Throughput") -> str:
    return f"{100 * line.residual:11.1f} {100 * line.held_out:11.1f}"


if __name__ == "__main__":
    main(sys.argv[1:])
