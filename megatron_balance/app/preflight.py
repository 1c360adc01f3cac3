"""Checks that a rank makes alone before it joins a job; a dry run makes them before a job waits in a queue.

  command line -> configuration, nodes -> policy's process, tokenizer -> files that flags name -> facts

The checks read only headers and samples, and write nothing.
"""

import dataclasses
from typing import NamedTuple

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

from megatron_balance.app import facts
from megatron_balance.build.profiles import read_profile
from megatron_balance.build.routing import read_recorded
from megatron_balance.checkpoint.loading import check_newest
from megatron_balance.cli.arguments import parse_args
from megatron_balance.config.run_config import RunConfig
from megatron_balance.device.machine import Machine
from megatron_balance.files.reading import check_regular
from megatron_balance.files.writing import check_creatable
from megatron_balance.job import job, limits
from megatron_balance.job.agreement import Facts
from megatron_balance.job.groups import Topology, expert_node_size
from megatron_balance.planning.policy_process import PolicyProcess
from megatron_balance.training.conversations import check_conversations
from megatron_balance.training.data import batch_bytes
from megatron_balance.training.data_files import check_data
from megatron_balance.training.schedule import run_length, scheduler_settings
from megatron_balance.training.tokenizer import build_tokenizer, end_of_document, vocabulary


class Preflight(NamedTuple):
    """A command line that passed this rank's checks, and the objects built from it."""

    launch: job.Launch
    config: RunConfig
    notices: list[str]
    topology: Topology
    tokenizer: MegatronTokenizerBase
    policy: PolicyProcess | None
    """A user's policy in its own process; None for a policy of this package and in a dry run."""

    facts: Facts
    """Facts that must be equal on all ranks; empty if there is no other rank, and in a dry run."""


def preflight(argv: list[str]) -> Preflight:
    """Check a command line on this rank. If the check fails, ranks that wait for this one also end.

    ValueError: something would end the run later. SystemExit: argparse's own errors, and `--help`.
    """
    launch = job.Launch.from_environment()
    with job.declining_on_error(launch):
        parsed = parse_args(argv, Machine.here(launch.world_size))
        config = parsed.config
        topology = job.node_topology(launch, config.comm.moe_comm_node_size)
        config = config.replace(comm=dataclasses.replace(config.comm, moe_comm_node_size=topology.node_size))
        # A user's policy imports in its own process while this rank works. A dry run starts one later for each stage
        name = config.balance.balance_policy
        policy = PolicyProcess(name, {}) if ":" in name and not config.launch.dry_run else None
        tokenizer = build_tokenizer(config.tokenizer)
        if config.data.reset_attention_mask and end_of_document(tokenizer) is None:
            unknown = "the tokenizer has no end-of-document token; use a model that has one, or leave the flag out"
            raise ValueError(f"--reset-attention-mask: {unknown}")
        if config.data.sft:
            check_conversations(config.data, tokenizer)
        notices = check_files(config, topology, launch.rank, vocabulary(tokenizer, config.tokenizer))
        if policy is not None:
            policy.ready(config.launch.patience)
        if not config.launch.dry_run:
            microbatch = batch_bytes(config.train.micro_batch_size, config.model.seq_length)
            limits.shared_memory(config.data.num_workers, microbatch, launch.local_world_size)
        compared = launch.world_size > 1 and not config.launch.dry_run
        return Preflight(
            launch=launch,
            config=config,
            notices=[*parsed.notices, *notices],
            topology=topology,
            tokenizer=tokenizer,
            policy=policy,
            facts=facts.gather(config, parsed.flags, topology) if compared else {},
        )


def check_files(config: RunConfig, topology: Topology, rank: int, vocabulary: int) -> list[str]:
    """Check the files that flags name, and the length of the run, as `preflight` does; return notices."""
    transformer = config.transformer
    if config.balance.balance_policy != "none":
        assert transformer.expert_tensor_parallel_size is not None
        expert_node_size(topology, transformer.expert_model_parallel_size, transformer.expert_tensor_parallel_size)
    whole = transformer.tensor_model_parallel_size * transformer.context_parallel_size
    stages = transformer.pipeline_model_parallel_size
    length = run_length(config.train, topology.world_size // (whole * stages))
    scheduler_settings(config, length)
    written = {
        "--save": config.checkpoint.save,
        "--tensorboard-dir": config.log.tensorboard_dir,
        "--moe-routing-trace-path": config.log.moe_routing_trace_path,
        "--balance-log-dir": config.balance.balance_log_dir,
        "--balance-timeline": config.balance.balance_timeline,
        "--data-cache-path": config.data.data_cache_path,
    }
    for flag, directory in written.items():
        if directory is not None:
            check_creatable(directory, flag)
    if config.balance.balance_profile not in ("builtin", "auto"):
        read_profile(config, topology)
    if config.balance.balance_calibrate not in ("off", "on"):
        check_regular(config.balance.balance_calibrate, "--balance-calibrate")
    recorded = read_recorded(config)
    if recorded is not None:
        recorded.check_end(length.iterations)
    if rank == 0:
        # On a shared file system, the other ranks may see a new checkpoint later
        check_newest(config, length)
    # megatron-core numbers the ranks of a stage consecutively
    stage = rank * stages // topology.world_size
    reads = rank == 0 or stage in (0, stages - 1) or config.data.documents_apart
    return check_data(config, vocabulary, reads=reads)
