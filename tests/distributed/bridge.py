"""Megatron-Bridge's own training program on CPU ranks, with the function of docs/inside_megatron_bridge.md.

    torchrun --nproc-per-node 2 tests/distributed/bridge.py [flags of balancing]

Empty modules stand in for packages that need CUDA. The check for a GPU is skipped.
"""

import argparse
import functools
import importlib.abc
import importlib.machinery
import os
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_balance.device import cpu

PAGE = Path(__file__).parents[2] / "docs" / "inside_megatron_bridge.md"

ABSENT = ("transformer_engine", "modelopt", "nvidia_resiliency_ext", "datasets", "triton")
"""Packages that Megatron-Bridge imports and this program never uses."""

ITERATIONS = 6


class Nothing(type):
    """A class whose attributes and instances are such classes, too."""

    def __getattr__(cls, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})

    def __call__(cls, *args: Any, **kwargs: Any) -> "Nothing":
        return cls


class Empty(types.ModuleType):
    """A module with every name."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Nothing:
        return Nothing.__getattr__(Nothing, name)


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of ABSENT, and makes them empty."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        found = name.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Empty:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def without_a_gpu() -> None:
    """Import Megatron-Bridge where there is no GPU."""
    import torch

    # Before the stand-ins, so that megatron-core finds out what is missing
    for name in ("models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel"):
        importlib.import_module(f"megatron.core.{name}")
    sys.meta_path.insert(0, Absent())
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=8, minor=0)
    parts = {
        name: importlib.import_module(f"megatron.bridge.training.{name}") for name in ("initialize", "setup", "train")
    }
    # The wheel of megatron-core has the compiled helpers, but no Makefile
    parts["initialize"].compile_helpers = lambda: None
    parts["setup"].initialize_megatron = functools.partial(parts["initialize"].initialize_megatron, allow_no_cuda=True)
    parts["train"].get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **kwargs: None


def recipe(ranks: int) -> Any:
    """Return the configuration of a small model, without kernels that only GPUs have."""
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.training import config

    model = GPTModelProvider(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=32,
        vocab_size=128,
        num_moe_experts=8,
        moe_ffn_hidden_size=64,
        moe_router_topk=2,
        moe_aux_loss_coeff=1e-2,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=ranks,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        add_bias_linear=False,
        position_embedding_type="rope",
        transformer_layer_spec=local_layer_spec,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        # gloo still reads outputs that the schedule would free
        deallocate_pipeline_outputs=False,
    )
    return config.ConfigContainer(
        model=model,
        train=config.TrainingConfig(
            train_iters=ITERATIONS, micro_batch_size=2, global_batch_size=4 * ranks, eval_iters=1, eval_interval=100
        ),
        optimizer=config.OptimizerConfig(optimizer="adam", lr=1e-3, min_lr=1e-3, use_distributed_optimizer=False),
        scheduler=config.SchedulerConfig(
            lr_decay_style="constant",
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        ddp=config.DistributedDataParallelConfig(use_distributed_optimizer=False),
        dataset=config.MockGPTDatasetConfig(
            seq_length=32,
            random_seed=1,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=0,
            dataloader_type="single",
        ),
        logger=config.LoggerConfig(log_interval=1),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=127),
        checkpoint=config.CheckpointConfig(save=None, load=None),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        rng=config.RNGConfig(seed=1),
    )


def main() -> None:
    cpu.install()
    without_a_gpu()
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    scope: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0], scope)
    args = scope["add_balance_args"](argparse.ArgumentParser()).parse_args()
    args.log_interval = 2
    config = recipe(int(os.environ["WORLD_SIZE"]))
    scope["balance"](config, args)
    pretrain(config, forward_step)


if __name__ == "__main__":
    main()
