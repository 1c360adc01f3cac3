"""Tokenize JSONL text into Megatron's indexed datasets: PREFIX_KEY_document.bin and .idx for every JSON key.

Every input line is a JSON object with a string under each of --json-keys. Files may be compressed with gzip, bzip2 or
xz. The output does not depend on --workers and appears only when all input has been processed; after an error or
Ctrl-C, older files are unchanged.

    python tools/preprocess_data.py --input data/sample/code.jsonl --output-prefix data/sample/code \\
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model data/sample/bpe.model --append-eod
"""

import argparse
import contextlib
import dataclasses
import functools
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_balance.cli.parser import Parser
from megatron_balance.cli.upstream_flags import ACCEPTED
from megatron_balance.config.flags import add_flags, build
from megatron_balance.config.run_config import TokenizerConfig
from megatron_balance.files.writing import staged, writing
from megatron_balance.training.tokenizer import build_tokenizer, end_of_document
from textfiles import BadLine, Chunk, ToolError, existing_file, parse_line, positive_int, progress, read_chunks

BAD_LINES_SHOWN = 20

WITHOUT_EFFECT = {
    "--partitions N": "has no effect; --workers share every input file",
    "--keep-sequential-samples": "is always in effect: documents keep the order of the input",
    "--log-interval N": "has no effect; a terminal shows a progress bar",
    "--dataset-impl mmap": "is always in effect",
    **dict.fromkeys(("--keep-newlines", "--lang NAME"), "has no effect without --split-sentences, which is refused"),
    **{entry: reason for entry, reason in ACCEPTED.items() if entry.startswith("--tokenizer-")},
}
"""Flags of Megatron's tool that change nothing here, as in ACCEPTED."""

REFUSED = {
    "--split-sentences": "sentences are for BERT; a document becomes one sequence of tokens",
    **dict.fromkeys(
        ("--find-optimal-num-workers", "--workers-to-check", "--max-documents"),
        "the number of workers is not searched for; use --workers",
    ),
}
"""Flags of Megatron's tool that are refused, with the reasons."""


class Settings(NamedTuple):
    """Settings of tokenization. Hashable, so that each process builds the tokenizer once (`encoder`)."""

    tokenizer: TokenizerConfig
    """The tokenizer's configuration, with special tokens as a tuple."""
    keys: tuple[str, ...]
    append_eod: bool


class EncodedChunk(NamedTuple):
    """A chunk's tokens."""

    size: int
    """The chunk's size."""
    documents: dict[str, list[np.ndarray]]
    """For each key, one array [tokens] of the dataset's dtype per document that has tokens."""
    bad: list[BadLine]


class Encoder:
    """Converts lines to tokens with one tokenizer."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        special = settings.tokenizer.tokenizer_special_tokens
        config = dataclasses.replace(settings.tokenizer, tokenizer_special_tokens=special and list(special))
        try:
            self.tokenizer = build_tokenizer(config)
        except ValueError as error:
            raise ToolError(str(error)) from error
        self.vocab_size = self.tokenizer.vocab_size
        self.dtype = DType.optimal_dtype(self.vocab_size)
        self.ending = np.array([ending(self.tokenizer)] if settings.append_eod else [], dtype=np.int64)

    def encode_line(self, line: bytes) -> list[np.ndarray]:
        """Return one array [tokens] per key; raise ValueError if the line is invalid."""
        return [self._tokens(text) for text in parse_line(line, self.settings.keys)]

    def _tokens(self, text: str) -> np.ndarray:
        try:
            tokens = np.array(self.tokenizer.tokenize(text) if text else [], dtype=np.int64)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"the tokenizer cannot take this text: {error}") from error
        outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if outside.size:
            raise ValueError(f"token {outside[0]} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        return (np.concatenate((tokens, self.ending)) if tokens.size else tokens).astype(self.dtype)


def ending(tokenizer: Any) -> int:
    """Return the tokenizer's end-of-document token; raise ToolError if it has none."""
    token = end_of_document(tokenizer)
    if token is None:
        raise ToolError(
            "--append-eod: the tokenizer has no end-of-document token; drop the flag, or use a model that has one "
            "(tools/train_tokenizer.py makes such models)"
        )
    return token


