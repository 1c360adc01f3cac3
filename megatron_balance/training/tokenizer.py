"""Construction of megatron-core's tokenizers.

megatron-core 0.19 moved `build_tokenizer`, renamed some of its settings, and counts the NullTokenizer's end-of-document
token in `vocab_size`. Here, the flags mean the same with every version.
"""

import argparse
import dataclasses
import inspect
from pathlib import Path

from megatron.core.tokenizers.base_tokenizer import MegatronTokenizerBase
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from megatron_balance.config.flags import flag_of
from megatron_balance.config.run_config import TokenizerConfig
from megatron_balance.files.reading import check_regular
from megatron_balance.messages import described

try:
    from megatron.core.tokenizers.utils.build_tokenizer import (  # pyright: ignore[reportMissingImports]
        build_tokenizer as build_megatron_tokenizer,
    )
except ModuleNotFoundError:
    from megatron.core.tokenizers.text.utils.build_tokenizer import build_tokenizer as build_megatron_tokenizer

FROM_A_FILE = ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer")


def build_tokenizer(config: TokenizerConfig) -> MegatronTokenizerBase:
    """Build megatron-core's tokenizer of the flags; ValueError if a flag that its type needs is missing or unfit."""
    kind = config.tokenizer_type
    model = config.tokenizer_model
    if kind == "NullTokenizer" and not config.vocab_size:
        raise ValueError("--tokenizer-type NullTokenizer: also give --vocab-size N")
    if kind not in ("NullTokenizer", "GPT2BPETokenizer") and model is None:
        raise ValueError(f"--tokenizer-type {kind}: also give --tokenizer-model")
    if kind == "GPT2BPETokenizer" and None in (config.vocab_file, config.merge_file):
        raise ValueError(f"--tokenizer-type {kind}: also give --vocab-file and --merge-file")
    path = Path(str(model))
    is_local = kind == "HuggingFaceTokenizer" and str(model).startswith((".", "/"))
    if (kind in FROM_A_FILE and not path.is_file()) or (is_local and not path.exists()):
        raise ValueError(f"--tokenizer-model {model}: there is no model of a {kind}; give its file or directory")
    for name in ("vocab_file", "merge_file", "tokenizer_metadata"):
        if (path := getattr(config, name)) is not None:
            # Opening a FIFO would block forever
            check_regular(path, flag_of(name))
    try:
        return _build(config)
    except Exception as error:  # each library raises its own types
        files = f"--tokenizer-model {model}"
        if kind == "GPT2BPETokenizer":
            files = f"--vocab-file {config.vocab_file} --merge-file {config.merge_file}"
        problem = f"is not a model of --tokenizer-type {kind} ({described(error, 300)})"
        raise ValueError(f"{files}: {problem}; give the model that belongs to the type") from error


def vocabulary(tokenizer: MegatronTokenizerBase, config: TokenizerConfig) -> int:
    """Return the number of token ids, before padding."""
    # Every tokenizer has this property, but the base class declares an abstract method
    size: int = tokenizer.vocab_size  # pyright: ignore[reportAssignmentType]
    return max(size, config.vocab_size or 0)


def end_of_document(tokenizer: MegatronTokenizerBase) -> int | None:
    """Return the token that ends a document; None if the tokenizer has none."""
    token = getattr(tokenizer, "eod", None)
    # SentencePiece returns -1 for a model without </s>
    return token if token is not None and 0 <= token < tokenizer.vocab_size else None


def _build(config: TokenizerConfig) -> MegatronTokenizerBase:
    settings = argparse.Namespace(
        **dataclasses.asdict(config),
        # Settings that 0.19's function reads under another name, or that have no flag here
        special_tokens=config.tokenizer_special_tokens,
        metadata_path=config.tokenizer_metadata,
        tokenizer_hf_no_use_fast=not config.tokenizer_hf_use_fast,
        tokenizer_hf_no_include_special_tokens=not config.tokenizer_hf_include_special_tokens,
        tokenizer_sentencepiece_ignore_extra_whitespaces=True,
        chat_template=None,
        pad_vocab_size=False,
    )
    eod_counts = "eod_id" in inspect.signature(NullTokenizer).parameters
    if config.tokenizer_type == "NullTokenizer" and config.vocab_size and eod_counts:
        settings.vocab_size = config.vocab_size + 1
    return build_megatron_tokenizer(settings)
