"""Files that mutate_inputs.py mutates: config.json, saved flags, profiles, clusters.

Inputs that a reader accepts are then used as in a run: to make a plan or convert a model.
"""

import contextlib
import io
import itertools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mutations import Kind, Refused

sys.path.append(str(Path(__file__).parents[1]))

CONVERTED = 40
"""Number of models that a campaign converts completely; for others, it reads everything except the weights."""

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6,
    "intermediate_size": 24,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
SHARES = {"moe_intermediate_size": 8, "rope_theta": 10000.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.7}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "sliding_window": None, "rope_theta": 1e6, "num_key_value_heads": 2},
    "qwen2_moe": {
        **SHARES,
        **{"num_experts": 4, "shared_expert_intermediate_size": 8, "mlp_only_layers": [1], "decoder_sparse_step": 1},
        **{"norm_topk_prob": False, "use_sliding_window": False, "router_aux_loss_coef": 0.001},
    },
    "deepseek_v3": {
        **SHARES,
        **LATENT,
        **{"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1},
        **{"routed_scaling_factor": 2.5, "norm_topk_prob": True, "rope_scaling": YARN, "attention_bias": False},
    },
}
"""Configurations of tiny models, by `model_type`."""


def config_kind(folder: Path, _: Path) -> Kind:
    """config.json of a Hugging Face model with its weights; some accepted models are imported and exported."""
    import torch

    from megatron_balance.convert import conversion
    from megatron_balance.convert.model import Model
    from megatron_balance.convert.safetensors_files import write
    from megatron_balance.convert.settings import run_config

    configs = {name: {"model_type": name, **SIZES, **config} for name, config in CONFIGS.items()}
    for name, config in configs.items():
        sizes = [{n: s for p in pieces for n, s in p.source_sizes.items()} for pieces in Model(config).pieces()]
        (folder / name).mkdir()
        write(folder / name, [[(key, torch.ones(size)) for key, size in file.items()] for file in sizes])
    converted = itertools.count(1)

    def read(data: bytes) -> None:
        name = next((name for name in configs if f'"{name}"'.encode() in data), "mixtral")
        (folder / name / "config.json").write_bytes(data)
        there = folder / "there"
        back = folder / "back"
        try:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                model, _ = conversion.checked_model(folder / name)
                run_config(model, None)
                if next(converted) <= CONVERTED:
                    conversion.import_model(folder / name, there, str)
                    conversion.export_model(there, back, str)
        except ValueError as error:
            assert not said.getvalue() and "\n" not in str(error), said.getvalue() or error
            assert there.exists() is back.exists() is False, "files were left behind"
            raise Refused from error
        finally:
            shutil.rmtree(there, ignore_errors=True)
            shutil.rmtree(back, ignore_errors=True)

    valid = [json.dumps(config).encode() for config in configs.values()]
    hostile = [
        b"",
        b"[]",
        b"\xff\xfe{}",
        b"{" * 9000,
        b'{"a":' * 60000,
        b"\0" * 70000,
        b" " * 1_200_000,
        b"[" * 900_000,
    ]
    return Kind(read, valid, hostile, list(configs.values()))


def saved_flags_kind(folder: Path, _: Path) -> Kind:
    """arguments.json of a checkpoint, with `--load DIR --use-checkpoint-args`."""
    from megatron_balance.checkpoint import saved_flags
    from megatron_balance.cli.arguments import parse_args
    from megatron_balance.device.machine import Machine

    run = "--micro-batch-size 1 --train-iters 2 --lr 1e-3 --mock-data"
    model = "--hidden-size 48 --num-attention-heads 4 --seq-length 32 --num-layers 2 --num-experts 8 --window-size 8,0"
    model += " --moe-layer-freq [0,1] --tokenizer-type NullTokenizer --vocab-size 127 --tokenizer-special-tokens a b"
    alone = Machine(1, cuda=False, transformer_engine=False, apex=False)
    path = folder / "iter_0000001" / "arguments.json"
    saved = saved_flags.to_json(parse_args(f"{run} {model}".split(), alone).config)
    path.parent.mkdir()
    taken = [*run.split(), "--load", str(folder), "--use-checkpoint-args"]

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            parse_args(taken, alone)
        except ValueError as error:
            assert len(str(error)) < 2000
            raise Refused from error

    return Kind(read, [saved.encode()], [b"{}", b"[]", b'{"a": 1}', b"[" * 100_000], [json.loads(saved)])


