"""Train a GPT with mixture-of-experts layers: parse, build, train."""

import sys

from megatron_balance.job import launcher


def main(argv: list[str]) -> None:
    # Before torch is imported, which takes seconds
    launcher.follow()
    from megatron_balance.device import cpu, quiet

    # Both before megatron.core is imported
    quiet.silence_expected_warnings()
    cpu.install(always="--dry-run" in argv)
    from megatron_balance.app import launch

    launch.pretrain(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
