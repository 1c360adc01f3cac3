"""Text <-> token ids, by megatron-core's tokenizers.

megatron-core 0.19 moved `build_tokenizer`, renamed some of its settings, and counts the NullTokenizer's
end-of-document token as part of `vocab_size`. Here the flags mean the same with either.
"""

import argparse
import dataclasses
import inspect

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from megatron_balance.config import TokenizerConfig

try:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build_megatron_tokenizer
except ModuleNotFoundError:
    from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer as build_megatron_tokenizer


def build_tokenizer(config: TokenizerConfig) -> MegatronTokenizerBase:
    """megatron-core's tokenizer of the given type; a NullTokenizer has `vocab_size` tokens and end-of-document."""
    settings = argparse.Namespace(**dataclasses.asdict(config), **_newer_settings(config))
    eod_counts = "eod_id" in inspect.signature(NullTokenizer).parameters
    if config.tokenizer_type == "NullTokenizer" and config.vocab_size and eod_counts:
        settings.vocab_size = config.vocab_size + 1
    return build_megatron_tokenizer(settings)


def _newer_settings(config: TokenizerConfig) -> dict[str, object]:
    """What 0.19's function reads under another name, or does not have a flag here."""
    return {
        "special_tokens": config.tokenizer_special_tokens,
        "metadata_path": config.tokenizer_metadata,
        "tokenizer_hf_no_use_fast": not config.tokenizer_hf_use_fast,
        "tokenizer_hf_no_include_special_tokens": not config.tokenizer_hf_include_special_tokens,
        "tokenizer_sentencepiece_ignore_extra_whitespaces": True,
        "chat_template": None,
        "pad_vocab_size": False,
    }
