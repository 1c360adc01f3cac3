"""checkpoint/manifest.py: every change of a checkpoint's files is found, and the file is named."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_balance.checkpoint import manifest
from megatron_balance.checkpoint.manifest import Damaged, Entry, Manifest, Origin

CONTENT = {
    ".metadata": b"\x80\x04metadata",
    "__0_0.distcp": bytes(range(256)) * 20,
    "__1_0.distcp": b"x",
    "common.pt": b"common" * 100,
    "empty": b"",
}
ORIGIN = Origin(
    run="first-run",
    host="node7",
    started="2026-11-23 10:00:00 UTC",
    saved="2026-11-23 11:00:00 UTC",
    parent="",
    versions={"torch": "2.13.0"},
)
EVERY = (*CONTENT, manifest.NAME)
names = st.sampled_from(EVERY)
offsets = st.integers(0, 1 << 20)


def save(directory: Path) -> Path:
    """Write a small, complete checkpoint."""
    for name, content in CONTENT.items():
        (directory / name).write_bytes(content)
    manifest.write(directory, 20, ORIGIN, {name: manifest.digest(directory / name) for name in CONTENT})
    return directory


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def own(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a checkpoint to damage."""
    return Path(shutil.copytree(checkpoint, tmp_path / "own"))


def damage(checkpoint: Path, name: str, change: Callable[[bytes], bytes]) -> Damaged | None:
    """Return the error of `verify` while one file of the checkpoint is changed."""
    path = checkpoint / name
    before = path.read_bytes()
    path.write_bytes(change(before))
    try:
        manifest.verify(checkpoint, CONTENT)
    except Damaged as damaged:
        return damaged
    finally:
        path.write_bytes(before)
    return None


def rewritten(own: Path, change: Callable[[dict], object]) -> None:
    """Write a manifest with other content and a valid seal."""
    path = own / manifest.NAME
    content = json.loads(path.read_text())
    change(content)
    del content["manifest"]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    content["manifest"] = hashlib.blake2b(canonical, digest_size=32).hexdigest()
    path.write_text(json.dumps(content))


def test_round_trip(checkpoint: Path) -> None:
    expected = {
        name: Entry(len(content), hashlib.blake2b(content, digest_size=32).hexdigest())
        for name, content in CONTENT.items()
    }
    assert manifest.read(checkpoint) == Manifest(20, ORIGIN, expected)
    manifest.verify(checkpoint, CONTENT)


def test_the_file_is_sorted_readable_json(checkpoint: Path) -> None:
    text = (checkpoint / manifest.NAME).read_text()
    assert list(json.loads(text)) == ["format", "iteration", "origin", "files", "manifest"]
    assert [line.split('"')[1] for line in text.splitlines() if "blake2b" in line] == sorted(CONTENT)


def test_the_head_tells_the_run(own: Path) -> None:
    assert manifest.run_of(own) == ORIGIN.run and str(ORIGIN).startswith("run first-run, saved on node7 at 2026")
    (own / manifest.NAME).write_bytes((own / manifest.NAME).read_bytes().replace(b'"run"', b'"nur"'))
    assert manifest.run_of(own) is None and manifest.run_of(own / "absent") is None


