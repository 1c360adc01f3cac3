"""The documents: their examples run, and the files, names, flags and lines that they mention exist."""

import functools
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from megatron_balance.cli.arguments import build_parser
from megatron_balance.cli.upstream_flags import refusal
from megatron_balance.cost.model import CostModel
from megatron_balance.placement.placement import Placement
from megatron_balance.planning.policies import load_policy
from megatron_balance.profile.cluster_profile import builtin
from megatron_balance.workloads.synthetic import load_matrix
from tests import features, line_links
from tests.unit.test_architecture import LEVELS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "megatron_balance"
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
GENERATED = ("flags.md", "mistakes.md")
PAGES = [README, CONTRIBUTING, *sorted(page for page in DOCS.glob("**/*.md") if page.name not in GENERATED)]
"""All pages except those with generated tables."""

every_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])

OUR_FILE = re.compile(
    r"(tests|tools|scripts|configs|docs|megatron_balance)/[\w./-]+|[\w./-]+\.(py|sh|yaml|args|md|toml|cpp)"
)
THEIR_FILES = {"pretrain_gpt.py", "loop.py", "bridge.py"}

THEIR_FLAGS = {
    *("--nproc-per-node", "--max-restarts", "--rdzv-id"),  # torchrun
    *("--nodes", "--requeue", "--signal"),  # SLURM
    *("--num-nodes", "--env"),  # SkyPilot
    *("--target", "--build-arg", "--rm", "--gpus", "--ipc", "--device", "--network", "--ulimit"),  # Docker
    *("--no-build-isolation", "--format", "--exclude"),  # pip
    *("--capture-range", "--capture-range-end"),  # nsys
}

OUR_CLASS = re.compile(r"[A-Z][a-z]+[A-Z]\w+(\.\w+)?|[A-Z][a-z]+\.[a-z_]\w+")
THEIR_CLASSES = {"MoELayer", "ProfilerStep", "PyTorchJob", "ValueError", "SystemExit"}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the code blocks of a page."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(text: str) -> list[str]:
    """Return the commands of a page's shell blocks, without comments, each on one line."""
    lines = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    return [line.partition(" #")[0] for line in lines if not line.startswith("#")]


def in_backticks(text: str) -> list[str]:
    """Return the inline code of a page, word by word."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [word for code in re.findall(r"`([^`\n]+)`", prose) for word in re.findall(r"[\w./-]+", code)]


def declared(paths: Iterable[Path]) -> set[str]:
    """Return the flags that programs declare in their source."""
    return {flag for path in paths for flag in re.findall(r'\(\s*"(--[\w-]+)"', text_of(path))}


OUR_FLAGS = set(build_parser()._option_string_actions)
TOOL_FLAGS = declared([*(ROOT / "tools").rglob("*.py"), ROOT / "tests/conftest.py", ROOT / "tests/page_commands.py"])


@functools.cache
def classes() -> set[str]:
    """Return the qualified names of the package's classes, functions and methods."""
    return {name for path in PACKAGE.rglob("*.py") for name in line_links.definitions(text_of(path))}


def missing_files(text: str, folder: Path) -> list[str]:
    """Return words that look like files of this repository but do not exist."""
    words = [*in_backticks(text), *(word for command in commands(text) for word in command.split() if "/" in word)]
    own = {word.rstrip(".") for word in words if OUR_FILE.fullmatch(word)} - THEIR_FILES
    bare = {path.name for name in ("megatron_balance", "tests", "tools") for path in (ROOT / name).rglob("*.*")}
    places = (ROOT, PACKAGE, folder)
    return [word for word in sorted(own) if word not in bare and not any((place / word).exists() for place in places)]


