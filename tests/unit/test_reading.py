"""Users' files: every reader refuses special, large and damaged files immediately and by name."""

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_balance.checkpoint import saved_flags
from megatron_balance.checkpoint.directory import TRACKER, CheckpointDirectory
from megatron_balance.cli.arguments import build_parser, yaml_flags
from megatron_balance.convert import conversion
from megatron_balance.files.reading import (
    KIB,
    content_digest,
    inside,
    number_in,
    parse_json,
    read_bounded,
    read_object,
    read_text,
)
from megatron_balance.observe.load_log import read_loads
from megatron_balance.profile import cluster, cluster_profile
from megatron_balance.training.data_files import check_indices
from timeline_picture import load_timeline


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < 5


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


IRREGULAR = "is not a regular file (FIFOs, as `<(...)` makes them, and devices are refused); name one"
SPECIAL: dict[str, tuple[Callable[[Path], object], str]] = {
    "FIFO": (os.mkfifo, IRREGULAR),
    "directory": (Path.mkdir, "is a directory; name the file in it"),
    "socket": (bind, IRREGULAR),
    "device": (lambda path: path.symlink_to("/dev/zero"), IRREGULAR),
    "sparse": (sparse, "is larger than 4 KiB, the limit for such a file"),
    "absent": (lambda path: None, "cannot be read: No such file or directory"),
    "loop": (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_small_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    make, said = SPECIAL[kind]
    # A socket's path must be short
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file")
    with pytest.raises(ValueError) as refused:
        read_bounded(tmp_path / "file", 4 * KIB, "--flag")
    assert str(refused.value) == f"--flag {tmp_path / 'file'}: {said}"


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "timeline": ("rank0.json", load_timeline),
    "profile": ("profile.json", lambda path: cluster_profile.load(path, 4, 2)),
    "cluster": ("cluster.yaml", cluster.read),
    "yaml": ("flags.yaml", lambda path: yaml_flags(build_parser(), ["--yaml-cfg", str(path)])),
    "saved flags": (saved_flags.FILE, lambda path: saved_flags.read(path.parent)),
    "tracker": (TRACKER, lambda path: CheckpointDirectory(path.parent).tracked()),
    "loads": ("loads_rank00000_iter0000001.npz", lambda path: read_loads(path.parent)),
    "config": ("config.json", lambda path: conversion._model(path.parent)),
    "index": ("data.idx", lambda path: check_indices([str(path.with_suffix(""))], thorough=True)),
}


@pytest.mark.parametrize("name", READERS)
def test_no_reader_waits_for_a_fifo(tmp_path: Path, name: str) -> None:
    file, read = READERS[name]
    (tmp_path / "data.bin").write_bytes(b"1")
    os.mkfifo(tmp_path / file)
    with pytest.raises(ValueError, match=f"{tmp_path / file}:? is no.* regular file"):
        read(tmp_path / file)


@pytest.mark.parametrize("kind", ["FIFO", "directory", "device", "sparse", "absent"])
def test_files_of_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    SPECIAL[kind][0](tmp_path / "file")
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([f"@{tmp_path / 'file'}"])
    assert ended.value.code == 2
    said = SPECIAL[kind][1].replace("4 KiB", "64 KiB")
    assert f"error: @{tmp_path / 'file'}: {said}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"--lr\0 1", "byte 5 is zero"), (b"--l\xff", "invalid start byte at byte 4"), (b"'" * 9, "line 1: ")],
)
def test_files_of_flags_that_are_no_text(tmp_path, capsys, content: bytes, said: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(SystemExit):
        build_parser().parse_args([f"@{tmp_path / 'file'}"])
    assert f"@{tmp_path / 'file'}: " in (text := capsys.readouterr().err) and said in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON: Expecting value: line 1 column 1"),
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "has the key 'c' twice in one object; keep one of them"),
        ("[NaN]", "NaN is not a JSON number"),
        ("[-Infinity]", "-Infinity is not a JSON number"),
        ("9" * 100_000, "has 100000 digits"),
        ("[" * 100_000, "nest too deep"),
        ('{"a":' * 100_000, "nest too deep"),
    ],
)
def test_json_that_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_json(text)
    assert said in str(refused.value) and len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "content", [{"a": [1, -2.5, 'x\ud800\\"[{', None, True]}, {"a": [[[{"b": {}}]]]}, {"": ["[" * 50, 10**19, 1e308]}]
)
def test_json_that_is_read(tmp_path: Path, content: object) -> None:
    assert parse_json(json.dumps(content)) == content
    (tmp_path / "file").write_text(json.dumps(content))
    assert read_object(tmp_path / "file", 4 * KIB) == content


