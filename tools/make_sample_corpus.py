"""Write a small text corpus of two domains from this Python installation, without downloading anything.

code.jsonl holds the standard library's sources, and english.jsonl the reference manual behind `help()`. Each line is
`{"text": ..., "source": ...}`. The same Python version produces the same bytes.

    python tools/make_sample_corpus.py --output-dir data/sample
"""

import argparse
import json
import sys
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

from megatron_balance.files.writing import staged, writing

# pydoc_data contains the English domain as a Python string
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}


def main(argv: list[str] | None = None) -> int:
    """Write both domains and return the exit status."""
    args = _parser().parse_args(argv)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    sources = code_files(stdlib)
    texts = [(path, text) for path in sources if (text := read_utf8(path)) is not None]
    domains = {
        "code.jsonl": [(path.relative_to(stdlib).as_posix(), text) for path, text in texts],
        "english.jsonl": [(f"pydoc topic {name}", text) for name, text in sorted(topics.items())],
    }
    try:
        with staged(args.output_dir) as staging:
            counts = {name: write_domain(staging / name, texts, args.max_mb) for name, texts in domains.items()}
            if empty := [name for name, documents in counts.items() if not documents]:
                raise ValueError(f"{empty[0]} would be empty; raise --max-mb ({args.max_mb})")
    except (OSError, ValueError) as error:
        print(f"--output-dir {args.output_dir}: {error}", file=sys.stderr)
        return 1
    for name, documents in counts.items():
        path = args.output_dir / name
        print(f"{path}: {documents} documents, {path.stat().st_size / 1e6:.2f} MB")
    if skipped := len(sources) - len(texts):
        print(f"skipped {skipped} source files that are not UTF-8")
    return 0


def code_files(stdlib: Path) -> list[Path]:
    """Return the Python sources below `stdlib`, without tests and installed packages, in the same order everywhere."""
    relative = (path.relative_to(stdlib) for path in stdlib.rglob("*.py"))
    kept = (path for path in relative if EXCLUDED_FOLDERS.isdisjoint(path.parent.parts))
    return [stdlib / path for path in sorted(kept, key=Path.as_posix)]


def read_utf8(path: Path) -> str | None:
    """Return a file's text with unchanged line ends; None if it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def write_domain(path: Path, documents: list[tuple[str, str]], max_mb: float | None) -> int:
    """Write `(source, text)` pairs as JSONL, without empty texts, and return their number.

    Args:
        max_mb: stop before the file exceeds this many megabytes (10^6 bytes); None: write all documents.
    """
    number = 0
    with writing(path), path.open("wb") as file:
        for source, text in documents:
            if not text.strip():
                continue
            line = json.dumps({"text": text, "source": source}, ensure_ascii=False).encode() + b"\n"
            if max_mb is not None and file.tell() + len(line) > max_mb * 1e6:
                break
            file.write(line)
            number += 1
    return number


def _megabytes(text: str) -> float:
    """Parse a size above 0, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output-dir", type=Path, metavar="DIR", required=True, help="where code.jsonl and english.jsonl go")
    add("--max-mb", type=_megabytes, metavar="X", help="megabytes (10^6 bytes) per domain at most (default: all)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
