"""parser.py: a mistyped flag is recognized, and errors are short."""

import pytest

from megatron_balance.cli.arguments import parse_args
from tests.unit.commands import CPU


@pytest.mark.parametrize(
    ("flags", "meant"),
    [
        ("--num-layer 3", "--num-layer (did you mean --num-layers?) 3"),
        ("--hiden-size=3", "--hiden-size=3 (did you mean --hidden-size?)"),
        (
            "--seq-len 4 --ballance-policy top2",
            "--seq-length?) 4 --ballance-policy (did you mean --balance-policy?) top2",
        ),
        ("--moe-comm-alltoal 2dh", "--moe-comm-alltoal (did you mean --moe-comm-alltoall?) 2dh"),
        ("--moe-router-top-k 2", "--moe-router-top-k (did you mean --moe-router-topk?) 2"),
        ("--moe-balance-policy top2", "--moe-balance-policy (did you mean --balance-policy?) top2"),
        ("--balance-comm-codec int8", "--balance-comm-codec (did you mean --moe-comm-codec?) int8"),
        ("--codec=int8", "--codec=int8 (did you mean --moe-comm-codec?)"),
        ("--policy top2", "--policy (did you mean --balance-policy?) top2"),
        ("--moe-topk 2", "--moe-topk (did you mean --moe-router-topk?) 2"),
        ("--bogus", "arguments: --bogus\n"),
        ("--pictures-save-dir d", "arguments: --pictures-save-dir d\n"),
        ("--save-moments-interval 5", "arguments: --save-moments-interval 5\n"),
        ("-x", "arguments: -x\n"),
    ],
)
def test_a_mistyped_flag_is_recognized(flags: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(flags.split(), CPU)
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--bogus", "--num-layers many", "--optimizer lion", "--num-layer 3"])
def test_errors_do_not_print_every_flag(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse_args(flags.split(), CPU)
    assert error.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 2
    assert "--help" in lines[0] and flags.split()[0] in lines[1]
