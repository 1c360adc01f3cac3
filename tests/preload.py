"""What every rank needs, imported once by the server that ranks are forked from."""

import importlib

from megatron_balance.device import cpu, quiet

quiet.silence_expected_warnings()
cpu.install()
importlib.import_module("megatron_balance.build")
