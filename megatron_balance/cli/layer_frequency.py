"""Parser for `--moe-layer-freq`, which selects the layers that have experts."""

import argparse
import ast
import operator
from typing import Any

FREQUENCY_LIMIT = 100_000
"""Maximum length of a list that an expression may build."""

TEXT_LIMIT = 20_000
"""Maximum number of characters in an expression; a list for the deepest model that is allowed takes 12,000."""

_OPERATORS = {ast.Add: operator.add, ast.Mult: operator.mul}


def parse_layer_frequency(text: str) -> int | list[int]:
    """Parse an integer N, or a list expression of zeros and ones such as `([0]*1+[1]*23)`.

    Only integers, lists, `+` and `*` are accepted; nothing is evaluated as Python.

    Raises:
        argparse.ArgumentTypeError: the text is anything else.
    """
    try:
        if len(text) > TEXT_LIMIT:
            raise ValueError("too long")
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: give an integer or a list like ([0]*1+[1]*23)") from error
    if isinstance(value, int) and value >= 1:
        return value
    if isinstance(value, list) and value and all(entry in (0, 1) for entry in value):
        return value
    raise argparse.ArgumentTypeError(f"{text[:80]!r}: give a positive integer or a list of zeros and ones")


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_entry(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left = _evaluate(node.left)
        right = _evaluate(node.right)
        operate = _OPERATORS[type(node.op)]
        size = max(_length(left) + _length(right), _length(left) * _scale(right), _length(right) * _scale(left))
        if size > FREQUENCY_LIMIT or operate(_scale(left), _scale(right)) > FREQUENCY_LIMIT:
            raise ValueError("too long")
        return operate(left, right)
    raise ValueError("not allowed")


def _entry(node: ast.expr) -> int:
    value = _evaluate(node)
    if isinstance(value, list):
        raise ValueError("a list in a list")
    return value


def _length(value: int | list) -> int:
    return len(value) if isinstance(value, list) else 0


def _scale(value: int | list) -> int:
    return abs(value) if isinstance(value, int) else 1
