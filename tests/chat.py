"""A tiny tokenizer of Hugging Face's with a chat template, and conversations for it."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML."""

WORDS = ("what", "is", "the", "weather", "in", "Oslo", "rain", "sun", "and", "snow")


def write_tokenizer(directory: Path, template: str | None = TEMPLATE) -> str:
    """Write the tokenizer and return its path, for `--tokenizer-model`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template)
    fast.save_pretrained(directory)
    return str(directory)


def conversation(*turns: str) -> list[dict[str, str]]:
    """Return messages of a user and an assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]


def write_conversations(path: Path, conversations: list[list[dict[str, str]]]) -> str:
    lines = (json.dumps({"messages": messages}) for messages in conversations)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)
