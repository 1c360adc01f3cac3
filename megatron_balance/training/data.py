"""Data sets, and the order in which ranks read their samples, in the formats of megatron.core.datasets."""

import functools
import hashlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder, TopLevelDataset
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.utils import Split
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from torch.utils.data import DataLoader, default_collate

from megatron_balance.config.run_config import DataConfig, RunConfig
from megatron_balance.device.documents import document_numbers, documents_of
from megatron_balance.files.reading import MIB, content_digest
from megatron_balance.job.errors import everywhere
from megatron_balance.job.groups import gather, sequence_chunks
from megatron_balance.messages import described
from megatron_balance.training import data_files
from megatron_balance.training.conversations import ConversationConfig, ConversationDataset, Conversations
from megatron_balance.training.schedule import Length
from megatron_balance.training.tokenizer import vocabulary

Batch = dict[str, torch.Tensor]
"""`tokens`, `labels`, `position_ids` [b, s] int64, `loss_mask` [b, s] float32. If documents are kept apart, also
`documents` (device/documents.py) of whole sequences. With multi-token prediction, also `prediction_mask(depth)` for
each depth, and `predictable` [depths], the sums of these masks over whole sequences."""

PER_SAMPLE = ("cu_seqlens", "max_seqlen")
"""Entries that newer versions of megatron-core add if documents are kept apart; `documents` replaces them."""


@dataclass(frozen=True)
class Data:
    """This rank's samples, one microbatch at a time; each list has one iterator per model chunk."""

    train: list[Iterator[Batch]]
    valid: list[Iterator[Batch]]
    """Empty if there are no validation data."""
    test: list[Iterator[Batch]]
    """Empty if there are no test data."""