def test_text_is_utf8(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes("ä".encode("latin-1"))
    with pytest.raises(ValueError, match=r"file: is not text in UTF-8: .* at byte 1"):
        read_text(tmp_path / "file", 10)


@pytest.mark.parametrize("value", [True, None, "1", [1], 0, 11, 1.5, float("nan"), 10**400])
def test_numbers_out_of_range(value: object) -> None:
    with pytest.raises(ValueError, match=r"^here: .* is not an integer from 1 to 10 litres$"):
        number_in(value, 1, 10, "here", unit="litres", whole=True)


def cache(root: Path) -> Path:
    """Write one model as in Hugging Face's cache: a snapshot of links."""
    snapshot = root / "models--a--b" / "snapshots" / "0123"
    for folder in (root / "models--a--b" / "blobs", snapshot / "deeper"):
        folder.mkdir(parents=True)
    (root / "models--a--b" / "blobs" / "abc").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/abc")
    (snapshot / "deeper" / "config.json").symlink_to("../../../blobs/abc")
    return snapshot


def test_links_within_a_model_or_its_cache(tmp_path: Path) -> None:
    snapshot = cache(tmp_path)
    blob = tmp_path.resolve() / "models--a--b" / "blobs" / "abc"
    assert inside(snapshot, "config.json") == blob == inside(snapshot / "deeper", "config.json")
    (tmp_path / "linked").symlink_to(snapshot)
    assert inside(tmp_path / "linked", "config.json") == blob
    (snapshot / "plain").touch()
    (snapshot / "same").symlink_to("plain")
    assert inside(snapshot, "same") == (snapshot / "plain").resolve()


OUT = {
    "absolute": "/etc/passwd",
    "relative": "../../../secret",
    "by way of a blob": "../../blobs/bad",
    "another model's blob": "../../../models--c--d/blobs/abc",
    "refs": "../../refs",
    "itself": "link",
}


@pytest.mark.parametrize("kind", OUT)
def test_links_that_lead_out(tmp_path: Path, kind: str) -> None:
    snapshot = cache(tmp_path)
    (tmp_path / "secret").touch()
    (snapshot.parents[1] / "blobs" / "bad").symlink_to("/etc/passwd")
    (snapshot / "link").symlink_to(OUT[kind])
    with pytest.raises(ValueError, match=r"link: is a link (to .*, outside of the directory; put|that leads nowhere)"):
        inside(snapshot, "link")


def test_blobs_that_are_elsewhere_are_no_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (tmp_path / "blobs").symlink_to("/etc")
    (snapshot / "tokenizer").symlink_to("../../blobs/passwd")
    with pytest.raises(ValueError, match="is a link to /etc/passwd"):
        inside(snapshot, "tokenizer")


def test_the_content_of_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    directory = tmp_path / "directory"
    directory.mkdir()
    file.write_text("a")
    first = content_digest(file)
    (tmp_path / "other").write_text("a")
    assert content_digest(tmp_path / "other") == first
    file.write_text("b")
    assert content_digest(file) != first
    empty = content_digest(directory)
    (directory / "tokenizer.json").write_text("a")
    assert content_digest(directory) != empty
    assert "No such file or directory" in content_digest(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "fifo")
    assert "regular file" in content_digest(tmp_path / "fifo") and "regular file" in content_digest(Path("/dev/zero"))


def test_a_large_file_is_compared_in_places(tmp_path: Path) -> None:
    file = tmp_path / "file"
    size = 2**20
    file.write_bytes(bytes(size))
    first = content_digest(file, max_bytes=size - 1)
    assert first.startswith(f"{size} bytes, ")
    for place in (0, size // 7, size - 1):
        content = bytearray(size)
        content[place] = 1
        file.write_bytes(content)
        assert content_digest(file, max_bytes=size - 1) != first