@functools.cache
def encoder(settings: Settings) -> Encoder:
    """Return this process's encoder; worker processes inherit or rebuild it."""
    return Encoder(settings)


def encode_chunk(settings: Settings, chunk: Chunk) -> EncodedChunk:
    """Tokenize a chunk. Bad lines are listed in the result and not encoded under any key."""
    encoded = EncodedChunk(chunk.size, {key: [] for key in settings.keys}, [])
    for number, line in chunk.numbered():
        try:
            documents = encoder(settings).encode_line(line)
        except ValueError as error:
            encoded.bad.append(BadLine(chunk.path, number, str(error)))
            continue
        for key, tokens in zip(settings.keys, documents, strict=True):
            if tokens.size:
                encoded.documents[key].append(tokens)
    return encoded


def encode_chunks(settings: Settings, chunks: Iterable[Chunk], workers: int) -> Iterator[EncodedChunk]:
    """Call `encode_chunk` for each chunk, in order, in `workers` processes; with 1, in this process."""
    if workers == 1:
        yield from map(functools.partial(encode_chunk, settings), chunks)
        return
    # Ctrl-C reaches the whole process group, but only the parent acts on it
    pool = ProcessPoolExecutor(workers, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))
    try:
        pending: deque = deque()
        for chunk in chunks:
            pending.append(pool.submit(encode_chunk, settings, chunk))
            if len(pending) > 2 * workers:  # bounds memory: an executor's own map() would read all of the input
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise ToolError(f"--workers {workers}: a worker process died, for example without memory; try fewer") from error
    finally:
        pool.shutdown(cancel_futures=True)


class Output:
    """The datasets being written, one per key, inside `folder`."""

    def __init__(self, folder: Path, name: str, keys: tuple[str, ...], dtype: type[np.number]) -> None:
        self.stems = {key: str(folder / f"{name}_{key}_document") for key in keys}
        self.builders = {key: IndexedDatasetBuilder(f"{stem}.bin", dtype=dtype) for key, stem in self.stems.items()}
        self.documents = dict.fromkeys(keys, 0)
        self.tokens = dict.fromkeys(keys, 0)

    def add(self, encoded: EncodedChunk) -> None:
        """Append a chunk's documents."""
        for key, documents in encoded.documents.items():
            with writing(f"{self.stems[key]}.bin"):
                for tokens in documents:
                    self.builders[key].add_document(tokens, [tokens.size])
                    self.tokens[key] += tokens.size
            self.documents[key] += len(documents)

    def finish(self) -> None:
        """Write the indices; raise ToolError for a dataset without documents, which cannot be loaded."""
        for key, builder in self.builders.items():
            if not self.documents[key]:
                raise ToolError(f"--input: no line has text under --json-keys {key}; check both flags")
            with writing(f"{self.stems[key]}.idx"):
                builder.finalize(f"{self.stems[key]}.idx")

    def close(self) -> None:
        """Close the data files, whether finished or not."""
        for key, builder in self.builders.items():
            with writing(f"{self.stems[key]}.bin"):
                builder.data_file.close()


