"""Train a GPT with mixture-of-experts layers: parse, build, train."""

import sys

from megatron_balance.device import cpu, quiet


def main(argv: list[str]) -> None:
    # Both before megatron.core is imported
    quiet.silence_expected_warnings()
    cpu.install(always="--dry-run" in argv)
    from megatron_balance import launch

    launch.pretrain(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