def padded_vocab_size(size: int, divisible_by: int, tensor_parallel_size: int, wanted: int | None = None) -> int:
    """Round up the size so that tensor-parallel ranks get equal parts; ValueError if the `wanted` size is unfit."""
    if wanted is not None:
        if wanted < size or wanted % tensor_parallel_size:
            least = f"at least {size}, the size of the tokenizer's vocabulary"
            multiple = f"a multiple of --tensor-model-parallel-size {tensor_parallel_size}"
            raise ValueError(f"--padded-vocab-size {wanted}: must be {least}, and {multiple}")
        return wanted
    multiple = divisible_by * tensor_parallel_size
    return -(-size // multiple) * multiple


def build_data(
    config: RunConfig,
    tokenizer: MegatronTokenizerBase,
    groups: ProcessGroupCollection,
    length: Length,
    *,
    consumed: tuple[Callable[[], int], Callable[[], int]] = (lambda: 0, lambda: 0),
) -> Data:
    """Build the data sets (rank 0 writes the index caches first) and this rank's iterators over them.

    `consumed` returns the numbers of samples that training and validation have consumed, when their first one is drawn.
    """
    # Only the first and last stage read samples (tokens and labels), unless all stages must know the documents
    reads = is_pp_first_stage(groups.pp) or is_pp_last_stage(groups.pp) or config.data.documents_apart
    _check_files(config.data, reads)
    settings = _dataset_config(config, tokenizer)
    kind: Any = MockGPTDataset if config.data.mock_data else GPTDataset
    if isinstance(settings, ConversationConfig):
        settings.files = _conversations(config, tokenizer)
        kind = ConversationDataset
    builder = BlendedMegatronDatasetBuilder(
        kind, _num_samples(config, length), lambda: reads or torch.distributed.get_rank() == 0, settings
    )
    chunks = config.transformer.virtual_pipeline_model_parallel_size or 1
    vocab_size = vocabulary(tokenizer, config.tokenizer)
    datasets = _build_datasets(builder, config.data)
    # Rank 0 has built all sets, an inner stage none. All ranks must know which sets exist
    exist = gather([dataset is not None for dataset in datasets])[0]

    def iterators(split: Split, consumed: Callable[[], int], repeat: bool) -> list[Iterator[Batch]]:
        dataset = datasets[split.value]
        count = chunks * exist[split.value]
        if dataset is None:
            return [iter(()) for _ in range(count)]
        options = {"vocab_size": vocab_size, "consumed": consumed, "repeat": repeat}
        if config.data.documents_apart:
            # All chunks read, one after the other, so they share a loader and its workers
            return [*itertools.tee(_iterate(dataset, config, groups, **options), count)]
        return [_iterate(dataset, config, groups, **options) for _ in range(count)]

    train = iterators(Split.train, consumed[0], False)
    return Data(train, iterators(Split.valid, consumed[1], True), iterators(Split.test, lambda: 0, True))


def _check_files(data: DataConfig, reads: bool) -> None:
    """Raise ValueError on every rank if rank 0, or a rank that reads samples, has invalid or different files."""
    prefixes = data_files.paths(data)
    rank = torch.distributed.get_rank()

    def checked() -> dict[str, str]:
        if not reads and rank:
            return {}
        data_files.check_caches(prefixes, data.data_cache_path)
        paths = prefixes
        if not data.sft:
            # One thorough check suffices for shared files. But a rank may lack a mount that rank 0 has
            data_files.check_indices(prefixes, thorough=rank == 0)
            paths = [f"{prefix}.{ending}" for prefix in prefixes for ending in ("idx", "bin")]
        # There may be hundreds of files, so large ones are compared by size and a few samples
        return {path: content_digest(Path(path), MIB) for path in paths}

    contents = everywhere(checked)
    # Gather one digest per rank first: thousands of ranks may read hundreds of files
    digest = hashlib.blake2b(repr(contents).encode(), digest_size=16).hexdigest() if contents else None
    if len({*gather(digest)} - {None}) > 1:
        of_first, *others = gather(contents)
        for rank, own in enumerate(others, 1):
            for path in (path for path in own if own[path] != of_first[path]):
                raise ValueError(f"{path}: another file on rank {rank} than on rank 0; give all nodes the same data")


def _build_datasets(builder: BlendedMegatronDatasetBuilder, data: DataConfig) -> list[TopLevelDataset | None]:
    """Build the data sets; raise ValueError on every rank if a rank lacks an index that the fast load expects."""
    if not data.dataloader_fast_cache_load:
        return builder.build()

    def built() -> list[TopLevelDataset | None]:
        try:
            return builder.build()
        except Exception as error:
            remedy = "run once without the flag, which writes the indices to --data-cache-path"
            problem = described(error.__cause__ or error)
            raise ValueError(f"--dataloader-fast-cache-load: {problem}; {remedy}") from error

    return everywhere(built)


def _num_samples(config: RunConfig, length: Length) -> list[int]:
    """Return the numbers of samples that training, all validations and one test will draw."""
    train = config.train
    if train.eval_interval is None:
        return [length.samples, 0, 0]
    evaluated = train.eval_iters * train.global_batch_size
    return [length.samples, (length.iterations // train.eval_interval + 1) * evaluated, evaluated]


def _conversations(config: RunConfig, tokenizer: MegatronTokenizerBase) -> dict[str, Conversations]:
    """Read all files of conversations; raise ValueError on every rank if one of them is invalid."""

    def read(path: str) -> Conversations:
        found = Conversations(path, tokenizer, config.model.seq_length)
        data_files.check_split(path, len(found), config.data.split)
        return found

    return everywhere(lambda: {path: read(path) for path in data_files.paths(config.data)})


def _dataset_config(config: RunConfig, tokenizer: MegatronTokenizerBase) -> GPTDatasetConfig:
    data: DataConfig = config.data
    paths = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    blend, *per_split = (data_files.parse_blend(words) if words else None for words in paths)
    # Only newer versions have the field
    within_files: dict[str, Any] = {"inter_document_masking": True} if data.dataloader_inter_document_masking else {}
    return (ConversationConfig if data.sft else GPTDatasetConfig)(
        random_seed=config.train.seed,
        sequence_length=config.model.seq_length,
        blend=blend,
        blend_per_split=per_split if any(per_split) else None,
        split=data.split,
        path_to_cache=data.data_cache_path,
        tokenizer=tokenizer,
        # The positions show where documents begin
        reset_position_ids=data.reset_position_ids or data.reset_attention_mask,
        reset_attention_mask=False,
        eod_mask_loss=data.eod_mask_loss,
        mid_level_dataset_surplus=data.mid_level_dataset_surplus,
        num_dataset_builder_threads=data.num_dataset_builder_threads,
        mmap_bin_files=data.mmap_bin_files,
        fast_cache_load=data.dataloader_fast_cache_load,
        defer_npy_index_mmap=data.dataloader_defer_npy_index_mmap,
        allow_ambiguous_pad_tokens=data.allow_ambiguous_pad_tokens,
        # Attention is causal by construction, so a mask per sample would only cost memory
        create_attention_mask=False,
        **within_files,
    )


def _end_with_the_rank(rank_pid: int, worker: int) -> None:
    """Let only the rank end its loader's workers: SLURM signals all processes of a job before the rank has saved."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank_pid:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _iterate(
    dataset: TopLevelDataset,
    config: RunConfig,
    groups: ProcessGroupCollection,
    *,
    vocab_size: int,
    consumed: Callable[[], int],
    repeat: bool,
) -> Iterator[Batch]:
    """Yield this rank's microbatches on its device; with `repeat`, start again at the end."""
    step = config.train.micro_batch_size * groups.dp.size()
    position = consumed() % max(1, len(dataset) // step * step) if repeat else consumed()
    device = torch.cuda.current_device()
    while True:
        samples = microbatch_samples(
            len(dataset),
            micro_batch_size=config.train.micro_batch_size,
            rank=groups.dp.rank(),
            ranks=groups.dp.size(),
            consumed=position,
        )
        loader = DataLoader(
            dataset,
            batch_sampler=samples,
            collate_fn=functools.partial(collate, data=config.data),
            num_workers=config.data.num_workers,
            pin_memory=torch.cuda.is_available(),
            # Seeds from the default generator would change the random numbers of dropout
            generator=torch.Generator().manual_seed(config.train.seed),
            worker_init_fn=functools.partial(_end_with_the_rank, os.getpid()),
        )
        for sample in loader:
            check_batch(sample, dataset, vocab_size)
            batch = {name: value.to(device, non_blocking=True) for name, value in sample.items()}
            batch |= prediction_masks(batch, config.transformer.mtp_num_layers or 0)
            yield on_context_rank(batch, groups.cp.rank(), groups.cp.size())
        if not repeat:
            return
        position = 0


def collate(samples: list[Batch], data: DataConfig) -> Batch:
    """Return the tensors of a microbatch in host memory; with `documents`, if documents are kept apart."""
    batch = default_collate(samples)
    if not data.documents_apart:
        return batch
    positions = batch["position_ids"]
    batch["documents"] = documents_of(positions)
    if data.reset_attention_mask and not data.reset_position_ids:
        batch["position_ids"] = torch.arange(positions.shape[1]).repeat(len(positions), 1)
    return {name: value for name, value in batch.items() if name not in PER_SAMPLE}


def on_context_rank(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return a context-parallel rank's part [b, s / ranks] of each sequence; other tensors stay whole."""
    if ranks == 1:
        return batch

    def part(whole: torch.Tensor) -> torch.Tensor:
        chunks = whole.chunk(2 * ranks, 1)
        return torch.cat([chunks[chunk] for chunk in sequence_chunks(rank, ranks)], 1)

    return {name: part(value) if value.dim() > 1 else value for name, value in batch.items()}


def prediction_mask(depth: int) -> str:
    """Return the key in a Batch of the mask [b, s] of tokens with a prediction at `depth`, from 1."""
    return f"loss_mask_{depth}"


def prediction_masks(batch: Batch, depths: int) -> Batch:
    """Return the entries of a Batch for multi-token prediction; `batch` has whole sequences.

    At depth d, a token predicts the label of the token d places later, which may be masked or beyond the sequence. If
    documents are kept apart, it may also belong to another document, whose tokens the prediction must not read.
    """
    if not depths:
        return {}
    loss_mask = batch["loss_mask"]
    masks = [torch.nn.functional.pad(loss_mask[:, depth:], (0, depth)) for depth in range(1, 1 + depths)]
    if "documents" in batch:
        numbers_bs = document_numbers(batch["documents"], *loss_mask.shape)
        for depth, mask in enumerate(masks, 1):
            mask[:, :-depth] *= numbers_bs[:, depth:] == numbers_bs[:, :-depth]
    numbers = torch.stack([mask.sum() for mask in masks])
    return {prediction_mask(depth): mask for depth, mask in enumerate(masks, 1)} | {"predictable": numbers}


def batch_bytes(micro_batch_size: int, seq_length: int) -> int:
    """Return the bytes of a Batch: three tensors of int64 and one of float32."""
    return micro_batch_size * seq_length * 28


def check_batch(batch: Batch, dataset: TopLevelDataset, vocab_size: int) -> None:
    """Raise ValueError, naming the file, if a token id of a microbatch in host memory is outside the vocabulary."""
    for tokens in (batch["tokens"], batch["labels"]):
        low, high = torch.aminmax(tokens)
        if low >= 0 and high < vocab_size:
            continue
        row = int(((tokens < 0) | (tokens >= vocab_size)).any(1).nonzero()[0])
        source: Any = dataset
        if "dataset_id" in batch:
            source = source.datasets[batch["dataset_id"][row]]
        data_files.check_tokens(f"{source.dataset_path}.bin", tokens[row].numpy(), vocab_size)


def microbatch_samples(
    total: int, *, micro_batch_size: int, rank: int, ranks: int, consumed: int = 0
) -> Iterator[list[int]]:
    """Yield the sample indices of each microbatch of one data-parallel rank, after `consumed` samples.

    Consecutive microbatches go to consecutive data-parallel ranks, so global batches do not depend on the layout.
    """
    step = micro_batch_size * ranks
    if total - consumed < step:
        few = f"{total} samples, {consumed} of them consumed: too few for a microbatch of {ranks} data-parallel ranks"
        raise ValueError(f"the dataset has {few}; lower --micro-batch-size or --eval-iters, or give more data")
    for first in range(consumed, total - step + 1, step):
        start = first + rank * micro_batch_size
        yield list(range(start, start + micro_batch_size))
