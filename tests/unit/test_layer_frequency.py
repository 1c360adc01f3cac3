"""`--moe-layer-freq`: list expressions mean the same as in Python, and everything else is refused."""

import argparse
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_balance.cli.layer_frequency import FREQUENCY_LIMIT, parse_layer_frequency

Value = int | list
Expression = tuple[str, Value | None]
"""An expression's text and its value; None if Python would refuse it."""

integers = st.integers(0, 9).map(lambda number: (str(number), number))
lists = st.lists(st.integers(0, 2), max_size=4).map(lambda entries: (str(entries), entries))


def combine(parts: tuple[Expression, str, Expression]) -> Expression:
    """Return `(left op right)` and its value, by Python's own operators on the operands' values."""
    (left_text, left), sign, (right_text, right) = parts
    text = f"({left_text}{sign}{right_text})"
    if left is None or right is None:
        return text, None
    try:
        return text, left + right if sign == "+" else left * right
    except TypeError:
        return text, None


expressions = st.recursive(
    integers | lists, lambda inner: st.tuples(inner, st.sampled_from(["+", "*"]), inner).map(combine), max_leaves=6
)


def within_limit(value: Value | None) -> bool:
    return value is not None and (value if isinstance(value, int) else len(value)) < FREQUENCY_LIMIT // 10


def valid(value: Value) -> bool:
    if isinstance(value, int):
        return value >= 1
    return value != [] and set(value) <= {0, 1}


def parse(text: str) -> Value | None:
    """Return the value, or None if the text is refused."""
    try:
        return parse_layer_frequency(text)
    except argparse.ArgumentTypeError:
        return None


@settings(max_examples=400)
@given(expressions.filter(lambda expression: within_limit(expression[1])))
def test_equals_python(expression: Expression) -> None:
    text, value = expression
    assert parse(text) == (value if valid(value) else None)


@settings(max_examples=200)
@given(expressions.filter(lambda expression: expression[1] is None))
def test_type_errors_are_refused(expression: Expression) -> None:
    assert parse(expression[0]) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        (" 12 ", 12),
        ("2+3*4", 14),
        ("6*49+7*49", 637),
        ("[1]", [1]),
        ("[0, 1,]", [0, 1]),
        ("([0]*1+[1]*23)", [0] + [1] * 23),
        ("2*([1]+[0]*2)", [1, 0, 0, 1, 0, 0]),
        ("[0]*0+[1]", [1]),
        ("[1*1,0+0]", [1, 0]),
    ],
)
def test_examples(text: str, expected: Value) -> None:
    assert parse_layer_frequency(text) == expected


HOSTILE = {
    "empty": "",
    "zero": "0",
    "negative": "-1",
    "not a layer mark": "[2]",
    "empty list": "[]",
    "nested list": "[[1]]",
    "float": "1.0",
    "boolean": "True",
    "string": "'1'",
    "ellipsis": "...",
    "name": "x",
    "attribute": "[1].__class__",
    "call": "__import__('os').abort()",
    "subscript": "[1][0]",
    "lambda": "lambda: 1",
    "power": "9**9**9**9",
    "division": "4//2",
    "starred": "[*[1]]",
    "tuple": "1,1",
    "f-string": "f'{1}'",
    "statement": "import os",
    "two lines": "1\n1",
    "null byte": "1\0",
    "huge product": "[1]*100000*100000",
    "huge list": "[1]*999999999999",
    "huge number": "99999*99999*99999",
    "doubling": "*".join(["[0,1]"] + ["2"] * 60),
    "too many digits": "9" * 5000,
    "deep parentheses": "(" * 5000 + "1" + ")" * 5000,
    "list of long lists": "[" + ",".join(["[0]*100000"] * 3000) + "]",
    "long sum": "+".join(["1"] * 20000),
    "many signs": "-" * 20000 + "1",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_input_is_refused_quickly(text: str) -> None:
    start = time.process_time()
    with pytest.raises(argparse.ArgumentTypeError) as error:
        parse_layer_frequency(text)
    assert time.process_time() - start < 5
    assert len(str(error.value)) < 500


def test_nothing_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[str] = []

    def spy(source: object, *args: object) -> None:
        evaluated.append(str(source))

    monkeypatch.setattr("builtins.eval", spy)
    monkeypatch.setattr("builtins.exec", spy)
    monkeypatch.setattr("builtins.print", spy)
    assert parse("print(1)") is None
    assert parse("[1]*2") == [1, 1]
    assert evaluated == []


ALPHABET = "0123456789[]()+*, -._abx:'\"\\{}=<>@\n\0"


@settings(max_examples=500)
@given(expressions, st.data())
def test_mutations_parse_or_are_refused(expression: Expression, data: st.DataObject) -> None:
    text = expression[0]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(len(text), start + 3)))
        text = text[:start] + data.draw(st.text(ALPHABET, max_size=3)) + text[stop:]
    value = parse(text)
    assert value is None or valid(value)
