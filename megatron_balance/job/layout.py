"""The process groups of a parallel layout, as megatron-core creates them."""

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_balance.job.groups import backend_minutes


def build_groups(
    config: TransformerConfig, seed: int, timeout_minutes: float = 10, order: str = "tp-cp-ep-dp-pp"
) -> ProcessGroupCollection:
    """Create the process groups of `config`'s layout and seed this rank's random number generators.

    megatron-core also stores the groups in `parallel_state`; call `destroy_groups` before building another layout.
    `order` lists the layout's dimensions, starting with the one in which neighboring ranks differ.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        hierarchical_context_parallel_sizes=config.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
        order=order,
        distributed_timeout_minutes=backend_minutes(timeout_minutes),  # pyright: ignore[reportArgumentType]
    )
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed, force_reset_rng=True)
    return ProcessGroupCollection.use_mpu_process_groups()


def destroy_groups() -> None:
    """Destroy the groups of the current layout."""
    parallel_state.destroy_model_parallel()
