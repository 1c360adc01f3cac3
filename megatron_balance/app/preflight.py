"""What a rank checks alone, before it joins a job, and what a dry run checks before a job waits in a queue.

Flags are checked by cli/, the tokenizer by training/tokenizer.py. This module checks what flags name: data, files and
directories, and whether they fit the flags. No check reads more than headers and samples, and none writes.
"""

from megatron_balance.build.profiles import read_profile
from megatron_balance.checkpoint.loading import check_newest, check_there
from megatron_balance.config.run_config import RunConfig
from megatron_balance.files.reading import check_regular
from megatron_balance.files.writing import check_creatable
from megatron_balance.job.groups import Topology
from megatron_balance.training.data_files import check_data
from megatron_balance.training.schedule import run_length, scheduler_settings


def check(config: RunConfig, topology: Topology, rank: int, vocabulary: int) -> list[str]:
    """Check what the flags name, as seen by one rank; return notices for the log.

    Args:
        rank: this process's rank; 0 in a dry run.
        vocabulary: number of token ids, before padding.

    Raises:
        ValueError: something would end the run later; the error names the flag, the value and the remedy.
    """
    transformer = config.transformer
    whole = transformer.tensor_model_parallel_size * transformer.context_parallel_size
    stages = transformer.pipeline_model_parallel_size
    length = run_length(config.train, topology.world_size // (whole * stages))
    scheduler_settings(config, length)
    _check_directories(config)
    _check_balance_files(config, topology)
    if rank == 0:
        # The other ranks may see a new checkpoint of a shared file system a little later
        check_there(config.checkpoint)
        check_newest(config, length)
    # megatron-core numbers the ranks of a stage consecutively; the inner stages read no samples
    stage = rank * stages // topology.world_size
    return check_data(config, vocabulary, reads=rank == 0 or stage in (0, stages - 1))


def _check_directories(config: RunConfig) -> None:
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


def _check_balance_files(config: RunConfig, topology: Topology) -> None:
    balance = config.balance
    if balance.balance_profile not in ("builtin", "auto"):
        read_profile(config, topology)
    if balance.balance_calibrate not in ("off", "on"):
        check_regular(balance.balance_calibrate, "--balance-calibrate")
