"""What every rank needs, imported once by the server that ranks are forked from."""

from megatron_balance.device import cpu

cpu.install()

import megatron_balance.build  # noqa: E402, F401
