"""The stand-in for Transformer Engine's FusedAdam, without its check that tensors are on a device."""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

from megatron.core import optimizer as core
from megatron.core.optimizer import distrib_optimizer, optimizer_config

from tests.hostcuda.packages.te.transformer_engine.pytorch import optimizers
from tests.hostcuda.packages.te.transformer_engine.pytorch.optimizers.multi_tensor_apply import Lists, adam

MODULE = "transformer_engine.pytorch.optimizers"


def _adam_anywhere(_chunk_size: int, _overflow: Any, tensor_lists: Lists, *hyper: Any) -> None:
    adam(tensor_lists, hyper)


class FusedAdam(optimizers.FusedAdam):
    """FusedAdam for tensors on any device."""

    multi_tensor_adam = staticmethod(_adam_anywhere)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Let megatron-core find Transformer Engine's optimizers, and nothing else of that package."""
    module = ModuleType(MODULE)
    module.FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with (
        mock.patch.dict(sys.modules, {MODULE: module}),
        mock.patch.multiple(core, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False, is_te_min_version=lambda *_: True),
        mock.patch.multiple(distrib_optimizer, Adam=FusedAdam, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True),
        mock.patch.object(optimizer_config, "is_te_min_version", lambda *_: True),
    ):
        yield
