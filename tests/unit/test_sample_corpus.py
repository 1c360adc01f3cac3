"""tools/make_sample_corpus.py: content of the domains, determinism, the cap, and failures that leave no files."""

import json
from pathlib import Path

import pytest

import make_sample_corpus as tool

NAMES = ("code.jsonl", "english.jsonl")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "made" / "here"
    assert tool.main(["--output-dir", str(folder)]) == 0
    return folder


def records(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_every_line_is_a_document(corpus: Path) -> None:
    for name in NAMES:
        documents = records(corpus / name)
        assert len(documents) > 50
        assert all(set(document) == {"text", "source"} and document["text"].strip() for document in documents)
        assert len({document["source"] for document in documents}) == len(documents)
    assert any('"assert" statement' in document["text"] for document in records(corpus / "english.jsonl"))


def test_code_is_the_standard_library_without_tests(corpus: Path) -> None:
    sources = {document["source"]: document["text"] for document in records(corpus / "code.jsonl")}
    assert sources["json/decoder.py"] == Path(json.decoder.__file__).read_text(encoding="utf-8")
    folders = {folder for source in sources for folder in Path(source).parent.parts}
    assert "json" in folders
    assert folders.isdisjoint({"test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data"})


def test_deterministic(corpus: Path, tmp_path: Path) -> None:
    assert tool.main(["--output-dir", str(tmp_path)]) == 0
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (corpus / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(NAMES)


def test_cap_keeps_the_first_documents(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--output-dir", str(tmp_path), "--max-mb", "0.2"]) == 0
    for name in NAMES:
        capped = (tmp_path / name).read_bytes()
        assert 0.1e6 < len(capped) <= 0.2e6
        assert (corpus / name).read_bytes().startswith(capped) and capped.endswith(b"\n")
    summary = capsys.readouterr().out
    assert "code.jsonl" in summary and "documents" in summary and "MB" in summary


def test_outputs_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main(["--output-dir", str(tmp_path), "--max-mb", "1e-5"]) == 1
    assert "raise --max-mb" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("kept")
    assert tool.main(["--output-dir", str(tmp_path / "file")]) == 1
    assert "--output-dir" in capsys.readouterr().err and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("value", ["0", "-1", "nan", "much"])
def test_wrong_cap(tmp_path: Path, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        tool.main(["--output-dir", str(tmp_path), f"--max-mb={value}"])
    assert f"--max-mb: {value}: give a number above 0" in capsys.readouterr().err


def test_files_in_other_encodings_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes("# é".encode("latin-1"))
    (tmp_path / "crlf.py").write_bytes(b"a = 1\r\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("")
    files = tool.code_files(tmp_path)
    assert [path.name for path in files] == ["crlf.py", "latin.py"]
    assert [tool.read_utf8(path) for path in files] == ["a = 1\r\n", None]
