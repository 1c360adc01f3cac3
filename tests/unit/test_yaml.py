"""`--yaml-cfg`: a file means the same as its flags on the command line, and everything else is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_balance.cli.arguments import parse_args, yaml_flags
from tests.unit.commands import CPU, PARSER

RUN = """
language_model:
  num_layers: 4
  hidden-size: 48
  inner: {num-attention-heads: 4, deeper: {seq_length: 32}}
training:
  micro-batch-size: 2
  train-iters: 20
  lr: 1e-3
num-experts: 8
mock-data: true
tokenizer-type: NullTokenizer
vocab-size: 127
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def flags_of(file: Path, text: str) -> list[str]:
    file.write_text(text, encoding="utf-8")
    return yaml_flags(PARSER, ["--yaml-cfg", str(file)])


def test_the_command_line_wins(file: Path) -> None:
    file.write_text(RUN, encoding="utf-8")
    config = parse_args(["--num-layers", "2", "--yaml-cfg", str(file), "--lr", "2e-3"], CPU).config
    assert (config.transformer.num_layers, config.optimizer.lr, config.transformer.num_moe_experts) == (2, 2e-3, 8)
    assert config.model.seq_length == 32 and config.data.mock_data


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("# nothing\n", []),
        ("swiglu: true", ["--swiglu"]),
        ("swiglu: no", []),
        ("no-bias-gelu-fusion: on", ["--no-bias-gelu-fusion"]),
        ("num_layers: 4", ["--num-layers=4"]),
        ("seed: 010", ["--seed=010"]),
        ("split: 969,30,1", ["--split=969,30,1"]),
        ("balance-profile: 'off'", ["--balance-profile=off"]),
        ("load: --save", ["--load=--save"]),
        ("load: a b", ["--load=a b"]),
        ("load:", []),
        ("data-path: [0.3, a, 0.7, b]", ["--data-path", "0.3", "a", "0.7", "b"]),
        ("rampup_batch_size:\n- 2\n- 2\n- 100", ["--rampup-batch-size", "2", "2", "100"]),
        ("saving: {seed: 1}", ["--seed=1"]),
        ("<<: {seed: 1}", ["--seed=1"]),
        ("override-opt_param-scheduler: true", ["--override-opt-param-scheduler"]),
        ("use-dist-ckpt: true", ["--use-dist-ckpt"]),
    ],
)
def test_forms(file: Path, text: str, expected: list[str]) -> None:
    assert flags_of(file, text) == expected
    PARSER.parse_args(expected)


REFUSED = {
    # text: parts of the message, in addition to the file
    "num-layer: 3": ("line 1: num-layer", "not a flag that a file can give (did you mean --num-layers?)"),
    "a:\n  b: 3": ("line 2: b", "not a flag"),
    "--lr: 3": ("--lr", "not a flag"),
    "help: true": ("help", "not a flag that a file can give"),
    "yaml-cfg: b.yaml": ("yaml-cfg", "not a flag that a file can give"),
    "use-cpu-initialization: true": ("use-cpu-initialization", "same experts"),
    "rl_use_sequence_packing: true": ("rl_use_sequence_packing", "reinforcement learning"),
    "lr: 1\nlr: 1": ("line 2: lr", "given as lr before"),
    "num-layers: 1\na: {num_layers: 1}": ("num_layers", "given as num-layers before"),
    "save-interval: 1\npersistent-save-interval: 2": ("persistent-save-interval", "given as save-interval"),
    "swiglu: 'true'": ("swiglu", "write true or false"),
    "swiglu: [true]": ("swiglu", "write true or false"),
    "num-layers: true": ("num-layers", "takes a number or text"),
    "balance-profile: off": ("balance-profile", "in quotes"),
    "num-layers: [1]": ("num-layers", "not this list"),
    "num-layers: {a: 1}": ("num-layers", "takes a number or text"),
    "data-path: []": ("data-path", "not this list"),
    "data-path: [a, --lr, 3]": ("data-path", "'--lr' in the list"),
    "- lr": ("not a mapping",),
    "? [a]\n: 1": ("a key", "not a name"),
    "lr: &x 1": ("line 1", "anchors and aliases"),
    "a: &a [x]\nb: [*a, *a]": ("line 1", "anchors and aliases"),
    "lr: !!python/object/apply:os.abort []": ("tags", "python/object/apply:os.abort"),
    "lr: 1\n---\nlr: 2": ("single document",),
    "a: " * 20 + "1": ("mapping values are not allowed",),
    "a: " + "[" * 1000 + "]" * 1000: ("nest too deep",),
    "#" * 70_000: ("larger than 64 KiB",),
    'lr: "\\UFFFFFFFF"': ("",),
    "lr: 'x": ("end of stream",),
}


@pytest.mark.parametrize(("text", "said"), REFUSED.items(), ids=[text[:40] for text in REFUSED])
def test_refused(file: Path, text: str, said: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        flags_of(file, text)
    message = str(error.value)
    assert message.startswith(f"--yaml-cfg {file}: ") and "\n" not in message and len(message) < 1000
    assert all(part in message for part in said), message


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("num-layers: 1.5", "--num-layers"),
        ("lr: nan", "--lr"),
        ("lr: 1e999", "--lr"),
        ("moe-aux-loss-coeff: [1, inf]", "--moe-aux-loss-coeff"),
        ("rampup-batch-size: [1, 2]", "--rampup-batch-size"),
        ("optimizer: lion", "--optimizer"),
        ("moe-layer-freq: print(1)", "--moe-layer-freq"),
    ],
)
def test_bad_values_name_file_and_flag(file: Path, text: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        flags_of(file, text)
    assert error.value.code == 2
    assert f"error: {file}: argument {flag}" in capsys.readouterr().err


numbers = st.integers(1, 10**6) | st.floats(1e-9, 1e9)
names = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1)
SETTINGS = {
    **dict.fromkeys(("num-layers", "micro_batch_size", "seed"), st.integers(0, 10**9)),
    **dict.fromkeys(("lr", "weight_decay", "clip-grad"), st.floats(0, 1e6)),
    **dict.fromkeys(("save", "tokenizer_model", "split"), names | st.text("abc -_'\"#:{}[]!&*", min_size=1)),
    **dict.fromkeys(("swiglu", "no-rope-fusion", "use_distributed_optimizer"), st.booleans()),
    "moe-aux-loss-coeff": st.lists(st.floats(0, 1), min_size=1),
    "rampup-batch-size": st.lists(st.integers(0, 99), min_size=3, max_size=3),
    "data_path": st.lists(names.filter(lambda name: not name.startswith(("-", "@"))), min_size=1),
}


def as_arguments(name: str, value: Any) -> list[str]:
    """Return the same setting as command-line arguments."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return [flag] if value else []
    return [flag, *map(str, value)] if isinstance(value, list) else [f"{flag}={value}"]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(given_flags=st.fixed_dictionaries({}, optional=SETTINGS), sections=st.booleans())
def test_equals_the_command_line(file: Path, given_flags: dict[str, Any], sections: bool) -> None:
    document = {f"section {index}": {name: value} for index, (name, value) in enumerate(given_flags.items())}
    text = yaml.safe_dump(document if sections else given_flags, sort_keys=False, allow_unicode=True)
    expected = [token for name, value in given_flags.items() for token in as_arguments(name, value)]
    assert vars(PARSER.parse_args(flags_of(file, text))) == vars(PARSER.parse_args(expected))
