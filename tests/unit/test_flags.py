"""flags.py: dataclass fields as command-line flags, and Megatron's flags as its users know them."""

import argparse
import enum
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron_balance.cli.arguments import build_parser
from megatron_balance.config.flags import add_flag, add_flags, build, field_docs, flag_field


class Color(enum.Enum):
    RED = 1
    GREEN = 2


@dataclass(frozen=True)
class Base:
    """A dataclass with one field of every kind that a flag can express."""

    count: int = 3
    """How many,
    in two lines with 100% detail."""

    rate: float | None = None
    name: str = "a"
    """Its name."""


@dataclass(frozen=True)
class Example(Base):
    """Inherits, overrides a docstring and adds."""

    name: str = "b"
    """Another name."""

    quiet: bool = False
    """Say less."""

    warm_start: bool = True
    """Start warm."""

    mode: Literal["fast", "slow"] = "fast"
    """Speed."""

    level: Literal[1, 2] | None = None
    """Level."""

    sizes: list[int] | None = None
    """Sizes."""

    weights: tuple[float, ...] = (0.5, 0.5)
    """Weights."""

    color: Color = Color.RED
    """Color."""

    made: list[int] = field(default_factory=lambda: [7])
    """From a factory."""

    callback: Callable[[], None] | None = None
    """Has no text form."""

    either: int | str = 0
    """Has no single type."""

    spelled: bool = flag_field(True, arg_names=["--not-spelled"])
    """Spelled unlike its name."""

    _private: int = 0
    """Nobody's business."""


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, Example)
    return parser


def test_field_docs_are_one_line_and_the_subclass_wins() -> None:
    docs = field_docs(Example)
    assert docs["count"] == "How many, in two lines with 100% detail."
    assert docs["name"] == "Another name."
    assert field_docs(Base)["name"] == "Its name."
    assert "rate" not in docs


def test_added_fields_and_defaults(parser: argparse.ArgumentParser) -> None:
    fields = "count rate name quiet warm_start mode level sizes weights color made spelled"
    assert vars(parser.parse_args([])) == {name: getattr(Example(), name) for name in fields.split()}


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("--count 5", "count", 5),
        ("--rate 1e-3", "rate", 1e-3),
        ("--name x", "name", "x"),
        ("--quiet", "quiet", True),
        ("--no-warm-start", "warm_start", False),
        ("--disable-warm-start", "warm_start", False),
        ("--mode slow", "mode", "slow"),
        ("--level 2", "level", 2),
        ("--sizes 1 2 3", "sizes", [1, 2, 3]),
        ("--weights 1 2", "weights", [1.0, 2.0]),
        ("--color GREEN", "color", Color.GREEN),
        ("--made 1", "made", [1]),
        ("--not-spelled", "spelled", False),
    ],
)
def test_values(parser: argparse.ArgumentParser, text: str, name: str, expected: Any) -> None:
    assert getattr(parser.parse_args(text.split()), name) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("--count x", "--mode medium", "--level 3", "--color BLUE", "--sizes", "--warm-start", "--spelled"),
        *("--callback x", "--quie"),
    ],
)
def test_rejected(parser: argparse.ArgumentParser, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parser.parse_args(text.split())
    assert error.value.code == 2
    assert text.split()[0] in capsys.readouterr().err


def test_metadata_override_those_of_the_field() -> None:
    parser = argparse.ArgumentParser()
    assert add_flag(parser, Example, "count", "", {"arg_names": ["--how-many"], "default": 9})
    assert add_flag(parser, Example, "callback", "", {"type": str})
    assert not add_flag(parser, Example, "either", "")
    values = parser.parse_args(["--callback", "f"])
    assert (values.count, values.callback) == (9, "f")
    assert parser.parse_args(["--how-many", "4"]).count == 4


def test_shared_names_are_added_once() -> None:
    parser = argparse.ArgumentParser()
    assert add_flags(parser.add_argument_group("first"), Base) == ["count", "rate", "name"]
    added = add_flags(parser.add_argument_group("second"), Example)
    assert not {"count", "rate", "name"} & set(added)
    assert "quiet" in added


def test_build_takes_its_own_fields_and_given_ones_win() -> None:
    built = build(Base, {"count": 1, "name": "x", "foreign": 2}, name="y")
    assert built == Base(count=1, name="y")
    with pytest.raises(TypeError, match="foreign"):
        build(Base, {}, foreign=2)


RUN_FLAGS = build_parser()


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("--disable-bias-linear", "add_bias_linear", False),
        ("--no-align-param-gather", "align_param_gather", False),
        ("--accumulate-allreduce-grads-in-fp32", "grad_reduce_in_fp32", True),
        ("--moe-aux-loss-coeff 1e-2 1e-3", "moe_aux_loss_coeff", [1e-2, 1e-3]),
        ("--window-size 128,0", "window_size", (128, 0)),
        ("--window-size (128,0)", "window_size", (128, 0)),
        ("--moe-layer-freq ([0]*1+[1]*2)", "moe_layer_freq", [0, 1, 1]),
        ("--data-path 0.3 a 0.7 b", "data_path", ["0.3", "a", "0.7", "b"]),
        ("--rampup-batch-size 2 2 100", "rampup_batch_size", [2, 2, 100]),
        ("--exit-signal sigint", "exit_signal", signal.SIGINT),
        ("--exit-signal 15", "exit_signal", signal.SIGTERM),
        ("--exit-signal SIGUSR1", "exit_signal", signal.SIGUSR1),
        ("--attention-backend fused", "attention_backend", AttnBackend.fused),
        ("--exp-avg-dtype bf16", "exp_avg_dtype", "bf16"),
        ("--recompute-modules moe_act core_attn", "recompute_modules", ["moe_act", "core_attn"]),
    ],
)
def test_megatron_values(text: str, name: str, expected: Any) -> None:
    assert getattr(RUN_FLAGS.parse_args(text.split()), name) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("--exit-signal SIGIN", "--exit-signal 99", "--window-size 128", "--window-size a,b"),
        *("--rampup-batch-size 1 2", "--num-layer 3"),
    ],
)
def test_megatron_rejected(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        RUN_FLAGS.parse_args(text.split())
    assert text.split()[0] in capsys.readouterr().err


def test_every_flag_has_help() -> None:
    without = [action.option_strings for action in RUN_FLAGS._actions if not action.help]
    assert without == []
