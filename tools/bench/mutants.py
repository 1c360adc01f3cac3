"""Measures how many deliberate mistakes the tests catch: 200 changes of single expressions, drawn with a fixed seed.

    python tools/bench/mutants.py draw                       # writes tools/bench/mutants.json
    python tools/bench/mutants.py reach --work /tmp/mutants  # which tests execute each changed line (one whole suite)
    python tools/bench/mutants.py run --work /tmp/mutants    # runs those tests on each mutant, quickest first

A mutant is a line of a function, before and after the change, so it remains valid when other lines change. `draw`
creates a new list; after a move or rename, edit the list. `reach` and `run` work on copies of the committed tree. A
mutant is caught if a test that executes its line fails or exceeds its time limit.
"""

import argparse
import ast
import collections
import concurrent.futures
import dataclasses
import json
import pathlib
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
LIST = pathlib.Path(__file__).with_name("mutants.json")
SEED = 27
COUNT = 200
PLACES = (
    "flow/*.py", "comm/*.py", "placement/**/*.py", "timeline/*.py", "training/checkpoint*.py", "checkpoint/manifest.py",
    "checkpoint/writer.py", "checkpoint/safe_pickle.py", "checkpoint/run_state.py",
    "checkpoint/saved_flags.py", "checkpoint/loading.py", "checkpoint/lease*.py",
    "checkpoint/save_directory.py", "training/optimizer_state.py",
)  # fmt: skip
"""Files that mutants are drawn from, relative to megatron_balance/."""

TEST_SECONDS = 120
"""Time limit of one test of a mutant: many mistakes make ranks wait for each other."""

SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in",
    ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is", ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*",
    ast.FloorDiv: "*", ast.Mod: "+", ast.And: "or", ast.Or: "and",
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A changed line: `before` becomes `after` in the `nth` such line of `function` in `file`."""

    file: str
    function: str
    nth: int
    before: str
    after: str

    def line(self, tree: pathlib.Path) -> int:
        """Return the index of the mutant's line in its file in `tree`.

        Raises:
            LookupError: the function or its line does not exist any more.
        """
        source = (tree / self.file).read_text()
        for name, function in functions(ast.parse(source)):
            if name == self.function:
                lines = source.splitlines()
                inside = range(function.lineno - 1, function.end_lineno or 0)
                found = [number for number in inside if lines[number].strip() == self.before]
                if len(found) > self.nth:
                    return found[self.nth]
        raise LookupError(f"{self.file}: {self.function} has no line {self.nth} that reads {self.before!r}")

    def apply(self, tree: pathlib.Path) -> None:
        """Change the file in `tree`."""
        number = self.line(tree)
        path = tree / self.file
        lines = path.read_text().splitlines()
        lines[number] = lines[number].replace(self.before, self.after)
        path.write_text("\n".join(lines) + "\n")


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield every function and method that is not nested in another function, with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a function that run when it is called, without asserts, raised errors and docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assert | ast.Raise | ast.arguments | ast.AnnAssign):
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(node, ast.FunctionDef) and (child is node.returns or child in node.decorator_list):
            continue
        yield child
        yield from expressions(child)


def changes(node: ast.AST, source: str) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield the possible replacements of one node: the node to replace, and the new text."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in SWAPS:
            yield node, f"{text(left)} {SWAPS[type(operator)]} {text(right)}"
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in SWAPS:
            yield node, f"{text(left)} {SWAPS[type(operator)]} {text(right)}"
        case ast.BoolOp(op=operator, values=[first, second]):
            yield node, f"{text(first)} {SWAPS[type(operator)]} {text(second)}"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, text(operand)
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Call(func=ast.Name(id=name) as called) if name in CALLS:
            yield called, CALLS[name]
        case ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.If(test=test) | ast.IfExp(test=test):
            yield test, f"not ({text(test)})"


def candidates(file: pathlib.Path, root: pathlib.Path) -> Iterator[Mutant]:
    """Yield every mutant of a file whose change fits in one line."""
    source = file.read_text()
    lines = source.splitlines()
    for name, function in functions(ast.parse(source)):
        for node in expressions(function):
            for place, text in changes(node, source):
                if place.lineno != place.end_lineno or not text:
                    continue
                number = place.lineno - 1
                line = lines[place.lineno - 1]
                # Columns of the syntax tree count bytes, which equal characters in ASCII lines
                after = line[: place.col_offset] + text + line[place.end_col_offset :]
                if not line.isascii() or after == line:
                    continue
                same = [at for at in range(function.lineno - 1, number) if lines[at].strip() == line.strip()]
                yield Mutant(str(file.relative_to(root)), name, len(same), line.strip(), after.strip())


def draw(count: int = COUNT, seed: int = SEED) -> list[Mutant]:
    """Draw `count` mutants of different lines."""
    package = ROOT / "megatron_balance"
    files = sorted({file for place in PLACES for file in package.glob(place)})
    every = [mutant for file in files for mutant in candidates(file, ROOT)]
    random.Random(seed).shuffle(every)
    by_line = {(mutant.file, mutant.function, mutant.nth, mutant.before): mutant for mutant in every}
    return sorted(list(by_line.values())[:count], key=lambda mutant: (mutant.file, mutant.function, mutant.before))


def copy_tree(target: pathlib.Path) -> None:
    """Clone the committed tree, with the files that tests keep between runs."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(target)], check=True)
    for kept in (".cache", ".venv"):
        if (ROOT / kept).exists() and not (target / kept).exists():
            (target / kept).symlink_to(ROOT / kept)