def preprocess(settings: Settings, paths: list[Path], prefix: str, *, workers: int, skip_bad: bool) -> list[str]:
    """Write the datasets and return the lines of a summary; raise BadLine at a bad line unless `skip_bad`."""
    started = time.monotonic()
    folder, name = os.path.split(prefix)
    dtype = encoder(settings).dtype
    bad = 0
    # The bar has no thread of its own, which must not run when the worker processes are forked
    with staged(Path(folder)) as staging, progress(auto_refresh=False) as bar:
        reading = bar.add_task("reading", total=sum(path.stat().st_size for path in paths))
        output = Output(staging, name, settings.keys, dtype)
        with (
            contextlib.closing(output),
            contextlib.closing(encode_chunks(settings, read_chunks(paths), workers)) as encoded_chunks,
        ):
            for encoded in encoded_chunks:
                if encoded.bad and not skip_bad:
                    raise encoded.bad[0]
                for line in encoded.bad:
                    bad += 1
                    if bad <= BAD_LINES_SHOWN:
                        bar.console.out(str(line), highlight=False)
                output.add(encoded)
                bar.update(reading, advance=encoded.size, refresh=True)
            output.finish()
    summary = [
        f"{prefix}_{key}_document: {output.documents[key]} documents, {output.tokens[key]} tokens "
        f"({dtype.__name__}), {time.monotonic() - started:.1f} s"
        for key in settings.keys
    ]
    return summary + ([f"{bad} bad lines skipped"] if bad else [])


def main(argv: list[str] | None = None) -> int:
    """Run the tool and return the exit status; raise SystemExit(2) for invalid flags."""
    parser = _parser()
    args = parser.parse_args(argv)
    settings = _settings(parser, args)
    for entry, reason in WITHOUT_EFFECT.items():
        if getattr(args, flag := entry.partition(" ")[0]):
            print(f"note: {flag}: {reason}", file=sys.stderr)
    try:
        skip_bad = args.on_bad_line == "skip"
        summary = preprocess(settings, args.input, args.output_prefix, workers=args.workers, skip_bad=skip_bad)
    except BadLine as error:
        message = f"{error}\nfix the line, or skip such lines with --on-bad-line skip"
        status = 1
    except (ToolError, OSError) as error:
        message = str(error)
        status = 1
    except KeyboardInterrupt:
        message = "interrupted"
        status = 130
    else:
        print(*summary, sep="\n", file=sys.stderr)
        return 0
    print(f"{message}; nothing was written", file=sys.stderr)
    return status


def _settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Settings:
    """Return the checked settings; call `parser.error` if a flag is invalid."""
    keys = args.json_keys
    if len(set(keys)) < len(keys):
        parser.error(f"--json-keys {' '.join(keys)}: names a key twice; give each key once")
    if unusable := [key for key in keys if not key or "/" in key or os.sep in key]:
        parser.error(f"--json-keys {unusable[0]!r}: a key becomes part of a file name; rename the key in the input")
    if args.tokenizer_type is None:
        parser.error("--tokenizer-type: not given; choose one of the types that --help lists")
    special = args.tokenizer_special_tokens
    config = build(TokenizerConfig, vars(args), tokenizer_special_tokens=special and tuple(special))
    settings = Settings(config, tuple(keys), args.append_eod)
    try:
        encoder(settings)
    except ToolError as error:
        parser.error(str(error))
    try:
        Path(os.path.dirname(args.output_prefix)).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--output-prefix {args.output_prefix}: no directory to write to: {error}; choose another prefix")
    return settings


class ToolParser(Parser):
    """A parser that also knows the flags of Megatron's tool."""

    def why_unknown(self, flag: str) -> str | None:
        """Return the reason why this tool does not have a flag; None if there is none to give."""
        return REFUSED.get(flag) or super().why_unknown(flag)


def _parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    data = parser.add_argument_group("input and output")
    add = data.add_argument
    add("--input", type=existing_file, nargs="+", required=True, metavar="FILE", help="JSONL files, read in this order")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to tokenize (default: text)")
    add("--output-prefix", required=True, metavar="PREFIX", help="datasets are named PREFIX_KEY_document")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--workers", type=positive_int, default=1, metavar="N", help="tokenizing processes (default: %(default)s)")
    bad = "for a line without a document: stop and write nothing (the default), or report and skip it"
    add("--on-bad-line", choices=["error", "skip"], default="error", help=bad)
    add_flags(parser.add_argument_group("tokenizer"), TokenizerConfig)
    parser.add_without_effect(WITHOUT_EFFECT)
    return parser


if __name__ == "__main__":
    sys.exit(main())
