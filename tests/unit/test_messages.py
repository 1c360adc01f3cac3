"""Any text becomes one short, printable line in a log."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.messages import cleaned

PIECES = st.one_of(
    st.text(st.characters(), max_size=30),
    st.sampled_from(
        ["\x1b[31;1m", "\x1b]0;title\x07", "\x1b", "\r\n", "\u2028", "\u202e", "\u2066", "\ud800", "\x9b2J", "\0"]
    ),
)


@given(st.lists(PIECES, max_size=20).map("".join), st.integers(10, 300))
def test_every_text_becomes_one_short_printable_line(text: str, limit: int) -> None:
    line = cleaned(text, limit)
    assert len(line) <= limit and line.isprintable() and line == " ".join(line.split())
    line.encode("utf-8")
    assert cleaned(line, limit) == line


@given(st.text(st.characters(categories=["L", "N", "P"]), max_size=200))
def test_what_prints_stays(text: str) -> None:
    assert cleaned(text) == text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\r\n\tb\u2028c", "a b c"),
        ("\x1b[31mred\x1b[0m, \x1b]8;;http://x\x07a link\x1b]8;;\x07", "red, a link"),
        ("user\u202egnp.exe\0\x7f", "user?gnp.exe??"),
        ("lone \udc80 surrogate", "lone ? surrogate"),
        (KeyError("a name"), "'a name'"),
        (10**5000, "(its text cannot be shown)"),
        (b"\xff", r"b'\xff'"),
        ("", ""),
    ],
    ids=["white space", "sequences", "directions", "surrogate", "error", "number", "bytes", "nothing"],
)
def test_examples(text: object, line: str) -> None:
    assert cleaned(text) == line


def test_a_text_at_the_limit_is_whole() -> None:
    assert cleaned("x" * 200) == "x" * 200
    assert cleaned("x" * 201) == "x" * 196 + " ..."


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, RecursionError, MemoryError])
def test_a_text_that_fails_is_reported_all_the_same(error: type[BaseException]) -> None:
    class Hostile(Exception):
        def __str__(self) -> str:
            raise error(0)

    assert cleaned(Hostile()) == "(its text cannot be shown)"
