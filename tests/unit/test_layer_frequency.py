"""`--moe-layer-freq`: list expressions mean the same as in Python, and everything else is refused."""

import argparse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_balance.cli.arguments import _layers

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


def parse(text: str) -> Value | None:
    """Return the value, or None if the text is refused."""
    try:
        return _layers(text)
    except argparse.ArgumentTypeError as error:
        assert len(str(error)) < 500
        return None


@settings(max_examples=150)
@given(expressions)
def test_equals_python(expression: Expression) -> None:
    text, value = expression
    valid = value is not None and (value >= 1 if isinstance(value, int) else value != [] and set(value) <= {0, 1})
    assert parse(text) == (value if valid else None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1),
        (" 12 ", 12),
        ("2+3*4", 14),
        ("[0, 1,]", [0, 1]),
        ("([0]*1+[1]*23)", [0] + [1] * 23),
        ("2*([1]+[0]*2)", [1, 0, 0, 1, 0, 0]),
        ("[1*1,0+0]", [1, 0]),
    ],
)
def test_examples(text: str, expected: Value) -> None:
    assert _layers(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "[2]", "[]", "[[1]]", "1.0", "True", "'1'", "...", "x", "[1].__class__", "[1][0]", "1,1"),
        *("__import__('os').abort()", "lambda: 1", "9**9**9**9", "4//2", "[*[1]]", "f'{1}'", "1\n1", "1\0"),
        *("[1]*999999999999", "9" * 5000, "(" * 5000 + "1" + ")" * 5000, "-" * 20000 + "1"),
    ],
    ids=lambda text: text[:20],
)
def test_everything_else_is_refused(text: str) -> None:
    assert parse(text) is None