def profile_kind(folder: Path, _: Path) -> Kind:
    """`--balance-profile FILE.json`; accepted profiles are used to make a plan."""
    from megatron_balance.profile.cluster_profile import (
        CodecTimes,
        Fit,
        ParallelLines,
        Throughput,
        builtin,
    )
    from megatron_balance.profile.profile_file import load

    path = folder / "profile.json"
    some = Throughput(1e-8, 1e-5, 0.1, 0.2)
    base = builtin(4, 2, 64, 128)
    line = Fit(1e-5, 1e-10, 0.0, 0.0)
    lines = ParallelLines(2, 2, *[line] * 5)
    rates = (0.5, 1.0, 1.0, 1.5)
    measured = {"rates": rates, "all_to_alls": {"pipe": line}, "codecs": {"fp8": CodecTimes(some, some)}}
    measured["parallel"] = lines
    valid = []
    for more in ({}, measured):
        type(base)(**(vars(base) | more)).save(path)
        valid.append(path.read_bytes())

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            profile = load(path, 4, 2)
        except ValueError as error:
            assert str(error).startswith(f"--balance-profile {path}: ") and len(str(error)) < 1000, error
            raise Refused from error
        _plan(profile)

    hostile = [b"", b"[" * 100_000, b'{"version":' * 20_000, b'{"version": 3}', b"\0" * 5_000_000, b"9" * 5000]
    return Kind(read, valid, hostile, [json.loads(text) for text in valid])


def cluster_kind(folder: Path, canary: Path) -> Kind:
    """`--balance-profile FILE.yaml`; accepted clusters are used to make a plan."""
    from megatron_balance.files.reading import read_yaml
    from megatron_balance.profile.cluster import Ranks, _plain, load_profile

    path = folder / "cluster.yaml"
    files = Path(__file__).parents[2] / "configs" / "clusters"
    valid = [(files / f"{name}.yaml").read_bytes() for name in ("h100", "demi", "pro_prophet_hpnv", "parm_b")]

    def read(data: bytes) -> None:
        path.write_bytes(data)
        try:
            profile = load_profile(path, Ranks(4, 2, 2), 64, 128)
        except ValueError as error:
            assert str(error).startswith(f"--balance-profile {path}: ") and len(str(error)) < 1000, error
            raise Refused from error
        _plan(profile)

    structures = []
    for text in valid:
        path.write_bytes(text)
        structures.append(_plain(read_yaml(path)))
    apply = f"!!python/object/apply:os.system ['touch {canary}']"
    hostile = [
        f"name: {apply}".encode(),
        apply.encode(),
        b"[" * 60_000,
        b"{a: " * 10_000,
        b"&a [*a]",
        b"a: 1\n" * 12_000,
    ]
    return Kind(read, valid, hostile, structures)


def _plan(profile: Any) -> None:
    """Make the decisions of a run that depend on a profile."""
    from megatron_balance.cost.model import CostModel
    from megatron_balance.placement.placement import Placement
    from megatron_balance.planning.policies import load_policy

    counts_DE = np.random.default_rng(0).integers(0, 50, (4, 8)) ** 3
    cost = CostModel(profile, token_bytes=128, param_bytes=1e5, grad_bytes=1e5)
    current = Placement.identity(8, 4, 2)
    for name in ("pro_prophet", "flexmoe"):
        found = load_policy(name).plan(counts_DE, current, cost)
        assert np.isfinite(cost.layer_time(counts_DE, found).total), found


FILE_KINDS: dict[str, Callable[[Path, Path], Kind]] = {
    "config": config_kind,
    "saved-flags": saved_flags_kind,
    "profile": profile_kind,
    "cluster": cluster_kind,
}
