"""Dataclass fields -> command-line flags, for megatron-core's config dataclasses and for ours.

The field's name is the flag's name, its annotation is the type, and its docstring (the string literal below it) is the
help: one paragraph, and lines that begin with `- ` and describe one value each. Where a flag differs from its field,
the field's metadata `argparse_meta` have arguments of `argparse.add_argument`, and `arg_names` for the flag's names.
"""

import argparse
import ast
import dataclasses
import difflib
import enum
import functools
import importlib
import inspect
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from megatron_balance.messages import described

FlagGroup = argparse._ArgumentGroup | argparse.ArgumentParser

ROLES = {
    **dict.fromkeys(("dir", "save", "load", "checkpoint"), "DIR"),
    **dict.fromkeys(("file", "path"), "FILE"),
    **dict.fromkeys(("minutes", "mins"), "MINUTES"),
    **dict.fromkeys(("lr", "rate"), "RATE"),
    **dict.fromkeys(("dropout", "fraction", "percent"), "FRACTION"),
}
"""Last word of a field's name -> what stands for its value in `--help`."""

FLAG_NAMES = {
    "num_moe_experts": "--num-experts",
    "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
    "layernorm_epsilon": "--norm-epsilon",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
    "add_bias_linear": "--disable-bias-linear",
    "masked_softmax_fusion": "--no-masked-softmax-fusion",
    "bias_dropout_fusion": "--no-bias-dropout-fusion",
    "apply_rope_fusion": "--no-rope-fusion",
    "persist_layer_norm": "--no-persist-layer-norm",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
    "overlap_p2p_comm": "--no-overlap-p2p-communication",
    "attention_softmax_in_fp32": "--attention-softmax-in-fp32",
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "muon_split_qkv": "--muon-no-split-qkv",
    "bucket_size": "--ddp-bucket-size",
    "check_for_nan_in_grad": "--no-check-for-nan-in-loss-and-grad",
    "align_param_gather": "--no-align-param-gather",
    "yarn_correction_range_round_to_int": "--no-yarn-correction-range-round-to-int",
    "average_in_collective": "--ddp-average-in-collective",
    "pad_buckets_for_high_nccl_busbw": "--ddp-pad-buckets-for-high-nccl-busbw",
    "reduce_scatter_with_fp32_accumulation": "--ddp-reduce-scatter-with-fp32-accumulation",
}
"""Flags of fields whose names are not the fields' names."""


def flag_field(default: Any, **argparse_meta: Any) -> Any:
    """Declare a dataclass field whose flag does not follow from its name and type: its name, parsing or metavar."""
    return dataclasses.field(default=default, metadata={"argparse_meta": argparse_meta})


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, inherited ones included: `{field name: text}`. Only lines that
    begin with `- ` stay lines of their own."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, following in itertools.pairwise(body.body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    lines = re.split(r"\n\s*(?=- )", text)
                    docs[name] = "\n".join(" ".join(line.split()) for line in lines)
    return docs


def add_flags(group: FlagGroup, cls: type, texts: Mapping[str, str] | None = None) -> list[str]:
    """Add one flag per field of dataclass `cls` and return the names of the added fields.

    Private fields, fields whose type has no text form (callables, process groups, ...) and fields that the parser
    already has are left out. `texts` is the help by field name; by default, the docstrings of the fields.
    """
    texts = field_docs(cls) if texts is None else texts
    taken = {action.dest for action in group._actions}
    names = [field.name for field in dataclasses.fields(cls) if field.name not in taken and field.name[0] != "_"]
    return [name for name in names if add_flag(group, cls, name, texts.get(name, ""))]


def add_flag(
    group: FlagGroup, cls: type, name: str, text: str, metadata: Mapping[str, Any] = types.MappingProxyType({})
) -> bool:
    """Add the flag of a field of dataclass `cls`, with `text` and the default as its help; `metadata` override those of
    the field. Return False if the field's type has no text form."""
    field = {field.name: field for field in dataclasses.fields(cls)}[name]
    meta = dict(field.metadata.get("argparse_meta", {})) | dict(metadata)
    options = _argparse_options(typing.get_type_hints(cls)[name], _default(field))
    if options is None and not meta:
        return False
    options = options or {"default": _default(field)}
    flags = meta.pop("arg_names", None) or _names(name, negated=options.get("action") == "store_false")
    keywords: dict[str, Any] = {"help": text, **options, **meta, "dest": name}
    if "action" not in keywords:
        # A default of None is described in the text
        if shown := in_words(keywords["default"]):
            paragraph, newline, values = text.partition("\n")
            keywords["help"] = f"{paragraph} Default: {shown}.{newline}{values}".lstrip()
        if not keywords.get("choices"):
            keywords.setdefault("metavar", metavar(name, keywords.get("type")))
    keywords["help"] = keywords["help"].replace("%", "%%")
    group.add_argument(*flags, **keywords)
    return True


