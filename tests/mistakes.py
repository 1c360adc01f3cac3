"""Mistakes that people make when they start a run: the tables of docs/measurements/mistakes.md.

The first table has mistakes of all kinds, made by a rank that starts: `tests/unit/test_mistakes.py` makes them in this
process, and behind --slow as real processes. The second table has the refusals of cli/checks.py and its neighbors.

    python -m tests.mistakes    writes what the program says now into the second table; compare it with what it said
"""

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

ROOT = Path(__file__).resolve().parents[1]
ENTRY_POINT = ROOT / "pretrain_gpt_moe.py"
PAGE = ROOT / "docs/measurements/mistakes.md"

VALID = {
    **{"--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4", "--seq-length": "32"},
    **{"--micro-batch-size": "2", "--num-experts": "8", "--moe-ffn-hidden-size": "64", "--moe-router-topk": "2"},
    **{"--expert-model-parallel-size": "4", "--lr": "1e-3", "--train-iters": "20", "--num-workers": "0"},
    **{"--tokenizer-type": "NullTokenizer", "--vocab-size": "127", "--data-path": "corpus", "--split": "8,1,1"},
}

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
"""Variables of rank 0 of 8. Without MASTER_ADDR, joining is an error, too, so that no rank waits for others."""

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")

JOINING = ("rank without torchrun's others", "port in use")
"""Mistakes that show when the rank joins, not before."""

NOT_DRY = (
    *JOINING,
    *("NCCL without a GPU", "Transformer Engine without a GPU", "policy's module missing", "class that is no policy"),
)
"""Mistakes that a dry run does not find; it checks neither the machine nor the launcher, and starts no policy."""


class Mistake(NamedTuple):
    """A row of the first table."""

    name: str
    changes: str = ""
    """Variables of the environment, such as `RANK=8`, in which `taken` stands for a port that another program listens
    on; `without --lr` for flags of `VALID` that are left out; and flags that are added. Paths are relative to the
    directory of `write_files`."""

    told: str = ""
    """The message; `...` stands for any text, and DIR for the directory."""

    @property
    def environment(self) -> dict[str, str]:
        return dict(re.findall(r"(?<!\S)([A-Z_]+)=(\S+)", self.changes))

    @property
    def without(self) -> list[str]:
        return re.findall(r"\bwithout (\S+)", self.changes)

    @property
    def flags(self) -> list[str]:
        return re.sub(r"(?<!\S)[A-Z_]+=\S+|\bwithout \S+", "", self.changes).split()

    @property
    def argv(self) -> list[str]:
        kept = [(flag, value) for flag, value in VALID.items() if flag not in self.without]
        return [word for pair in kept for word in pair] + self.flags


def _rows(title: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a table of the page."""
    _, _, table = PAGE.read_text(encoding="utf-8").partition(f"\n| {title} |")
    for line in table.partition("\n\n")[0].splitlines()[2:]:
        cells = re.split(r"(?<!\\) \| ?", line.removeprefix("| ").removesuffix("|"))
        yield [cell.strip().strip("`").replace("\\|", "|").replace("&lt;", "<") for cell in cells]


MISTAKES = [Mistake(*cells[:3]) for cells in _rows("mistake")]
REFUSALS = [Mistake(flags, flags, told) for flags, told, *_ in _rows("flags")]


def cell(text: str) -> str:
    """Return a text as Markdown's tables have it, where <...> would be HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def write_files(directory: Path) -> None:
    """Write the files that `VALID` and the mistakes name."""
    _write_data(directory / "corpus", documents=50)
    _write_data(directory / "text_text_document", documents=50)
    _write_data(directory / "few", documents=3)
    _write_data(directory / "half", documents=50)
    _write_data(directory / "cut", documents=50)
    (directory / "half.bin").unlink()
    os.truncate(directory / "cut.bin", 4000)
    for iteration in (10, 20):
        (directory / "saved" / f"iter_{iteration:07d}").mkdir(parents=True)
    (directory / "raw.jsonl").write_text('{"text": "a"}\n')
    (directory / "bad.yaml").write_text("num-layers: [1")
    (directory / "damaged.json").write_text("{")
    (directory / "broken.model").write_bytes(b"not a model")
    (directory / "odd.py").write_text("class Policy: pass\n")


def _write_data(prefix: Path, documents: int) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(documents):
        builder.add_document(np.arange(100), [100])
    builder.finalize(f"{prefix}.idx")


def run(mistake: Mistake, directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Make a mistake in a process of its own, without a launcher, as rank 0 of 8."""
    clean = {name: value for name, value in os.environ.items() if name not in ADDRESS}
    paths = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = mistake.environment
    with socket.create_server(("127.0.0.1", 0)) if "MASTER_PORT" in own else contextlib.nullcontext() as server:
        if server is not None:
            own["MASTER_PORT"] = str(server.getsockname()[1])
        return subprocess.run(
            [sys.executable, str(ENTRY_POINT), *mistake.argv, *flags],
            cwd=directory,
            env=clean | LAUNCHED | own | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
        )


def message(output: str, directory: Path) -> str:
    """Return the lines with which the program ended, apart from argparse's usage."""
    lines = output.splitlines()
    first = next((index for index, line in enumerate(lines) if ": error: " in line), 0)
    told = "\n".join(lines[first:]).partition(": error: ")[2].strip()
    return re.sub(r"MASTER_PORT=\d+", "MASTER_PORT=...", told.replace(str(directory), "DIR"))


def is_told(expected: str, told: str) -> bool:
    """Return whether a message is one line, and the expected one. Versions of Python quote choices differently."""
    pattern = ".*".join(re.escape(part) for part in expected.replace("'", "").split("..."))
    return re.fullmatch(pattern, told.replace("'", "")) is not None and len(told) <= 500


def refusal(mistake: Mistake) -> str:
    """Return the message of a row of the second table."""
    from megatron_balance.cli.arguments import parse_args
    from tests.unit.commands import CPU, argv

    try:
        parse_args(argv(" ".join(mistake.flags), " ".join(mistake.without)), CPU)
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for mistake in REFUSALS:
        told = refusal(mistake)
        if not is_told(mistake.told, told):
            old = f"| `{cell(mistake.changes)}` | {cell(mistake.told)} |"
            page = page.replace(old, f"| `{cell(mistake.changes)}` | {cell(told)} |")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
