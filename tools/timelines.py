"""Reads the files that runs write with `--balance-timeline`."""

from pathlib import Path
from typing import Any

from megatron_balance.files.reading import MIB, read_object
from megatron_balance.messages import described
from megatron_balance.observe.trace import STREAMS, TraceEvent

MAX_BYTES = 512 * MIB
"""Maximum size of a file."""


def load_timeline(path: Path) -> list[TraceEvent]:
    """Read the spans of a file, or of several merged files, thread by thread.

    Raises:
        ValueError: the file is not from `Timeline`; the error names the path.
    """
    content = read_object(path, MAX_BYTES)
    try:
        return [_read(event) for event in content["traceEvents"] if event["ph"] == "X"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: is not a timeline of --balance-timeline ({described(error)})") from error


def _read(event: dict[str, Any]) -> TraceEvent:
    args = event["args"]
    if event["cat"] not in STREAMS:
        raise ValueError(f"no stream is called {event['cat']}")
    return TraceEvent(
        rank=int(event["pid"]),
        iteration=int(args["iteration"]),
        stream=event["cat"],
        name=event["name"],
        start_us=float(event["ts"]),
        end_us=float(event["ts"]) + float(event["dur"]),
        issued_us=float(args["issued_us"]) if "issued_us" in args else None,
        num_bytes=int(args.get("bytes", 0)),
    )
