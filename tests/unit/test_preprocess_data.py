"""tools/preprocess_data.py: datasets as megatron-core reads them, any worker count, and invalid input."""

import bz2
import gzip
import io
import json
import lzma
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from megatron.core.datasets.indexed_dataset import IndexedDataset

import preprocess_data as tool
import textfiles
import train_tokenizer
from megatron_balance.cli.upstream_flags import refusal
from tests.disks import small_disk

TOOLS = Path(__file__).resolve().parents[2] / "tools"
Numbers = tuple[Path, list[list[int]]]

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
EOD_OF_NULL = 100
GOOD = '{"text": "1 2 3"}'
BAD_LINES = {
    b"{": "not JSON",
    b"{} {}": "not JSON",
    b"[" * 100_000: "not JSON",
    b"1" * 5000: "not JSON",
    b'["1"]': "holds list instead of a JSON object",
    b'{"other": "1"}': "no key 'text'",
    b'{"text": null}': "key 'text' holds NoneType instead of a string",
    b'{"text": 7}': "key 'text' holds int instead of a string",
    b'{"text": "\xff"}': "invalid UTF-8",
    b'{"text": "\\ud800"}': "key 'text' is not Unicode text",
    b'{"text": "1 two"}': "the tokenizer cannot take this text",
    b'{"text": "1 %d"}' % 10**30: "the tokenizer cannot take this text",
    b'{"text": "1 101"}': "token 101 is outside the vocabulary, 0 to 100",
    b'{"text": "-1"}': "token -1 is outside the vocabulary",
}


def run(source: Path | list[Path], prefix: Path, *flags: str) -> int:
    sources = source if isinstance(source, list) else [source]
    return tool.main(["--input", *map(str, sources), "--output-prefix", str(prefix), *flags])


def read(prefix: Path, key: str = "text") -> list[list[int]]:
    dataset = IndexedDataset(f"{prefix}_{key}_document")
    assert len(dataset) == len(dataset.document_indices) - 1
    return [dataset[index].tolist() for index in range(len(dataset))]


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Return a prefix in a folder that does not exist yet."""
    return tmp_path / "out" / "of" / "run"


@pytest.fixture
def numbers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Numbers:
    """Return a file of several chunks, which are small, and its documents."""
    monkeypatch.setattr(textfiles, "CHUNK_BYTES", 2**13)
    generator = np.random.default_rng(0)
    documents = [generator.integers(100, size=size).tolist() for size in generator.integers(1, 300, size=100)]
    lines = [json.dumps({"text": " ".join(map(str, document))}) for document in documents]
    path = write(tmp_path_factory.mktemp("numbers") / "numbers.jsonl", *lines)
    assert path.stat().st_size > 4 * textfiles.CHUNK_BYTES
    return path, documents


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SentencePiece model trained by tools/train_tokenizer.py."""
    folder = tmp_path_factory.mktemp("model")
    corpus = write(
        folder / "corpus.jsonl", *(json.dumps({"text": line}) for line in Path(__file__).read_text().splitlines())
    )
    prefix = folder / "model"
    flags = ["--input", str(corpus), "--output-prefix", str(prefix), "--vocab-size", "400"]
    assert train_tokenizer.main(flags) == 0
    return prefix.with_suffix(".model")


def test_round_trip_and_same_bytes_with_any_worker_count(numbers: Numbers, tmp_path, capsys) -> None:
    path, documents = numbers
    bad = write(tmp_path / "bad.jsonl", "{", "", "{}")
    found = []
    for workers in ("1", "2", "3"):
        prefix = tmp_path / workers / "run"
        flags = ("--on-bad-line", "skip", "--workers", workers)
        assert run([bad, path, bad, path], prefix, *NULL, *flags) == 0
        assert read(prefix) == documents * 2
        assert names(prefix.parent) == ["run_text_document.bin", "run_text_document.idx"]
        said = f"run_text_document: {2 * len(documents)} documents, {2 * sum(map(len, documents))} tokens (uint16)"
        assert said in capsys.readouterr().err
        found.append([Path(f"{prefix}_text_document.{suffix}").read_bytes() for suffix in ("bin", "idx")])
    assert found[0] == found[1] == found[2]


def test_append_eod_and_empty_documents(tmp_path: Path, output: Path) -> None:
    source = write(tmp_path / "in.jsonl", GOOD, '{"text": ""}', "", "  \r", '\ufeff{"text": "4"}\r')
    last = tmp_path / "no newline at the end"
    last.write_text('{"text": "5"}')
    assert run([last, source], output, *NULL, "--append-eod") == 0
    assert read(output) == [[5, EOD_OF_NULL], [1, 2, 3, EOD_OF_NULL], [4, EOD_OF_NULL]]


