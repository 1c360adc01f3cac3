"""Groups of `--help`, from flag_groups.yaml: the fields that have flags, and the help of megatron-core's fields."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import yaml
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_balance.comm.codecs import CODECS
from megatron_balance.comm.registry import ALL_TO_ALLS
from megatron_balance.config import run_config as ours
from megatron_balance.config.flags import field_docs, with_values
from megatron_balance.planning.policies import registered

MEGATRON_CLASSES = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)

DIVIDED = (ours.ModelConfig, ours.LaunchConfig, *MEGATRON_CLASSES)
"""Dataclasses whose fields are divided among groups. The first class with a field defines the field's flag."""

NAMED_VALUES: dict[str, Callable[[], Mapping[str, type]]] = {
    "balance_policy": registered,
    "moe_comm_alltoall": lambda: ALL_TO_ALLS,
    "moe_comm_codec": lambda: CODECS,
}
"""Fields whose values name classes. The help lists every name with the summary of the class's docstring."""

OUR_GROUPS = {
    "expert balancing (megatron_balance)": ours.BalanceConfig,
    "expert communication (megatron_balance)": ours.CommConfig,
}
"""Groups that other programs can also have (app/integrate.py)."""

_TABLE = yaml.load(Path(__file__).with_suffix(".yaml").read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))

GROUPS: dict[str, type | dict[str, str | None]] = OUR_GROUPS | {
    title: getattr(ours, shown) if isinstance(shown, str) else shown for title, shown in _TABLE.items()
}
"""Group title -> a dataclass whose fields the group shows, or fields of divided dataclasses -> help, which is None
where the field's docstring serves as help."""

HELP = {name: text for shown in GROUPS.values() if isinstance(shown, dict) for name, text in shown.items() if text}


def field_help(cls: type) -> dict[str, str]:
    """Return the help of a dataclass's fields, by name."""
    docs = field_docs(cls)
    if cls in MEGATRON_CLASSES:
        return {name: HELP.get(name) or _first_sentence(doc) for name, doc in docs.items()} | HELP
    named = {name: with_values(docs[name], known()) for name, known in NAMED_VALUES.items() if name in docs}
    return docs | named


def _first_sentence(doc: str) -> str:
    """Return the first sentence of one of megatron-core's docstrings, without an initial "If true"."""
    text = re.sub(r"^(If set to True|If true|If set|Whether to),? ", "", doc, flags=re.IGNORECASE)
    sentence = re.split(r"(?<=\.)\s", text, maxsplit=1)[0].rstrip(".")
    return f"{sentence[:1].upper()}{sentence[1:]}."
