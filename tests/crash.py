"""The checkpoint directories that a machine crash may leave, derived from the record of a real save.

Inodes identify files and directories. A crash may lose file content that was not fsynced, and any change to a
directory's entries since the directory's own fsync. A rename is atomic.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from megatron_balance.checkpoint import lease
from megatron_balance.checkpoint.directory import UNFINISHED

CHANGES = ("rename", "replace", "mkdir", "rmdir", "unlink")

Entries = dict[str, int]
"""Name -> inode."""

Content = tuple[str, int]
"""Digest of a file, and when it was modified (ns)."""

Files = dict[str, Content | None]
"""Path below the root -> content; None for a directory."""


class Event(NamedTuple):
    """The tree just before an operation; with `synced`, what an fsync of that inode put on disk."""

    directories: dict[int, Entries]
    contents: dict[int, Content]
    synced: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Recorder:
    """Records the file operations below `root` of this process and its forks; keeps the files in `kept`."""

    root: Path
    kept: Path

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what happens inside; the last event is the tree at the end."""
        self.kept.mkdir(exist_ok=True)
        fsync = os.fsync

        def synced(descriptor: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            tree = self._note()
            fsync(descriptor)
            if path.is_relative_to(self.root):
                self._write(tree._replace(synced=os.fstat(descriptor).st_ino, name=path.name))

        def noted(change: Callable) -> Callable:
            def operation(*args: Any, **kwargs: Any) -> Any:
                self._note()
                return change(*args, **kwargs)

            return operation

        changes = {name: noted(getattr(os, name)) for name in CHANGES}
        with mock.patch.multiple(os, fsync=synced, **changes):
            yield
        self._note()

    def events(self) -> list[Event]:
        """Return the events in the order in which they happened."""
        lines = (json.loads(line) for line in (self.kept / "log").read_text().splitlines())
        return [
            Event(
                {int(inode): entries for inode, entries in directories.items()},
                {int(inode): tuple(content) for inode, content in contents.items()},
                *rest,
            )
            for directories, contents, *rest in lines
        ]

    def _note(self) -> Event:
        event = self._tree()
        self._write(event)
        return event

    def _write(self, event: Event) -> None:
        # Open by path: writer processes close inherited descriptors
        log = os.open(self.kept / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, f"{json.dumps(event)}\n".encode())
        os.close(log)

    def _tree(self) -> Event:
        event = Event({}, {})
        waiting = [self.root]
        while waiting:
            directory = waiting.pop()
            entries = event.directories.setdefault(directory.stat().st_ino, {})
            for entry in os.scandir(directory):
                if lease.NAME.fullmatch(entry.name):
                    # A lease concerns live processes, and none survives a crash
                    continue
                if entry.is_dir():
                    waiting.append(Path(entry.path))
                else:
                    try:
                        event.contents[entry.inode()] = self._keep(Path(entry.path))
                    except FileNotFoundError:
                        # Another process has just removed it
                        continue
                entries[entry.name] = entry.inode()
        return event

    def _keep(self, path: Path) -> Content:
        with contextlib.suppress(FileExistsError):
            # The link keeps the inode from being reused for another file
            os.link(path, self.kept / f"inode {path.stat().st_ino}")
        raw = path.read_bytes()
        modified = path.stat().st_mtime_ns
        self.file((digest := hashlib.blake2b(raw).hexdigest()[:16], modified), raw)
        return digest, modified

    def file(self, content: Content, raw: bytes = b"") -> Path:
        """Return the path of a stored content; store `raw` if it is new."""
        path = self.kept / f"{content[0]} {content[1]}"
        if not path.exists():
            part = path.with_name(f"{path.name} {os.getpid()}")
            part.write_bytes(raw)
            os.utime(part, ns=(content[1], content[1]))
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
        return path


class Change(NamedTuple):
    """A change to one name in a directory: without `inode` it is removed; `old` is its name before a rename."""

    name: str
    inode: int | None
    old: str | None = None


@dataclass
class Disk:
    """What is certainly on disk, and which changes are pending."""

    entries: dict[int, Entries]
    contents: dict[int, Content]
    pending: dict[int, list[Change]] = field(default_factory=dict)
    seen: dict[int, Entries] = field(default_factory=dict)

    def see(self, event: Event) -> None:
        """Mark the changes since the last event as pending."""
        for inode, entries in event.directories.items():
            self.pending.setdefault(inode, []).extend(_changes(self.seen.get(inode, {}), entries))
        self.seen = self.seen | event.directories

    def sync(self, event: Event) -> None:
        """Mark what the event synced as on disk."""
        assert event.synced is not None
        if event.synced in event.directories:
            self.entries[event.synced] = event.directories[event.synced]
            # Changes after the event's tree was taken are still pending
            self.pending[event.synced] = _changes(event.directories[event.synced], self.seen[event.synced])
        elif event.synced in event.contents:
            self.contents[event.synced] = event.contents[event.synced]

    def crashes(self, event: Event, root: int) -> Iterator[Files]:
        """Yield the trees that a crash may leave now."""
        whole = {inode: _applied(self.entries.get(inode, {}), changes) for inode, changes in self.pending.items()}
        lost = {
            inode: self.contents.get(inode, ("", content[1]))
            for inode, content in event.contents.items()
            if self.contents.get(inode) != content
        }
        contents = self.contents | event.contents
        contents_after = [contents, contents | lost, *(contents | {inode: lost[inode]} for inode in lost)]
        directories_after = [whole]
        for inode in self.pending.keys() - {root}:
            directories_after += [
                whole | {inode: entries} for entries in self._after(inode, (0, len(self.pending[inode]) - 1))
            ]
        for entries in self._after(root, range(len(self.pending.get(root, ())) + 1)):
            for directories in directories_after:
                yield _files(root, directories | {root: entries}, contents)
            for after in contents_after:
                yield _files(root, whole | {root: entries}, after)

    def _after(self, inode: int, counts: Iterable[int]) -> Iterator[Entries]:
        """Yield a directory's entries after every ordered choice of `count` pending changes, for each of `counts`."""
        for count in counts:
            for chosen in itertools.combinations(self.pending.get(inode, ()), max(count, 0)):
                yield _applied(self.entries.get(inode, {}), chosen)


def _changes(before: Entries, after: Entries) -> list[Change]:
    gone = before.keys() - after.keys()
    names = {inode: name for name, inode in before.items()}
    found = []
    for name, inode in after.items():
        if before.get(name) != inode:
            old = names.get(inode)
            found.append(Change(name, inode, old if old in gone else None))
    renamed = {change.old for change in found}
    return [*found, *(Change(name, None) for name in gone - renamed)]


def _applied(entries: Entries, changes: Iterable[Change]) -> Entries:
    entries = dict(entries)
    for name, inode, old in changes:
        entries.pop(name if old is None else old, None)
        if inode is not None:
            entries[name] = inode
    return entries


def _files(directory: int, directories: Mapping[int, Entries], contents: Mapping[int, Content], at: str = "") -> Files:
    found: Files = {}
    for name, inode in directories.get(directory, {}).items():
        if inode in contents:
            found[f"{at}{name}"] = contents[inode]
            continue
        found[f"{at}{name}"] = None
        match = UNFINISHED.fullmatch(name)
        # Nothing reads the contents of other unfinished directories
        if match is None or match[2] == "replaced":
            found |= _files(inode, directories, contents, f"{at}{name}/")
    return found


def crashes(events: list[Event], root: int, dropped: Collection[int] = ()) -> Iterator[tuple[Files, bool]]:
    """Yield every tree that a crash may leave, and whether the record had ended by then.

    Args:
        root: inode of the directory, which is entirely on disk at the first event.
        dropped: numbers of fsync events to leave out.
    """
    disk = Disk(dict(events[0].directories), dict(events[0].contents), seen=dict(events[0].directories))
    for number, event in enumerate(events):
        if event.synced is None:
            disk.see(event)
            yield from ((files, event is events[-1]) for files in disk.crashes(event, root))
        elif number not in dropped:
            disk.sync(event)