def test_several_keys(tmp_path: Path, output: Path) -> None:
    source = write(
        tmp_path / "in.jsonl",
        '{"text": "1 2", "title": "3"}',
        '{"text": "4", "title": ""}',
        '{"text": "5", "title": 6}',
    )
    assert run(source, output, *NULL, "--json-keys", "title", "text", "--on-bad-line", "skip") == 0
    assert read(output, "title") == [[3]]
    assert read(output, "text") == [[1, 2], [4]]


def test_sentencepiece(tmp_path: Path, output: Path, model: Path) -> None:
    texts = ["def f(x):\n\treturn  x\n", "日本", "\n"]
    source = write(tmp_path / "in.jsonl", *(json.dumps({"text": text}) for text in texts))
    flags = ("--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(model), "--append-eod")
    assert run(source, output, *flags, "--workers", "2") == 0
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    documents = read(output)
    assert [document[-1] for document in documents] == [processor.eos_id()] * 3
    assert [processor.decode(document[:-1]) for document in documents] == texts


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=lambda value: value[:20])
def test_bad_line_ends_the_run(tmp_path, output: Path, line: bytes, reason: str, capsys) -> None:
    source = write(tmp_path / "in.jsonl", GOOD, "", line, GOOD)
    assert run(source, output, *NULL) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"{source}:3: {reason}") and "--on-bad-line skip" in message
    assert not names(output.parent)


