"""Megatron-LM's own training program on CPU ranks, patched according to docs/pretrain_gpt.patch.

Only wheels of megatron-core 0.17 and later contain `megatron.training`, and none contains `pretrain_gpt.py`. This
module therefore does what that file does after the patched lines. It also replaces what needs a GPU, in addition to
device/cpu.py.
"""

import contextlib
import functools
import importlib
import os
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import typing_extensions

from megatron_balance.training.objective import token_loss
from tests.distributed.runs import Curve, Hosts

PATCH = Path(__file__).parents[2] / "docs" / "pretrain_gpt.patch"

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --num-experts 8 --moe-ffn-hidden-size 64 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0 "
    "--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear --log-interval 1 --eval-interval 2 --eval-iters 1 "
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-bias-gelu-fusion --no-masked-softmax-fusion --no-bias-dropout-fusion --no-rope-fusion"
)
"""The model of runs.BASE, without kernels that only GPUs have."""


def patched_lines() -> tuple[str, str]:
    """Return Python source: the imports that the patch adds, and `pretrain_gpt.py` from its parser to `pretrain(`."""
    _, imports, *rest = PATCH.read_text(encoding="utf-8").split("\n@@")
    added = [line[1:] for line in imports.splitlines() if line.startswith("+")]
    after = [line[1:] for part in rest for line in part.splitlines()[1:] if not line.startswith("-")]
    first = after.index("    args = parse_and_validate_args(")
    return "\n".join(added), textwrap.dedent("\n".join(after[first : after.index("    pretrain(")]))


@contextlib.contextmanager
def on_a_cpu(argv: list[str]) -> Iterator[SimpleNamespace]:
    """Yield `megatron.training` with substitutes for the launcher and the GPU; destroy its global state at the end."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # megatron.training needs Python 3.12
    names = ("arguments", "argument_utils", "initialize", "training", "global_vars")
    parts = SimpleNamespace(**{name: importlib.import_module(f"megatron.training.{name}") for name in names})
    ranks = {"RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size(), "LOCAL_RANK": dist.get_rank()}
    environment = {name: str(value) for name, value in ranks.items()} | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    start = functools.partial(parts.initialize.initialize_megatron, allow_no_cuda=True)
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch("sys.argv", ["pretrain_gpt.py", *argv]),
        mock.patch("torch.cuda.device_count", lambda: 1),
        mock.patch("torch.cuda.get_device_properties", lambda *_: SimpleNamespace(major=8, minor=0)),
        # The wheel contains the compiled helpers, but no Makefile
        mock.patch.object(parts.initialize, "_compile_dependencies", lambda: None),
        mock.patch.object(parts.training, "initialize_megatron", start),
    ):
        try:
            yield parts
        finally:
            parts.training.destroy_global_state()


class Tokens(torch.utils.data.Dataset):
    """Random tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(100, (self.length + 1,), generator=torch.Generator().manual_seed(index))
        mask = torch.ones(self.length)
        positions = torch.arange(self.length)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "loss_mask": mask, "position_ids": positions}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, functools.partial(token_loss, batch["loss_mask"])


def pretrain(flags: str, iterations: int) -> tuple[Curve, Hosts]:
    """Run Megatron-LM's `pretrain`, and return this rank's losses, gradient norms and added hosts by iteration."""
    imports, main = patched_lines()
    with on_a_cpu(f"{FLAGS} --train-iters {iterations} {flags}".split()) as megatron:
        from megatron.core.enums import ModelType

        steps = []
        hosts = []
        scope: dict[str, Any] = {"partial": functools.partial, "has_nvidia_modelopt": False, "add_modelopt_args": None}
        for module in (megatron.arguments, megatron.argument_utils):
            scope |= vars(module)
        exec(f"{imports}\n{main}", scope)
        model = scope["model_cfg"]
        args = scope["args"]
        # gloo still reads outputs that the schedule would free
        model.transformer.deallocate_pipeline_outputs = False

        def data(samples: Any, vp_stage: int | None = None) -> tuple[Tokens, Tokens, Tokens]:
            return Tokens(args.seq_length), Tokens(args.seq_length), Tokens(args.seq_length)

        def train_step(*step: Any, **named: Any) -> Any:
            outcome = original(*step, **named)
            balancer = scope["balancing"].balancer
            layers = balancer.report().values() if balancer is not None else ()
            steps.append((float(outcome[0].get("lm loss", 0.0)), float(outcome[5])))
            hosts.append(sum(layer.hosts_added for layer in layers))
            return outcome

        data.is_distributed = True
        original = megatron.training.train_step
        with mock.patch.object(megatron.training, "train_step", train_step):
            megatron.training.pretrain(scope["full_config"], data, ModelType.encoder_or_decoder, forward_step)
    return steps, hosts
