"""From a command line to a finished run, on every rank."""

import torch
import torch.distributed as dist

from megatron_balance.arguments import parse_args
from megatron_balance.build import build_run
from megatron_balance.checks import Machine
from megatron_balance.device import groups
from megatron_balance.observe.load import LoadRecorder
from megatron_balance.training.logging import RunLog
from megatron_balance.training.loop import train


def pretrain(argv: list[str]) -> None:
    """Parse, check, join the job, build, train. A user's mistake ends every rank before it joins."""
    launch = groups.Launch.from_environment()
    try:
        config, notices = parse_args(argv, Machine.here(launch.world_size))
        groups.node_topology(launch, config.comm.moe_comm_node_size)
    except ValueError as error:
        raise SystemExit(f"pretrain_gpt_moe.py: error: {error}") from error
    torch.use_deterministic_algorithms(config.transformer.deterministic_mode)
    groups.start(launch, config.launch.distributed_backend, config.launch.distributed_timeout_minutes)
    try:
        run = build_run(config)
        log = RunLog(config, run.length.iterations, run.vocab_size)
        for notice in notices:
            log.message(f"note: {notice}")
        recorder = LoadRecorder(run.model) if config.log.log_tokens_per_expert else None
        train(run, log)
        if recorder is not None:
            log.message(recorder.table(run.groups))
        log.close()
    finally:
        dist.destroy_process_group()