def flip(content: bytes, offset: int, added: bytes) -> bytes:
    """Flip one bit."""
    place = offset % len(content)
    return content[:place] + bytes([content[place] ^ 1 << offset // len(content) % 8]) + content[place + 1 :]


def truncate(content: bytes, offset: int, added: bytes) -> bytes:
    return content[: offset % len(content)]


def insert(content: bytes, offset: int, added: bytes) -> bytes:
    place = offset % (len(content) + 1)
    return content[:place] + added + content[place:]


@pytest.mark.parametrize("change", [flip, truncate, insert])
@given(name=names, offset=offsets, added=st.binary(min_size=1, max_size=20))
def test_a_changed_file_is_named(checkpoint: Path, change: Callable, name: str, offset: int, added: bytes) -> None:
    if name != "empty" or change is insert:
        damaged = damage(checkpoint, name, lambda content: change(content, offset, added))
        assert damaged is not None and damaged.path == checkpoint / name and str(checkpoint / name) in str(damaged)


@pytest.mark.parametrize("name", EVERY)
def test_a_file_is_renamed(own: Path, name: str) -> None:
    (own / name).rename(own / "other")
    with pytest.raises(Damaged) as error:
        manifest.verify(own, CONTENT)
    assert error.value.path == own / name


def test_files_are_exchanged(own: Path) -> None:
    first = own / "common.pt"
    second = own / "__0_0.distcp"
    first.write_bytes(CONTENT["__0_0.distcp"])
    second.write_bytes(CONTENT["common.pt"])
    for path in (first, second):
        with pytest.raises(Damaged, match=r"has .* bytes, .* when saved") as error:
            manifest.verify(own, [path.name])
        assert error.value.path == path


def test_sizes_are_compared_before_any_file_is_read(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (own / "common.pt").write_bytes(b"short")
    monkeypatch.setattr(manifest, "digest", lambda path: pytest.fail(f"{path} was read"))
    with pytest.raises(Damaged, match=r"common.pt: has 5 bytes, 600 when saved"):
        manifest.verify(own, CONTENT)


def test_ranks_share_the_files(own: Path) -> None:
    (own / "common.pt").write_bytes(b"y" * 600)
    manifest.verify(own, [name for name in CONTENT if name != "common.pt"])
    with pytest.raises(Damaged, match=r"common.pt: content was changed: digest [0-9a-f]{64}, [0-9a-f]{64} when saved"):
        manifest.verify(own, ["common.pt"])


def test_a_name_that_is_not_listed(checkpoint: Path) -> None:
    with pytest.raises(Damaged, match=r"__7_0.distcp: is not listed in manifest.json"):
        manifest.verify(checkpoint, ["__7_0.distcp"])


NAMES = ("../etc/passwd", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\nb")
SHAPES: dict[str, tuple[Callable[[dict], object], str]] = {
    **{
        f"name {name!a}": (lambda m, name=name: m["files"].update({name: m["files"]["empty"]}), "is not a name")
        for name in NAMES
    },
    "another format": (lambda m: m.update(format=2), "format 2, this version reads 1"),
    "no origin": (lambda m: m.pop("origin"), "is not a manifest"),
    "origin without a host": (lambda m: m["origin"].pop("host"), "is not a manifest"),
    "files is a list": (lambda m: m.update(files=[]), "is not a manifest"),
    "an entry has more": (lambda m: m["files"]["empty"].update(more=1), "is not a manifest"),
    # The seal is valid, but the rendering differs
    "more": (lambda m: m.update(more=1), "was changed"),
    "another layout": (lambda m: None, "was changed"),
}
"""Changes of a manifest that get a valid seal, and part of the reason for the refusal."""


@pytest.mark.parametrize(("change", "reason"), SHAPES.values(), ids=SHAPES)
def test_a_sealed_manifest_of_another_shape(own: Path, change: Callable[[dict], object], reason: str) -> None:
    rewritten(own, change)
    with pytest.raises(Damaged, match=reason) as error:
        manifest.read(own)
    assert error.value.path == own / manifest.NAME


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"\xff", b"1" * 5000, b"[" * 100_000, b'{"a": NaN}', b"\x80\x04."],
    ids=lambda content: str(content[:9]),
)
def test_not_a_manifest(own: Path, content: bytes) -> None:
    (own / manifest.NAME).write_bytes(content)
    with pytest.raises(Damaged, match="is not a manifest") as error:
        manifest.read(own)
    assert error.value.path == own / manifest.NAME


def test_damage_travels_between_ranks() -> None:
    damaged = pickle.loads(pickle.dumps(Damaged(Path("/a/common.pt"), "is absent")))
    assert damaged.path == Path("/a/common.pt") and str(damaged) == "/a/common.pt: is absent"
