"""Instruction data (`--sft`): conversations in JSON lines, packed into samples; only the assistant's tokens have loss.

A line is an object with the key `messages`: a list of objects with the texts `role` (`system`, `user`, `assistant`) and
`content`. The tokenizer's chat template turns a conversation into one text. Every epoch shuffles the conversations; a
sample takes the next ones as long as they fit, and its remaining tokens have no loss.

C is the number of conversations of an epoch, L the number of tokens of a conversation, s that of a sample.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase

from megatron_balance.config.run_config import DataConfig
from megatron_balance.files.reading import check_regular, parse_json
from megatron_balance.messages import described
from megatron_balance.training.data_files import prefixes_by_flag

Messages = list[dict[str, str]]

CHECKED = 8
"""Number of conversations of a file that are tokenized before a run starts."""


def check_conversations(data: DataConfig, tokenizer: MegatronTokenizerBase) -> None:
    """Raise ValueError unless the tokenizer can write conversations, and the first ones of each file are valid."""
    encoder(tokenizer)
    for flag, paths in prefixes_by_flag(data).items():
        for path in paths:
            try:
                Conversations(path, tokenizer, 1, most=CHECKED)
            except ValueError as error:
                raise ValueError(f"{flag}: {error}") from error


class Tokens(NamedTuple):
    """A conversation."""

    ids_L: np.ndarray
    learned_L: np.ndarray
    """Whether a token has loss: it is part of an assistant's message, or of the marks that end one."""


class Conversations:
    """A file of conversations, of which only places and lengths stay in memory."""

    def __init__(self, path: str, tokenizer: MegatronTokenizerBase, longest: int, most: int | None = None) -> None:
        """Tokenize all conversations, or at most `most`, to learn their lengths; each is cut after `longest` tokens.

        ValueError names the file, the line and the problem.
        """
        self.path = path
        self.longest = longest
        self._encode = encoder(tokenizer)
        check_regular(path)
        places = []
        lengths = []
        end = 0
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                place = end
                end += len(line)
                if not line.strip():
                    continue
                try:
                    tokens = self._tokens(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
                places.append((place, len(line)))
                lengths.append(len(tokens.ids_L))
                if len(places) == most:
                    break
        if not places:
            raise ValueError(f"{path}: has no conversations")
        self._places = np.array(places, dtype=np.int64)
        self.lengths = np.array(lengths, dtype=np.int64)
        """[C] tokens of each conversation."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Tokens:
        place, size = self._places[number]
        with Path(self.path).open("rb") as file:
            file.seek(place)
            return self._tokens(file.read(size))

    def _tokens(self, line: bytes) -> Tokens:
        ids, learned = self._encode(messages_in(line))
        return Tokens(ids[: self.longest], learned[: self.longest])


def messages_in(line: bytes) -> Messages:
    """Return the messages of a conversation; ValueError says what a line has instead."""
    content = parse_json(line.decode("utf-8"))
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list):
        raise ValueError('is not an object with a list under the key "messages"')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError('has a message without texts under the keys "role" and "content"')
    if any(message["role"] == "system" for message in messages[1:]):
        raise ValueError("has a system message after the first message; write one conversation per line")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no message of the role assistant, from which to learn")
    return messages


def encoder(tokenizer: MegatronTokenizerBase) -> Callable[[Messages], Tokens]:
    """Return a function that tokenizes a conversation; ValueError if the tokenizer is not fit for that.

    The function raises ValueError if the template does not write messages one after the other.
    """
    fast: Any = getattr(getattr(tokenizer, "_tokenizer", None), "tokenizer", None)
    if not getattr(fast, "is_fast", False):
        raise ValueError(
            "--sft: the tokenizer does not tell where a token stands in the text; use --tokenizer-hf-use-fast"
        )
    if not fast.chat_template:
        raise ValueError("--sft: the tokenizer has no chat template; use the --tokenizer-model of an instruction model")

    def written(messages: Messages, asks: bool = False) -> str:
        try:
            return fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        except Exception as error:  # templates raise their own types
            raise ValueError(f"the tokenizer's chat template refuses it: {described(error)}") from error

    def encode(messages: Messages) -> Tokens:
        text = written(messages)
        encoded = fast(text, add_special_tokens=False, return_offsets_mapping=True)
        first, end = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        learned = np.zeros(len(first), dtype=bool)
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = written(messages[:number], asks=True)
                after = written(messages[: number + 1])
                if not (after.startswith(before) and text.startswith(after)):
                    raise ValueError("the chat template does not keep what it wrote for earlier messages")
                # A token without characters, or with some from before the answer, is not learned
                learned |= (len(before) <= first) & (first < end) & (end <= len(after))
        return Tokens(np.array(encoded["input_ids"], dtype=np.int64), learned)

    return encode


def pack(lengths_C: np.ndarray, length: int) -> np.ndarray:
    """Return the first conversation of each sample, then C: a sample takes the next ones as long as they fit."""
    ends = np.concatenate(([0], np.cumsum(lengths_C)))
    starts = [0]
    while starts[-1] < len(lengths_C):
        fitting = int(np.searchsorted(ends, ends[starts[-1]] + length, side="right")) - 1
        assert fitting > starts[-1], "no conversation is longer than a sample"
        starts.append(fitting)
    return np.array(starts)


@dataclass
class ConversationConfig(GPTDatasetConfig):
    """Configuration of the data sets of conversations."""

    files: dict[str, Conversations] = field(default_factory=dict)
    """The files that this rank has read, by path."""


class ConversationDataset(MegatronDataset):
    """Samples of packed conversations, of as many epochs as they need."""

    def __init__(self, dataset: Conversations, path: str, indices: np.ndarray, samples: int | None, *more: Any) -> None:
        """`indices`: the file's conversations that belong to this set; `samples`: how many it must have, None: those of
        an epoch."""
        super().__init__(dataset, path, indices, samples, *more)
        order = []
        starts = [np.zeros(1, dtype=np.int64)]
        generator = np.random.RandomState(self.config.random_seed)
        while len(order) == 0 or sum(map(len, starts)) - 1 < (samples or 0):
            order.append(generator.permutation(indices))
            packed = pack(dataset.lengths[order[-1]], self.config.sequence_length)
            starts.append(starts[-1][-1] + packed[1:])
        self._order = np.concatenate(order)
        self._starts = np.concatenate(starts)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: ConversationConfig) -> Conversations:
        return config.files[dataset_path]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Conversations) -> int:
        return len(low_level_dataset)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sample's `tokens`, `labels`, `position_ids` [s] int64 and `loss_mask` [s] float32."""
        length = self.config.sequence_length
        tokens = np.zeros(length, dtype=np.int64)
        labels = np.zeros(length, dtype=np.int64)
        positions = np.arange(length)
        loss_mask = np.zeros(length, dtype=np.float32)
        place = 0
        for number in self._order[self._starts[index] : self._starts[index + 1]]:
            ids, learned = self.dataset[number]
            own = slice(place, place + len(ids))
            # The last token of a conversation has no successor to predict
            predicting = slice(place, place + len(ids) - 1)
            tokens[own] = ids
            labels[predicting] = ids[1:]
            loss_mask[predicting] = learned[1:]
            place += len(ids)
            positions[place:] = np.arange(length - place)
            positions[own] = np.arange(len(ids))
        arrays = {"tokens": tokens, "labels": labels, "position_ids": positions, "loss_mask": loss_mask}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
