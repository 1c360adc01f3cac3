"""tools/train_tokenizer.py: lossless round trips, reproducible bytes, and errors that say what to change."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

import train_tokenizer as tool

# SentencePiece itself marks spaces with U+2581. Surrogates are not text.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")
whitespace = st.sampled_from(["\n", "\t", " ", "  ", "        ", "\r\n", "\n\n", "\x00", "\u00a0", "\u2028"])
code = st.lists(st.one_of(whitespace, st.text(characters, max_size=8), st.sampled_from(sorted(topics)))).map("".join)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "topics.jsonl"
    lines = [json.dumps({"title": name, "text": text}) for name, text in sorted(topics.items())[:30]]
    path.write_text("\n\n".join(lines) + "\n")
    return path


def run(corpus: Path, prefix: Path, *flags: str) -> int:
    return tool.main(["--input", str(corpus), "--output-prefix", str(prefix), "--vocab-size", "600", *flags])


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def processor(
    request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> sentencepiece.SentencePieceProcessor:
    prefix = tmp_path_factory.mktemp("model") / "new folder" / request.param
    assert run(corpus, prefix, "--model-type", request.param) == 0
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


@given(text=code)
def test_decoding_gives_back_the_text(processor: sentencepiece.SentencePieceProcessor, text: str) -> None:
    assert processor.decode(processor.encode(text)) == text


def test_pieces(processor: sentencepiece.SentencePieceProcessor) -> None:
    assert processor.get_piece_size() == 600
    assert processor.id_to_piece(processor.eos_id()) == "</s>"
    assert processor.eos_id() not in processor.encode("</s>")
    assert processor.encode("1234\n", out_type=str) == ["1", "2", "3", "4", "\n"]
    assert processor.encode("\n    \t", out_type=str)[0] == "\n"


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("max_sentences", ["500", "1000000"])
def test_same_input_same_bytes(corpus: Path, tmp_path: Path, model_type: str, max_sentences: str) -> None:
    for name in ("a", "b"):
        assert run(corpus, tmp_path / name, "--model-type", model_type, "--max-sentences", max_sentences) == 0
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


def test_json_keys(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(corpus, tmp_path / "a", "--json-keys", "title", "text") == 0
    assert "--tokenizer-model" in capsys.readouterr().err
    assert run(corpus, tmp_path / "b", "--json-keys", "body") == 1
    assert f"{corpus}:1: no key 'body'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a.model"]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_vocabulary_the_corpus_cannot_fill(tmp_path: Path, model_type: str, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = tmp_path / "small.jsonl"
    corpus.write_text('{"text": "one two three, and the others: four, five, six, seven, and ten tens"}\n' * 3)
    model = tmp_path / "out" / "m.model"
    assert run(corpus, model.with_suffix(""), "--model-type", model_type) == 1
    message = capsys.readouterr().err
    assert "--vocab-size 600: the corpus fills" in message and "lower it" in message
    assert not model.parent.exists()
    limit = message.split("the corpus fills ")[1].split()[0]
    assert run(corpus, model.with_suffix(""), "--model-type", model_type, "--vocab-size", limit) == 0
    assert model.exists()


@pytest.mark.parametrize(
    ("line", "flags", "message"),
    [
        ('{"text": "some"}', ("--vocab-size", "100"), "--vocab-size 100: bytes and characters alone"),
        ('{"text": ""}', (), "--input: the files hold no text"),
    ],
)
def test_what_cannot_be_trained(tmp_path, line: str, flags: tuple[str, ...], message: str, capsys) -> None:
    (tmp_path / "in.jsonl").write_text(f"{line}\n")
    assert run(tmp_path / "in.jsonl", tmp_path / "m", *flags) == 1
    assert message in capsys.readouterr().err


def test_a_failed_run_keeps_the_older_model(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.model").write_text("older")
    bad = tmp_path / "bad.jsonl"
    bad.write_text(corpus.read_text() + "{\n")
    assert run(bad, tmp_path / "m") == 1
    assert f"{bad}:60: not JSON" in capsys.readouterr().err
    assert (tmp_path / "m.model").read_text() == "older"
    assert run(corpus, tmp_path / "m") == 0
    assert (tmp_path / "m.model").read_bytes() != b"older"


def test_interrupted(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    monkeypatch.setattr(tool, "train", interrupt)
    assert run(corpus, tmp_path / "m") == 130
    assert not list(tmp_path.iterdir())


def test_long_lines_are_cut_not_lost() -> None:
    line = "ab" * tool.SENTENCE_CHARACTERS
    sentences = list(tool.split_sentences(f"{line}\n\nend"))
    assert sentences == [line[: tool.SENTENCE_CHARACTERS], line[tool.SENTENCE_CHARACTERS :], "end"]