def missing_flags(text: str) -> list[str]:
    """Return flags that neither a program of this repository nor a program of THEIR_FLAGS has."""
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*\w\b(?!-?\*|-\{)", text))
    return sorted(flag for flag in flags - OUR_FLAGS - TOOL_FLAGS - THEIR_FLAGS if not refusal(flag))


def wrong_arguments(text: str) -> list[str]:
    """Return flags given to our tools that neither the tool nor a training run has."""
    wrong = []
    for command in commands(text):
        for tool in re.findall(r"tools/[\w/]+\.py", command):
            arguments = command.partition(tool)[2].partition(" -- ")[0]
            flags = set(re.findall(r"(?<!\")(--[a-z][\w-]+)", arguments))
            wrong += [f"{tool} {flag}" for flag in sorted(flags - declared([ROOT / tool]) - OUR_FLAGS)]
    return wrong


def missing_names(text: str) -> list[str]:
    """Return modules, classes and members that the package does not have."""
    modules = [
        name for name in re.findall(r"\bmegatron_balance(?:\.[a-z_]\w*)+", text) if not is_module_or_member(name)
    ]
    own = {word for word in in_backticks(text) if OUR_CLASS.fullmatch(word)} - THEIR_CLASSES
    return modules + sorted(own - classes())


def is_module_or_member(name: str) -> bool:
    """Return whether a dotted name is a module or a definition in one."""
    path = ROOT.joinpath(*name.split("."))
    module = path.parent.with_suffix(".py")
    member = path.name
    is_member = module.is_file() and member in line_links.definitions(text_of(module))
    return path.is_dir() or path.with_suffix(".py").is_file() or is_member


def broken_links(text: str, folder: Path) -> list[str]:
    """Return links to files or headings that do not exist."""
    broken = []
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        path = folder / name if name else None
        found = path is None or path.exists()
        if found and anchor and not re.fullmatch(r"L\d+", anchor):
            found = anchor in anchors(text if path is None else text_of(path))
        broken += [] if found else [target]
    return broken


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def uneven_rows(text: str) -> list[str]:
    """Return the rows of tables that do not have as many cells as the row above."""
    uneven = []
    cells = 0
    for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
        own = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        uneven += [line] if own and cells and own != cells else []
        cells = own
    return uneven


@pytest.mark.parametrize("page", [README, *DOCS.glob("**/*.md")], ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_even(page: Path) -> None:
    assert uneven_rows(text_of(page)) == []


@every_page
def test_names_exist(page: Path) -> None:
    text = text_of(page)
    assert missing_files(text, page.parent) == []
    assert missing_flags(text) == []
    assert wrong_arguments(text) == []
    assert missing_names(text) == []
    assert broken_links(text, page.parent) == []


@every_page
def test_links_to_lines_lead_to_definitions(page: Path) -> None:
    wrong = [link for _, link in line_links.links(text_of(page), page.parent) if link.line != link.actual]
    assert wrong == [], "run python -m tests.line_links"


def test_the_rules_for_names_themselves() -> None:
    assert missing_files("`flow/layer.py` `flow/gone.py` `test_docs.py` `tools/none` `timeline/`", DOCS) == [
        "flow/gone.py",
        "tools/none",
    ]
    assert missing_flags("`--balance-policy` `--balance-polity` `--balance-*` --rm") == ["--balance-polity"]
    tool = "```bash\npython tools/profile_cluster.py --output x --outptu y\n```"
    assert wrong_arguments(tool) == ["tools/profile_cluster.py --outptu"]
    names = "megatron_balance.device.cpu.install() megatron_balance.device.gone `CostModel.sending` `CostModel.gone`"
    assert missing_names(names) == ["megatron_balance.device.gone", "CostModel.gone"]
    assert uneven_rows("| a | b |\n|---|---|\n| `x|y` | c |\n| `x\\|y` | c |") == ["| `x|y` | c |", "| `x\\|y` | c |"]
    assert uneven_rows("| a | b |\n|---|---|\n| `x\\|y` | c |\n\n| d |\n") == []
    assert broken_links("# A `b`, c\n[](#a-b-c) [](#a) [](cuda.md#no) [](no.md)", DOCS) == ["#a", "cuda.md#no", "no.md"]


def test_line_links_are_corrected(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("import os\n\n\nclass A:\n    def run(self):\n        pass\n")
    page = "[`A.run`](code.py#L1), [`A`](code.py#L4) and [`gone`](code.py#L7)"
    assert line_links.corrected(page, tmp_path) == page.replace("L1", "L5")
    assert [link.actual for _, link in line_links.links(page, tmp_path)] == [5, 4, None]


def test_contributing_has_the_levels_of_the_packages() -> None:
    (chain,) = re.findall(r"^ {4}app(?:.|\n {4})*", text_of(CONTRIBUTING), re.MULTILINE)
    levels = [{name.strip() for name in level.split(",")} for level in chain.split("->")]
    assert levels == [set(level) for level in reversed(LEVELS) if level != {"__init__"}]


def test_the_readme_has_a_line_for_each_package() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+)` \| ", text_of(README), re.MULTILINE)) == packages
    assert len(text_of(README).splitlines()) <= 150


def test_the_readme_says_which_environment_its_commands_need() -> None:
    lines = [line.strip() for block in blocks(text_of(README), "bash") for line in block.splitlines()]
    needs_environment = re.compile(r"(\w+=\S+ )*(python|torchrun|pip|scripts/pretrain)\b")
    assert lines.index("source .venv/bin/activate") < min(map(lines.index, filter(needs_environment.match, lines)))


def test_installs_are_from_the_checkout() -> None:
    """The package is not published."""
    for page in [*PAGES, *PACKAGE.rglob("*.py")]:
        assert not re.search(r"pip install [^\n`]*megatron-balance", text_of(page)), page


def test_the_example_of_the_walkthrough_runs() -> None:
    (example,) = blocks(text_of(DOCS / "code_walkthrough.md"), "python")
    exec(compile(example, "code_walkthrough.md", "exec"), {})


def test_the_policy_in_the_docs_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = blocks(text_of(DOCS / "balancing.md"), "python")
    assert len(example.splitlines()) <= 20
    (tmp_path / "my_policies.py").write_text(example, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    policy = load_policy("my_policies:Favorites")
    sys.modules.pop("my_policies")
    current = Placement.identity(16, 4, guest_slots=1)
    # Experts are cheap to move and expensive to compute
    cost = CostModel(builtin(4, 4, hidden=4096, ffn=16384), token_bytes=1, param_bytes=1, grad_bytes=1)
    planned = policy.plan(load_matrix("hot_experts", 4, 16, 2, 4096, seed=0, step=0)[None], current, cost)
    assert planned.added_hosts == 4
    assert policy.plan(np.zeros((1, 4, 16), dtype=np.int64), current, cost).is_identity


def test_the_table_of_features_is_that_of_the_tests() -> None:
    assert text_of(DOCS / "features.md").endswith("\n".join(["", *features.table(), ""])), (
        "run python -m tests.features"
    )


def test_the_page_shows_the_patch() -> None:
    patch = text_of(DOCS / "pretrain_gpt.patch")
    assert blocks(text_of(DOCS / "inside_megatron_lm.md"), "diff") == [patch[patch.index("--- a") :]]