RECORDER = '''
"""Records which test executes which mutant's line; every process of a test inherits the file of the current test."""

import mmap, os

WORK = {work!r}
_name = os.environ.get("PYTEST_XDIST_WORKER", "main")
_path = f"{{WORK}}/current-{{_name}}"
if not os.path.exists(_path):
    with open(_path, "wb") as file:
        file.write(bytes(8))
with open(_path, "r+b") as _file:
    _current = mmap.mmap(_file.fileno(), 8)
_seen = set()


def begin(number):
    _current[:] = number.to_bytes(8, "little")


def hit(mutant):
    key = int.from_bytes(_current[:], "little"), mutant
    if key not in _seen:
        _seen.add(key)
        with open(f"{{WORK}}/hits-{{_name}}", "a") as file:
            file.write(f"{{key[0]}} {{key[1]}}\\n")
'''

PLUGIN = """

import itertools as _itertools
from megatron_balance import _recorder

_numbers = _itertools.count(1)


def pytest_runtest_logstart(nodeid, location):
    number = next(_numbers)
    _recorder.begin(number)
    with open(f"{_recorder.WORK}/tests-{_recorder._name}", "a") as file:
        file.write(f"{number}\\t{nodeid}\\n")


def pytest_runtest_logreport(report):
    with open(f"{_recorder.WORK}/durations-{_recorder._name}", "a") as file:
        file.write(f"{report.nodeid}\\t{report.duration}\\t{report.outcome}\\n")
"""


def statement_around(source: str, line: int) -> ast.stmt:
    """Return the innermost statement around a line before which a statement can be inserted (not an `elif`)."""
    lines = source.splitlines()
    found = None
    for node in ast.walk(ast.parse(source)):  # outer nodes come first
        for part in ast.iter_child_nodes(node):
            if not isinstance(part, ast.stmt) or lines[part.lineno - 1].lstrip().startswith("elif"):
                continue
            if part.lineno <= line <= (part.end_lineno or 0):
                found = part
    assert found is not None
    return found


def instrument(tree: pathlib.Path, mutants: list[Mutant], work: pathlib.Path) -> None:
    """Make every mutant's line in `tree` record that it is executed."""
    (tree / "megatron_balance/_recorder.py").write_text(RECORDER.format(work=str(work)))
    with (tree / "tests/conftest.py").open("a") as conftest:
        conftest.write(PLUGIN)
    marks: dict[str, list[tuple[int, int, int]]] = collections.defaultdict(list)
    for number, mutant in enumerate(mutants):
        statement = statement_around((tree / mutant.file).read_text(), mutant.line(tree) + 1)
        marks[mutant.file].append((statement.lineno, statement.col_offset, number))
    for file, places in marks.items():
        path = tree / file
        lines = path.read_text().splitlines()
        for at, column, number in sorted(places, reverse=True):
            hit = f'__import__("megatron_balance._recorder")._recorder.hit({number})'
            lines.insert(at - 1, " " * column + hit)
        path.write_text("\n".join(lines) + "\n")