def test_bad_lines_are_skipped_and_reported(tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", GOOD, *BAD_LINES, *["{"] * 11, GOOD)
    assert run(source, output, *NULL, "--on-bad-line", "skip", "--workers", "2") == 0
    message = capsys.readouterr().err
    for number, reason in enumerate(BAD_LINES.values(), 2):
        assert f"{source}:{number}: {reason}" in message
    # Twenty are shown, the others counted
    assert f"{source}:21:" in message and f"{source}:22:" not in message
    assert f"{len(BAD_LINES) + 11} bad lines skipped" in message
    assert read(output) == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize("workers", ["1", "3"])
def test_the_first_bad_line_is_the_one_reported(numbers: Numbers, tmp_path, output: Path, workers: str, capsys) -> None:
    late = write(tmp_path / "late.jsonl", numbers[0].read_bytes() + b"{", *["{"] * 5)
    assert run([numbers[0], late], output, *NULL, "--workers", workers) == 1
    assert capsys.readouterr().err.startswith(f"{late}:{1 + len(numbers[1])}: not JSON")
    assert not names(output.parent)


def test_older_output_is_replaced_only_on_success(tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "run"
    good = write(tmp_path / "good.jsonl", GOOD)
    assert run(good, prefix, *NULL) == 0
    assert run(write(tmp_path / "bad.jsonl", '{"text": "9"}', "{"), prefix, *NULL) == 1
    assert read(prefix) == [[1, 2, 3]]
    assert run(write(tmp_path / "new.jsonl", '{"text": "9"}'), prefix, *NULL) == 0
    assert read(prefix) == [[9]]
    assert len(names(prefix.parent)) == 2


def test_input_without_any_document(tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", '{"text": ""}', "{")
    assert run(source, output, *NULL, "--on-bad-line", "skip") == 1
    assert "--json-keys text" in capsys.readouterr().err
    assert not names(output.parent)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def fill_the_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def die(*_: object) -> None:
    os._exit(1)


@pytest.mark.parametrize(
    ("place", "failure", "status", "said"),
    [
        ("Output.add", interrupt, 130, "nothing was written"),
        ("Output.add", fill_the_disk, 1, "nothing was written"),
        ("Output.finish", fill_the_disk, 1, "nothing was written"),
        ("encode_chunk", die, 1, "--workers 2"),
    ],
)
def test_no_trace_of_a_run_that_was_cut_short(
    numbers: Numbers, output: Path, monkeypatch, capsys, place: str, failure: object, status: int, said: str
) -> None:
    monkeypatch.setattr(f"preprocess_data.{place}", failure)
    assert run(numbers[0], output, *NULL, "--workers", "2") == status
    assert said in capsys.readouterr().err
    assert not names(output.parent)


@pytest.mark.parametrize("kilobytes", [4, 20])
def test_a_disk_without_room(numbers: Numbers, tmp_path, capsys, kilobytes: int) -> None:
    with small_disk(tmp_path / "disk", kilobytes) as disk:
        assert run(numbers[0], disk / "out" / "run", *NULL) == 1
        assert f"No space left on device: '{disk}/out/run_text_document.bin'; nothing" in capsys.readouterr().err
        assert not names(disk / "out")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input", "/no/such/file", *NULL], "--input: /no/such/file: no such file"),
        (["--input", str(TOOLS), *NULL], "is a directory"),
        (["--workers", "0", *NULL], "--workers: 0: give an integer of at least 1"),
        (["--workers", "two", *NULL], "--workers: two: give an integer of at least 1"),
        (["--on-bad-line", "ignore", *NULL], "--on-bad-line: invalid choice: 'ignore'"),
        (["--json-keys", "text", "text", *NULL], "--json-keys text text"),
        (["--json-keys", "a/b", *NULL], "--json-keys 'a/b'"),
        (["--output-prefix", f"{__file__}/run", *NULL], f"--output-prefix {__file__}/run"),
        ([], "--tokenizer-type: not given"),
        (["--tokenizer-type", "NullTokenizer"], "also give --vocab-size"),
        (["--tokenizer-type", "GPTSentencePieceTokenizer"], "also give --tokenizer-model"),
        (["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", __file__], f"model {__file__}"),
    ],
)
def test_wrong_flags(tmp_path: Path, output: Path, flags: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(write(tmp_path / "in.jsonl", GOOD), output, *flags)
    assert message in capsys.readouterr().err
    assert not output.parent.exists()


OF_MEGATRONS_TOOL = """
--split-sentences\n--keep-newlines\n--lang english\n--workers 1\n--find-optimal-num-workers\n--workers-to-check 16 32
--max-documents 9\n--partitions 2\n--log-interval 1000\n--keep-sequential-samples\n--dataset-impl mmap
--legacy-tokenizer\n--tokenizer-hf-no-use-fast\n--tokenizer-hf-no-include-special-tokens\n--null-tokenizer-eod-id 3
"""
"""Flags of the preprocess_data.py of Megatron-LM, of both supported versions and of older ones."""


@pytest.mark.parametrize("text", OF_MEGATRONS_TOOL.split("\n")[1:-1])
def test_flags_of_megatrons_tool(tmp_path: Path, output: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", GOOD)
    flag, *values = text.split()
    reason = tool.REFUSED.get(flag) or refusal(flag)
    if reason is None:
        assert run(source, output, *NULL, flag, *values) == 0
        notices = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
        reasons = [why for entry, why in tool.WITHOUT_EFFECT.items() if entry.partition(" ")[0] == flag]
        assert notices == [f"note: {flag}: {why}" for why in reasons] and bool(reasons) == (flag != "--workers")
        return
    with pytest.raises(SystemExit, match="2"):
        run(source, output, *NULL, flag, *values)
    assert f"error: {flag}: {reason}\n" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [gzip, bz2, lzma])
def test_compressed_input(numbers: Numbers, tmp_path, output: Path, kind: Any, capsys) -> None:
    path, documents = numbers
    text = path.read_bytes()
    half = text.index(b"\n", len(text) // 2) + 1
    # Two streams in one file, as `cat a.gz b.gz` writes them; the name does not matter
    source = tmp_path / "numbers.jsonl"
    source.write_bytes(kind.compress(text[:half]) + kind.compress(text[half:]))
    assert run([source, path], output, *NULL, "--workers", "2") == 0
    assert read(output) == documents * 2
    source.write_bytes(kind.compress(f"{GOOD}\n\n{{\n".encode()))
    assert run(source, output, *NULL) == 1
    assert f"{source}:3: not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x28\xb5\x2f\xfd\x04", "compressed by Zstandard; decompress it with `zstd -d`"),
        (b"PK\x03\x04rest", "is a ZIP archive"),
        (b"PAR1rest", "is a Parquet file"),
        (gzip.compress(GOOD.encode())[:-9], "cannot be read to its end"),
        (gzip.compress(GOOD.encode()) + b"garbage", "cannot be read to its end: Not a gzipped file"),
        (b"BZh9rest of it", "cannot be read to its end"),
        (lzma.compress(GOOD.encode())[:-9], "cannot be read to its end"),
    ],
    ids=range(7),
)
def test_what_cannot_be_decompressed_is_named(tmp_path, output: Path, content: bytes, message: str, capsys) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    assert run(source, output, *NULL, "--on-bad-line", "skip") == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{source}: ") and message in error and error.endswith("nothing was written\n")
    assert train_tokenizer.main(["--input", str(source), "--output-prefix", str(output), "--vocab-size", "400"]) == 1
    assert message in capsys.readouterr().err


def test_append_eod_needs_a_token(tmp_path: Path, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(["1 2 3"]), model_writer=model, vocab_size=6, eos_id=-1, minloglevel=2
    )
    (tmp_path / "no_eos.model").write_bytes(model.getvalue())
    source = write(tmp_path / "in.jsonl", GOOD)
    flags = ("--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(tmp_path / "no_eos.model"))
    with pytest.raises(SystemExit, match="2"):
        run(source, output, *flags, "--append-eod")
    assert "--append-eod: the tokenizer has no end-of-document token" in capsys.readouterr().err
    assert run(source, output, *flags) == 0