def build(cls: type, values: Mapping[str, Any], **given: Any) -> Any:
    """Construct dataclass `cls` from the entries of `values` that are named like its fields; `given` overrides them."""
    names = {field.name for field in dataclasses.fields(cls) if field.init}
    return cls(**({name: values[name] for name in names & values.keys()} | given))


def flag_of(name: str) -> str:
    """Return the name of a field's flag on the command line."""
    return FLAG_NAMES.get(name) or f"--{name.replace('_', '-')}"


def did_you_mean(flag: str, parser: argparse.ArgumentParser) -> str:
    """Return a suggestion to append to an error about an unknown flag; empty if no flag of `parser` is similar.

    A similar flag has almost the same letters, or the same last words: `--codec` and `--balance-comm-codec` are similar
    to --moe-comm-codec. A first word that no flag has, such as `logits` in `--logits-save-dir`, means something else.
    Otherwise, it is the shortest flag that has all words: `--moe-topk` is similar to --moe-router-topk.
    """
    names = [name for one in parser._actions if one.help is not argparse.SUPPRESS for name in one.option_strings]
    words = flag.removeprefix("--").split("-")
    similar = [difflib.get_close_matches(flag, names, n=1, cutoff=0.85)]
    if flag.startswith("--"):
        last = max(1, len(words) - 1) if any(words[0] in name.split("-") for name in names) else 1
        endings = ["-" + "-".join(words[start:]) for start in range(last)]
        similar += [[name for name in names if name.endswith(ending)] for ending in endings]
        with_all = [name for name in names if {*words} <= {*name.split("-")}]
        similar.append([name for name in with_all if len(name) == min(map(len, with_all))])
    return next((f" (did you mean {found[0]}?)" for found in similar if len(found) == 1), "")


def enum_member(kind: type[enum.Enum], name: str) -> enum.Enum:
    """Return the member of an enumeration with this name; raise ArgumentTypeError if there is none."""
    if name not in kind.__members__:
        raise argparse.ArgumentTypeError(f"{name[:80]!r}: choose from {', '.join(kind.__members__)}")
    return kind[name]


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _names(name: str, negated: bool) -> list[str]:
    if name in FLAG_NAMES or not negated:
        return [flag_of(name)]
    spelled = name.replace("_", "-")
    return [f"--no-{spelled}", f"--disable-{spelled}"]


def metavar(name: str, kind: Callable[[str], Any] | None) -> str:
    """Return what stands for a field's value in `--help`: by the last word of its name, or else by its type."""
    return ROLES.get(name.rpartition("_")[2]) or {int: "N", float: "X"}.get(kind, "NAME")


def in_words(value: Any) -> str:
    """Return a flag's value as it is written on a command line; empty for None."""
    if isinstance(value, list | tuple):
        return " ".join(map(in_words, value))
    return "" if value is None else value.name if isinstance(value, enum.Enum) else str(value)


def with_values(text: str, known: Mapping[str, type]) -> str:
    """Return a help text with a line for each value: its name and the first line of its class's docstring."""
    summaries = {name: (cls.__doc__ or "").partition("\n")[0] for name, cls in known.items()}
    return "\n".join([text, *(f"- {name}: {summary}" for name, summary in summaries.items())])


def _argparse_options(hint: Any, default: Any) -> dict[str, Any] | None:
    """Return the `add_argument` keywords for a type annotation, or None if the type has no text form."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        members = [member for member in inner if member is not type(None)]
        return _argparse_options(members[0], default) if len(members) == 1 else None
    if hint is bool:
        return {"action": "store_false" if default is True else "store_true", "default": default}
    if hint in (int, float, str):
        return {"type": hint, "default": default}
    if origin is typing.Literal:
        choices = [choice for choice in inner if choice is not None]
        return {"type": type(choices[0]), "choices": choices, "default": default}
    if origin in (list, tuple) and inner and inner[0] in (int, float, str):
        return {"type": inner[0], "nargs": "+", "default": default}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        names = ",".join(hint.__members__)
        kind = functools.partial(enum_member, hint)
        return {"type": kind, "choices": list(hint), "default": default, "metavar": f"{{{names}}}"}
    return None


def named(flag: str, name: str, known: Mapping[str, Any]) -> Any:
    """Look up the name that was given with a flag in `known`, or import it as `package.module:Class`; raise ValueError
    if there is no such name, module or class."""
    remedy = f"choose from {', '.join(known)}, or give package.module:Class"
    if ":" not in name:
        if name not in known:
            raise ValueError(f"{flag} {name}: {remedy}")
        return known[name]
    module_name, _, class_name = name.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module: its SystemExit must not end this program silently
        raise ValueError(f"{flag} {name}: cannot be imported: {described(error)}; {remedy}") from error