def pytest_in(tree: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a tree."""
    command = ["env", "OMP_NUM_THREADS=1", f"PYTHONPATH={tree}", "PYTHONDONTWRITEBYTECODE=1", sys.executable, "-m"]
    command += ["pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=tree, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def reach(mutants: list[Mutant], work: pathlib.Path) -> None:
    """Run the whole suite once and write, for each mutant, the tests that execute its line, quickest first."""
    work.mkdir(parents=True)
    tree = work / "reach"
    copy_tree(tree)
    instrument(tree, mutants, work)
    (work / "reach.log").write_text(pytest_in(tree, "-q", "-n", "2", "--dist", "worksteal").stdout)
    names: dict[tuple[str, str], str] = {}
    seconds: dict[str, float] = collections.defaultdict(float)
    # The controller of pytest's workers receives all reports a second time
    for file in work.glob("durations-gw*"):
        for line in file.read_text().splitlines():
            name, duration, outcome = line.rsplit("\t", 2)
            seconds[name] += float(duration)
            if outcome == "failed":
                seconds[name] = float("inf")
    for file in work.glob("tests-*"):
        worker = file.name.partition("-")[2]
        for line in file.read_text().splitlines():
            number, name = line.split("\t", 1)
            names[worker, number] = name
    reached: list[set[str]] = [set() for _ in mutants]
    for file in work.glob("hits-*"):
        worker = file.name.partition("-")[2]
        for line in file.read_text().splitlines():
            number, mutant = line.split()
            name = names.get((worker, number))
            if name is not None and seconds[name] != float("inf"):
                reached[int(mutant)].add(name)
    tests = [sorted(([name, round(seconds[name], 3)] for name in found), key=lambda pair: pair[1]) for found in reached]
    (work / "reached.json").write_text(json.dumps(tests, indent=1))


def run_one(number: int, mutant: Mutant, tests: list[tuple[str, float]], tree: pathlib.Path, budget: float) -> dict:
    """Run the tests of a mutant that fit in `budget` seconds, until one fails."""
    chosen = []
    spent = 0.0
    for name, seconds in tests:
        if spent + seconds > budget:
            break
        chosen.append(name)
        spent += seconds
    started = time.monotonic()
    result = {"mutant": number, "tests": len(chosen), "left_out": len(tests) - len(chosen)}
    if not chosen:
        return result | {"caught": False, "by": "no test executes it" if not tests else "no time for its tests"}
    mutant.apply(tree)
    try:
        (tree / "chosen.txt").write_text("\n".join(chosen))
        run = pytest_in(tree, "-x", "-q", f"--timeout={TEST_SECONDS}", "@chosen.txt")
    finally:
        subprocess.run(["git", "checkout", "--quiet", "megatron_balance"], cwd=tree, check=True)
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    by = failed[0] if failed else run.stdout.splitlines()[-1]
    return result | {"caught": run.returncode != 0, "by": by, "seconds": round(time.monotonic() - started, 1)}


def run(mutants: list[Mutant], work: pathlib.Path, jobs: int, budget: float) -> None:
    """Run the tests of all mutants that have no result yet, and append each result to `work`/results.jsonl."""
    reached = json.loads((work / "reached.json").read_text())
    results = work / "results.jsonl"
    known = {json.loads(line)["mutant"] for line in results.read_text().splitlines()} if results.exists() else set()
    trees = [work / f"tree{job}" for job in range(jobs)]
    for tree in trees:
        if not tree.exists():
            copy_tree(tree)
    free = list(trees)

    def task(number: int) -> dict:
        tree = free.pop()
        try:
            return run_one(number, mutants[number], reached[number], tree, budget)
        finally:
            free.append(tree)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(task, [number for number in range(len(mutants)) if number not in known]):
            with results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(json.dumps(result), flush=True)
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    print(f"{sum(line['caught'] for line in lines)} of {len(lines)} mutants are caught")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("draw", "reach", "run"))
    parser.add_argument("--work", type=pathlib.Path, help="a folder for the copies and results")
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants tested at the same time")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of tests for one mutant")
    options = parser.parse_args()
    if options.action == "draw":
        LIST.write_text(json.dumps([dataclasses.asdict(mutant) for mutant in draw()], indent=1) + "\n")
        return
    mutants = [Mutant(**entry) for entry in json.loads(LIST.read_text())]
    if options.action == "reach":
        reach(mutants, options.work)
    else:
        run(mutants, options.work, options.jobs, options.budget)


if __name__ == "__main__":
    main()
