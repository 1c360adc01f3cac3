"""Text <-> token ids, by megatron-core's tokenizers.

megatron-core 0.19 moved `build_tokenizer`, renamed some of its settings, and counts the NullTokenizer's
end-of-document token as part of `vocab_size`. Here the flags mean the same with either.
"""

import argparse
import dataclasses
import inspect
from pathlib import Path

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from megatron_balance.config.run_config import TokenizerConfig
from megatron_balance.files.reading import check_regular
from megatron_balance.messages import cleaned

try:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer as build_megatron_tokenizer
except ModuleNotFoundError:
    from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer as build_megatron_tokenizer


FROM_A_FILE = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")


def build_tokenizer(config: TokenizerConfig) -> MegatronTokenizerBase:
    """megatron-core's tokenizer of the given type; a NullTokenizer has `vocab_size` tokens and end-of-document.

    Raises:
        ValueError: a flag that the type needs is missing, or what the flags name is no tokenizer of this type.
    """
    kind, model = config.tokenizer_type, config.tokenizer_model
    if kind == "NullTokenizer" and not config.vocab_size:
        raise ValueError("--tokenizer-type NullTokenizer: also give --vocab-size N")
    if kind not in ("NullTokenizer", "GPT2BPETokenizer") and model is None:
        raise ValueError(f"--tokenizer-type {kind}: also give --tokenizer-model")
    if kind in FROM_A_FILE and not Path(str(model)).is_file():
        raise ValueError(f"--tokenizer-model {model}: no such file; give the model of a {kind}")
    for flag, path in _other_files(config).items():
        check_regular(path, flag)
    try:
        return _build(config)
    except Exception as error:  # each library raises types of its own
        raise ValueError(
            f"--tokenizer-model {model}: no tokenizer of --tokenizer-type {kind} ({cleaned(error, 300)}); give the "
            "model that belongs to the type"
        ) from error


def _other_files(config: TokenizerConfig) -> dict[str, str]:
    """By flag; a FIFO among them would be waited for without end."""
    files = {"--vocab-file": config.vocab_file, "--merge-file": config.merge_file}
    files["--tokenizer-metadata"] = config.tokenizer_metadata
    return {flag: path for flag, path in files.items() if path is not None}


def vocabulary(tokenizer: MegatronTokenizerBase, config: TokenizerConfig) -> int:
    """How many token ids there are, before padding."""
    return max(tokenizer.vocab_size, config.vocab_size or 0)


def _build(config: TokenizerConfig) -> MegatronTokenizerBase:
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
