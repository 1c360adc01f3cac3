"""Conversations: which tokens are learned, how samples are packed, and which files are refused."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.utils import Split

from megatron_balance.config.training_config import DataConfig, TokenizerConfig
from megatron_balance.training.conversations import (
    ConversationDataset,
    Conversations,
    check_conversations,
    encoder,
    pack,
)
from megatron_balance.training.tokenizer import build_tokenizer
from tests import chat

SAMPLE = 48
"""Tokens of a sample."""

CONVERSATIONS = [
    chat.conversation("what is the weather", "rain"),
    [{"role": "system", "content": "in Oslo"}, *chat.conversation("what", "sun and snow", "rain", "is the sun")],
    chat.conversation("snow", "in Oslo and the rain, the sun and the snow " * 8),
    chat.conversation("is rain the weather", "sun"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return chat.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    return build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model))


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_assistants_words_are_learned(tokenizer: Any, messages: list[dict[str, str]]) -> None:
    ids, learned = encoder(tokenizer)(messages)
    fast = tokenizer._tokenizer.tokenizer
    assert fast.decode(ids) == fast.apply_chat_template(messages, tokenize=False)
    answers = [f"{one['content']}<|im_end|>\n" for one in messages if one["role"] == "assistant"]
    assert fast.decode(ids[learned]) == "".join(answers)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(9, 20))
def test_a_sample_takes_what_fits(lengths: list[int], length: int) -> None:
    starts = pack(np.array(lengths), length)
    assert starts[0] == 0 and starts[-1] == len(lengths) and (np.diff(starts) > 0).all()
    for first, end in itertools.pairwise(starts):
        assert sum(lengths[first:end]) <= length
        assert end == len(lengths) or sum(lengths[first : end + 1]) > length


@settings(max_examples=20)
@given(st.sampled_from([None, 0, 1, 7, 40]), st.integers(0, 3))
def test_samples_hold_every_conversation_of_an_epoch_once(
    tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, samples: int | None, seed: int
) -> None:
    path = chat.write_conversations(tmp_path_factory.getbasetemp() / "conversations.jsonl", CONVERSATIONS)
    file = Conversations(path, tokenizer, SAMPLE)
    config = SimpleNamespace(random_seed=seed, sequence_length=SAMPLE, split="", split_matrix=[], tokenizer="")
    dataset = ConversationDataset(file, path, np.arange(1, len(file)), samples, Split.train, config)
    assert len(dataset) >= (samples or 1)
    whole = [tuple(file[number].ids_L) for number in range(1, len(file))]
    found = []
    for number in range(len(dataset)):
        sample = {name: value.numpy() for name, value in dataset[number].items()}
        assert {len(value) for value in sample.values()} == {SAMPLE}
        starts = [*np.flatnonzero(sample["position_ids"] == 0), SAMPLE]
        for first, end in itertools.pairwise(starts):
            ids = sample["tokens"][first:end]
            if not ids.any():
                assert not sample["loss_mask"][first:end].any()
                continue
            found.append(tuple(ids))
            learned = file[whole.index(found[-1]) + 1].learned_L
            assert (sample["labels"][first : end - 1] == ids[1:]).all()
            assert (sample["loss_mask"][first:end] == [*learned[1:], 0]).all()
            assert (sample["position_ids"][first:end] == np.arange(end - first)).all()
    epochs = len(found) // len(whole)
    assert sorted(found) == sorted(whole * epochs) and epochs >= 1


def test_long_conversations_are_cut(tokenizer: Any, tmp_path: Path) -> None:
    file = Conversations(chat.write_conversations(tmp_path / "long", CONVERSATIONS), tokenizer, SAMPLE)
    assert file.lengths.max() == len(file[2].ids_L) == SAMPLE


BAD = {
    "not JSON": "{",
    "no list": '{"text": "a"}',
    "no text": '{"messages": [{"role": "assistant", "content": null}]}',
    "nothing to learn": '{"messages": [{"role": "user", "content": "rain"}]}',
    "two conversations": '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}',
}
TOLD = {
    "not JSON": "is not JSON",
    "no list": 'is not an object with a list under the key "messages"',
    "no text": 'has a message without texts under the keys "role" and "content"',
    "nothing to learn": "has no message of the role assistant",
    "two conversations": "has a system message after the first message; write one conversation per line",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named(tokenizer: Any, tmp_path: Path, name: str) -> None:
    path = Path(chat.write_conversations(tmp_path / "bad.jsonl", CONVERSATIONS[:1]))
    path.write_text(f"{path.read_text()}\n{BAD[name]}\n")
    with pytest.raises(ValueError, match=f"^--data-path: {path}:3: {TOLD[name]}"):
        check_conversations(DataConfig(sft=True, data_path=[str(path)]), tokenizer)


def test_a_template_must_keep_what_it_wrote(tmp_path: Path) -> None:
    """Some templates leave out what the assistant thought in earlier turns."""
    forgetful = chat.TEMPLATE.replace("{{ message.content }}", "{{ message.content if loop.last else '...' }}")
    model = chat.write_tokenizer(tmp_path, forgetful)
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model))
    with pytest.raises(ValueError, match="does not keep what it wrote"):
        encoder(tokenizer)(CONVERSATIONS[1])


def test_a_tokenizer_needs_a_template(tmp_path: Path) -> None:
    model = chat.write_tokenizer(tmp_path, None)
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=model))
    with pytest.raises(ValueError, match="--sft: the tokenizer has no chat template"):
        encoder(tokenizer)
