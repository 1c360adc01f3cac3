"""Links in docs/ to the line of a definition, such as [`Class.method`](../package/file.py#L12).

`python -m tests.line_links` corrects their line numbers. It exits with status 1 and names the links whose definition it
does not find.
"""

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

LINK = re.compile(r"\[`([\w.]+)`\]\(([\w./-]+\.py)#L(\d+)\)")


class Link(NamedTuple):
    """A link, and the line where its definition starts (None: there is no such definition)."""

    name: str
    target: str
    line: int
    actual: int | None


@functools.cache
def definitions(source: str) -> dict[str, int]:
    """Return the line of every class, function and method of a module, by qualified name."""

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, int]]:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield prefix + node.name, node.lineno
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")

    return dict(walk(ast.parse(source).body, ""))


def links(text: str, folder: Path) -> Iterator[tuple[re.Match[str], Link]]:
    """Yield every link of a page in `folder`."""
    for match in LINK.finditer(text):
        name, target, line = match.groups()
        path = folder / target
        found = definitions(path.read_text(encoding="utf-8")) if path.is_file() else {}
        yield match, Link(name, target, int(line), found.get(name))


def corrected(text: str, folder: Path) -> str:
    """Return the page with the correct line numbers of all definitions that exist."""
    pieces = []
    end = 0
    for match, link in links(text, folder):
        pieces += [text[end : match.start(3)], str(link.actual or link.line)]
        end = match.end(3)
    return "".join([*pieces, text[end:]])


def main() -> int:
    missing = []
    for page in sorted((ROOT / "docs").glob("**/*.md")):
        text = page.read_text(encoding="utf-8")
        missing += [
            f"{page.name}: {link.target}: no {link.name}" for _, link in links(text, page.parent) if not link.actual
        ]
        page.write_text(corrected(text, page.parent), encoding="utf-8")
    print(*missing, sep="\n", end="\n" if missing else "")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())
