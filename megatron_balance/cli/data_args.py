"""Blends of data sets that are named in a file because they are too long for a command line."""

import json
from collections.abc import Mapping
from typing import Any

from megatron_balance.config.flags import flag_of
from megatron_balance.files.reading import MIB, read_object, read_text

MOST_BYTES = 16 * MIB
"""Maximum size of a file that names data sets."""

SPLITS = ("train", "valid", "test")


def data_in_files(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the values of `--data-path`, or of the paths per split, that files hold; empty if no file is given.

    Args:
        values: all flags by field name.

    Raises:
        ValueError: a file cannot be read or has another form, or a flag gives the same data.
    """
    blend = values["data_args_path"]
    per_split = values["per_split_data_args_path"]
    found: dict[str, list[str]] = {}
    if blend is not None:
        found["data_path"] = read_text(blend, MOST_BYTES, "--data-args-path").split()
        if not found["data_path"]:
            raise ValueError(f"--data-args-path {blend}: names no data; write the words of --data-path into it")
    if per_split is not None:
        found |= {f"{split}_data_path": words for split, words in _splits(per_split).items()}
    for name in found:
        if values[name]:
            source = "data_args_path" if name == "data_path" else "per_split_data_args_path"
            raise ValueError(f"{flag_of(source)} and {flag_of(name)}: give one of them")
    return found


def _splits(path: str) -> dict[str, list[str]]:
    flag = f"--per-split-data-args-path {path}"
    blends = read_object(path, MOST_BYTES, "--per-split-data-args-path")
    found = {}
    for split in SPLITS:
        words = blends.get(split, [])
        words = words.split() if isinstance(words, str) else words
        if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
            raise ValueError(f"{flag}: {split} is {json.dumps(words)[:80]}; give a list, or a text of words")
        found[split] = [str(word) for word in words]
    if not found["train"]:
        raise ValueError(f"{flag}: has no data under the key train")
    return found
