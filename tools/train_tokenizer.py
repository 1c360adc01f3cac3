"""Train a SentencePiece tokenizer on JSONL text.

The model preserves text: no normalization, separate pieces for indentation, tokens for newlines and tabs, and bytes for
characters outside the vocabulary. Decoding returns the encoded text, with one exception that is built into
SentencePiece: its space mark U+2581 becomes a space. `</s>` (id 2) marks the end of a document.

    python tools/train_tokenizer.py --input data/sample/*.jsonl --vocab-size 8192 --output-prefix data/sample/bpe
"""

import argparse
import io
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from megatron_balance.files.writing import staged, writing
from textfiles import BadLine, ToolError, existing_file, parse_line, positive_int, progress, read_chunks

# SentencePiece drops sentences above 4192 bytes; a character takes up to 4
SENTENCE_CHARACTERS = 1000

# Not a setting because it affects the result: the model records it, and unigram sums floating-point numbers per thread
THREADS = 4


def main(argv: list[str] | None = None) -> int:
    """Train, write PREFIX.model, and return the exit status."""
    args = _parser().parse_args(argv)
    started = time.monotonic()
    output = Path(f"{args.output_prefix}.model")
    try:
        with staged(output.parent) as staging:
            model = train_with_progress(args)
            with writing(staging / output.name):
                (staging / output.name).write_bytes(model)
    except (BadLine, ToolError, OSError) as error:
        print(f"{error}\n{output} was not written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted; {output} was not written", file=sys.stderr)
        return 130
    print(
        f"{output}: {args.vocab_size} pieces, {args.model_type}, {time.monotonic() - started:.1f} s; use it with "
        f"--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model {output}",
        file=sys.stderr,
    )
    return 0


def train_with_progress(args: argparse.Namespace) -> bytes:
    """Call `train` for the command line, with a progress bar."""
    with progress(auto_refresh=True) as bar:
        reading = bar.add_task("reading", total=sum(path.stat().st_size for path in args.input))

        def sentences() -> Iterator[str]:
            for chunk in read_chunks(args.input):
                bar.advance(reading, chunk.size)
                for number, line in chunk.numbered():
                    try:
                        texts = parse_line(line, args.json_keys)
                    except ValueError as error:
                        raise BadLine(chunk.path, number, str(error)) from error
                    for text in texts:
                        yield from split_sentences(text)
            bar.add_task("training", total=None)

        return train(sentences(), args.vocab_size, args.model_type, args.max_sentences)


def split_sentences(text: str) -> Iterator[str]:
    """Generate the non-empty lines of a text, split into sentences short enough for SentencePiece."""
    for line in text.split("\n"):
        for start in range(0, len(line), SENTENCE_CHARACTERS):
            yield line[start : start + SENTENCE_CHARACTERS]


def train(sentences: Iterator[str], vocab_size: int, model_type: str, max_sentences: int) -> bytes:
    """Return a serialized SentencePiece model; the same sentences and settings give the same bytes."""
    sentencepiece.set_random_generator_seed(0)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=sentences,
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            input_sentence_size=max_sentences,
            shuffle_input_sentence=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", "\t"],
            split_digits=True,
            byte_fallback=True,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ToolError(explain(str(error), vocab_size)) from error
    return model.getvalue()


def explain(message: str, vocab_size: int) -> str:
    """Explain a SentencePiece error in terms of this tool's flags."""
    if found := re.search(r"Vocabulary size too high .* (\d+)", message):
        limit = found.group(1)
        return f"--vocab-size {vocab_size}: the corpus fills {limit} pieces at most; lower it, or add --input files"
    if found := re.search(r"Vocabulary size is smaller than required_chars\. \d+ vs (\d+)", message):
        return f"--vocab-size {vocab_size}: bytes and characters alone take {found.group(1)} pieces; raise it"
    if "!sentences_.empty()" in message:
        return "--input: the files hold no text; check --json-keys and the files"
    return f"SentencePiece: {message}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", type=existing_file, nargs="+", required=True, metavar="FILE", help="JSONL files")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys that hold text (default: text)")
    add("--vocab-size", type=positive_int, metavar="N", default=8192, help="number of pieces (default: %(default)s)")
    add("--model-type", choices=["bpe", "unigram"], default="bpe", help="SentencePiece model (default: %(default)s)")
    add("--output-prefix", required=True, metavar="PREFIX", help="the model is written to PREFIX.model")
    sample = "train on a random sample of this many lines, the same in every run (default: %(default)s)"
    add("--max-sentences", metavar="N", type=positive_int, default=2_000_000, help=sample)
    return parser


if __name__ == "__main__":
    sys.exit(main())
