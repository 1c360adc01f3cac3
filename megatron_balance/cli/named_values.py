"""Help of the flags whose value is a name that a package registers: a line for each name."""

from collections.abc import Mapping

from megatron_balance.comm.codecs import CODECS
from megatron_balance.comm.registry import ALL_TO_ALLS
from megatron_balance.config.flags import field_docs, with_values
from megatron_balance.config.run_config import BalanceConfig, CommConfig
from megatron_balance.planning.policies import registered


def named_values() -> dict[str, dict[str, str]]:
    """Return the help of each such flag, as metadata for `add_flags`; a line is the summary of a class's docstring."""
    known: dict[str, Mapping[str, type]] = {
        "balance_policy": registered(),
        "moe_comm_alltoall": ALL_TO_ALLS,
        "moe_comm_codec": CODECS,
    }
    docs = field_docs(BalanceConfig) | field_docs(CommConfig)
    return {field: {"help": with_values(docs[field], names)} for field, names in known.items()}
