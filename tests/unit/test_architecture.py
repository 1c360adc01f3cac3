"""Architecture of the package: which part may import which, and how long files and functions may be."""

import ast
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import networkx
import pytest

import megatron_balance

PACKAGE = Path(megatron_balance.__file__).parent
NAME = PACKAGE.name

LEVELS = (
    {"messages"},
    {"files", "config", "job", "device"},
    {"profile", "placement", "workloads"},
    {"cost"},
    {"planning", "observe", "comm", "kernels"},
    {"flow", "timeline"},
    {"measure", "training", "simulate"},
    {"checkpoint"},
    {"cli", "build"},
    {"app", "convert"},
    {"__init__"},
)
"""Rooms of the package, lowest first: a room imports from its own level and from below."""

STRANGERS = {("flow", "timeline"), ("timeline", "flow")}
"""Rooms that do not import each other: they share only one value, the Placement."""

MAX_ROOT_MODULES = 2
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80

FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path.parent for path in PACKAGE.glob("*/**/__init__.py"))


def part_of(path: Path) -> str:
    """Return the top-level member of the package that contains a file."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def level_of(part: str) -> int:
    levels = [level for level, parts in enumerate(LEVELS) if part in parts]
    assert len(levels) == 1, f"{part}: give it one place in LEVELS"
    return levels[0]


@functools.cache
def imports(source: str) -> tuple[str, ...]:
    """Return the full names of all imports anywhere in a file."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


def forbidden(part: str, source: str) -> list[str]:
    """Return the imports that a file of `part` must not have."""
    own = [name for name in imports(source) if name.split(".")[0] == NAME]
    targets = {name: name.split(".")[1] for name in own if "." in name}
    return [
        name for name, target in targets.items() if level_of(target) > level_of(part) or (part, target) in STRANGERS
    ]


def uses_distributed(source: str) -> bool:
    """Return whether a file imports torch.distributed or reaches it as an attribute of torch."""
    imported = any(name.startswith("torch.distributed") for name in imports(source))
    attributes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
    return imported or any(ast.unparse(node) == "torch.distributed" for node in attributes)


def long_functions(source: str, limit: int) -> list[str]:
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {node.name: node.end_lineno - node.lineno + 1 for node in functions}
    return [f"{name}: {length} lines" for name, length in lengths.items() if length > limit]


def test_imports_point_down() -> None:
    for path in FILES:
        assert forbidden(part_of(path), path.read_text(encoding="utf-8")) == [], path


def circles(imported: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the modules (or rooms) that import each other, directly or indirectly."""
    graph = networkx.DiGraph((one, other) for one, others in imported.items() for other in others if one != other)
    return sorted(
        sorted(component) for component in networkx.strongly_connected_components(graph) if len(component) > 1
    )


@functools.cache
def modules_imported() -> dict[str, set[str]]:
    """Return every module of the package with its imports, including imports only for types."""
    names = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES}
    found = {}
    for module, path in names.items():
        own = [name for name in imports(path.read_text(encoding="utf-8")) if name.split(".")[0] == NAME]
        found[module] = {name if name in names else name.rpartition(".")[0] for name in own} & names.keys()
    return found


def test_no_modules_import_each_other() -> None:
    assert circles(modules_imported()) == []


def test_no_rooms_import_each_other() -> None:
    rooms: dict[str, set[str]] = {}
    for module, others in modules_imported().items():
        rooms.setdefault(module.split(".")[1], set()).update(other.split(".")[1] for other in others)
    assert circles(rooms) == []


@pytest.mark.parametrize("room", ROOMS, ids=[str(path.relative_to(PACKAGE)) for path in ROOMS])
def test_the_docstring_of_a_room_has_a_line_for_each_module(room: Path) -> None:
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    listed = re.findall(r"^ *(\w+(?:, \w+)*)(?:\.py)? {2,}\S", docstring, re.MULTILINE)
    named = {name for names in listed for name in names.split(", ")}
    assert {path.stem for path in room.glob("*.py")} - {"__init__"} <= named


def test_the_root_has_no_modules_of_its_own() -> None:
    assert len([path for path in FILES if path.parent == PACKAGE]) <= MAX_ROOT_MODULES


def test_sizes() -> None:
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= MAX_FILE_LINES, path
        assert long_functions(source, MAX_FUNCTION_LINES) == [], path


PURE = [path for room in ("placement", "cost", "planning") for path in sorted((PACKAGE / room).rglob("*.py"))]


def test_decisions_are_pure() -> None:
    assert [path for path in PURE if uses_distributed(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    ("part", "source", "expected"),
    [
        ("training", "from megatron_balance.flow.layer import BalancedMoELayer", []),
        ("flow", "from megatron_balance.timeline import actions", ["megatron_balance.timeline.actions"]),
        ("timeline", "import megatron_balance.flow.plan", ["megatron_balance.flow.plan"]),
        ("timeline", "from megatron_balance.placement.placement import Placement", []),
        ("comm", "def f():\n from megatron_balance.flow import plan", ["megatron_balance.flow.plan"]),
        ("config", "from megatron_balance.build import run", ["megatron_balance.build.run"]),
        ("training", "import torch, megatron.core", []),
        ("build", "from megatron_balance.flow import layer", []),
    ],
)
def test_the_import_rule_itself(part: str, source: str, expected: list[str]) -> None:
    assert forbidden(part, source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch", False),
        ("import torch.distributed as dist", True),
        ("from torch import distributed", True),
        ("from torch.distributed import nn", True),
        ("import torch\ntorch.distributed.get_rank()", True),
    ],
)
def test_the_purity_rule_itself(source: str, expected: bool) -> None:
    assert uses_distributed(source) == expected


def test_the_circle_rule_itself() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"d"}}) == [["a", "b", "c"]]


def test_the_size_rule_itself() -> None:
    assert long_functions("def f():\n x = 1\n y = 2\ndef g():\n pass", limit=2) == ["f: 3 lines"]
