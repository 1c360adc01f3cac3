"""Checks of the data against the flags, by one rank alone: files, vocabulary, split and sequence length."""

import re

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from megatron_balance.config.run_config import RunConfig
from megatron_balance.training.data import parse_blend, sources
from megatron_balance.training.data_files import check_samples, contents

SETS = ("training", "validation", "test")

Bounds = tuple[float, float] | None
"""Start and end of a set, as fractions of a data set's documents; None for a set that is not built."""


def check_data(config: RunConfig, vocabulary: int, *, reads: bool) -> list[str]:
    """Check the data of a run; return notices for the log.

    Headers and samples are read (see `check_samples`), never whole files.

    Args:
        vocabulary: number of token ids.
        reads: whether this rank reads samples; otherwise, only the flags are checked.

    Raises:
        ValueError: the data cannot be used; the error names the flag or the file, and the remedy.
    """
    data = config.data
    split = config.data.split
    bounds = None if split is None else _bounds(split)
    for flag, paths in sources(data).items():
        prefixes, _ = parse_blend(paths, flag)
        if not reads:
            continue
        try:
            check_samples(prefixes, vocabulary)
            for prefix in prefixes:
                _check_documents(prefix, bounds if flag == "--data-path" else None, split)
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from error
    if reads:
        _check_length(config)
    return _notices(config, bounds)


def _bounds(split: str) -> list[Bounds]:
    """Return where each set begins and ends, as megatron.core finds it."""
    sizes = re.findall(r"[.0-9]+", split)
    try:
        numbers = [float(size) for size in sizes]
    except ValueError:
        numbers = []
    if "-" in split or not 1 <= len(numbers) <= len(SETS) or not numbers[0]:
        raise ValueError(
            f"--split {split}: give the relative sizes of the training, validation and test sets, such as 969,30,1; "
            "the first must be above 0"
        )
    return convert_split_vector_to_split_matrix(parse_and_normalize_split(split))


def _check_documents(prefix: str, bounds: list[Bounds] | None, split: str | None) -> None:
    """Check that every set has a document: megatron.core would repeat an empty set for ever to fill a sample."""
    documents = contents(prefix).documents
    if not documents:
        raise ValueError(f"{prefix}: has no documents; build it again with tools/preprocess_data.py")
    ends = [one and tuple(round(end * float(documents)) for end in one) for one in bounds or ()]
    empty = [name for name, one in zip(SETS, ends, strict=False) if one and one[0] == one[1]]
    if empty:
        raise ValueError(
            f"{prefix}: --split {split} leaves none of its {documents} documents for the {' and the '.join(empty)} "
            f"set; give more documents, or other sizes (0 for a set that the run does not need)"
        )


def _check_length(config: RunConfig) -> None:
    """Check that the training data fill at least one sample."""
    given = sources(config.data)
    length = config.model.seq_length
    flag = "--data-path" if "--data-path" in given else "--train-data-path"
    if flag not in given:
        return
    tokens = sum(contents(prefix).tokens for prefix in parse_blend(given[flag])[0])
    if tokens <= length:
        raise ValueError(
            f"--seq-length {length}: is longer than all of {flag}, which has {tokens} tokens; give more data, or a "
            "smaller --seq-length"
        )


def _notices(config: RunConfig, bounds: list[Bounds] | None) -> list[str]:
    interval = config.train.eval_interval
    data = config.data
    absent = bounds[1] is None if bounds is not None else not (data.valid_data_path or data.mock_data)
    if interval is None or not absent:
        return []
    where = f"--split {data.split}" if bounds is not None else "no --valid-data-path"
    return [f"--eval-interval {interval} has no effect: there are no validation data ({where})"]
