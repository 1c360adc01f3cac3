"""Mistakes that people make when they start a run, as flags that are added to a valid command line.

`tests/unit/test_mistakes.py` makes them in this process, and behind --slow as real processes;
`tools/bench/mistakes.py` measures how long each message takes.
"""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

ENTRY_POINT = Path(__file__).resolve().parents[1] / "pretrain_gpt_moe.py"

VALID = {
    **{"--num-layers": "2", "--hidden-size": "32", "--num-attention-heads": "4", "--seq-length": "32"},
    **{"--micro-batch-size": "2", "--num-experts": "8", "--moe-ffn-hidden-size": "64", "--moe-router-topk": "2"},
    **{"--expert-model-parallel-size": "4", "--lr": "1e-3", "--train-iters": "20", "--num-workers": "0"},
    **{"--tokenizer-type": "NullTokenizer", "--vocab-size": "127", "--data-path": "corpus", "--split": "8,1,1"},
}

LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
"""Variables of rank 0 of 8. Without MASTER_ADDR, joining is an error, too, so that no rank waits for others."""

ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Mistake:
    """A mistake, and what its message has to contain."""

    name: str
    flags: str
    """Flags that are added; paths are relative to the directory of `write_files`."""
    said: tuple[str, ...]
    """The flag, its value and the remedy."""
    without: str = ""
    """Flags of `VALID` that are left out."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that differ from `LAUNCHED`; `taken` stands for a port that another program listens on."""
    dry: bool = True
    """Whether a dry run finds the mistake, too; it checks neither the machine nor the launcher."""
    joins: bool = False
    """Whether the mistake shows when the rank joins, not before."""

    @property
    def argv(self) -> list[str]:
        kept = [(flag, value) for flag, value in VALID.items() if flag not in self.without.split()]
        return [word for pair in kept for word in pair] + self.flags.split()


MISTAKES = [
    # The command line
    Mistake("mistyped flag", "--num-expert 8", ("--num-expert", "did you mean --num-experts?")),
    Mistake(
        "missing flags",
        "",
        ("--lr", "--num-layers", "--seq-length", "required"),
        without="--lr --num-layers --seq-length",
    ),
    Mistake("word instead of a number", "--lr fast", ("--lr", "'fast'", "invalid float")),
    Mistake("value that does not exist", "--moe-parallel-schedule s3", ("--moe-parallel-schedule", "'s3'", "'s2'")),
    Mistake("bad YAML", "--yaml-cfg bad.yaml", ("--yaml-cfg bad.yaml", "line 1", "expected")),
    Mistake("missing YAML", "--yaml-cfg absent.yaml", ("--yaml-cfg absent.yaml", "No such file")),
    Mistake("missing file of flags", "@absent.args", ("@absent.args", "No such file")),
    Mistake("two precisions", "--fp16 --bf16", ("--bf16 and --fp16", "choose one")),
    Mistake("negative learning rate", "--lr -0.001", ("--lr -0.001", "at least 0")),
    # The launcher and the machine
    Mistake("rank without torchrun's others", "", ("WORLD_SIZE 8", "start", "torchrun"), dry=False, joins=True),
    Mistake(
        "rank beyond the job", "", ("RANK=8", "below WORLD_SIZE, which is 8", "torchrun"), environment={"RANK": "8"}
    ),
    Mistake(
        "port in use",
        "",
        ("MASTER_PORT=", "another program listens on this port", "choose another"),
        environment={"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "taken"},
        dry=False,
        joins=True,
    ),
    Mistake(
        "NCCL without a GPU",
        "--distributed-backend nccl",
        ("--distributed-backend nccl", "needs CUDA", "use --distributed-backend gloo"),
        dry=False,
    ),
    Mistake(
        "Transformer Engine without a GPU",
        "--transformer-impl transformer_engine",
        ("--transformer-impl transformer_engine", "use --transformer-impl local"),
        dry=False,
    ),
    # The layout
    Mistake(
        "more parallel ranks than processes",
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4",
        ("--tensor-model-parallel-size 4", "number of processes (8)", "change them"),
    ),
    Mistake(
        "more expert-parallel ranks than processes",
        "--expert-model-parallel-size 16 --num-experts 16",
        ("--expert-model-parallel-size 16", "number of processes (8)", "lower one"),
    ),
    Mistake("experts by ranks", "--num-experts 6", ("--num-experts 6", "multiple of --expert-model-parallel-size 4")),
    Mistake(
        "heads by ranks",
        "--tensor-model-parallel-size 8 --expert-tensor-parallel-size 1",
        ("--num-attention-heads 4", "multiple of --tensor-model-parallel-size 8"),
    ),
    Mistake("width by heads", "--hidden-size 50", ("--hidden-size 50", "multiple of --num-attention-heads 4")),
    Mistake(
        "layers by stages",
        "--pipeline-model-parallel-size 2 --num-layers 3",
        ("--num-layers 3", "multiple of --pipeline-model-parallel-size 2"),
    ),
    Mistake(
        "batch by ranks", "--global-batch-size 24", ("--global-batch-size 24", "multiple of 16", "--micro-batch-size 2")
    ),
    Mistake(
        "more experts per token than experts", "--moe-router-topk 9", ("--moe-router-topk 9", "1 to --num-experts 8")
    ),
    Mistake(
        "overlap without its condition",
        "--overlap-param-gather",
        ("--overlap-param-gather", "--use-distributed-optimizer --overlap-grad-reduce"),
    ),
    Mistake("warmup longer than the run", "--lr-warmup-iters 30", ("--lr-warmup-iters", "480", "320", "shorten")),
    Mistake("minimum above the rate", "--min-lr 1", ("--min-lr 1.0", "choose 0 to --lr 0.001")),
    Mistake(
        "ramp that does not fit",
        "--rampup-batch-size 3 1 64",
        ("--rampup-batch-size 3 1 64", "multiples of 16", "--global-batch-size 16"),
    ),
    # The tokenizer
    Mistake("tokenizer without a size", "", ("NullTokenizer", "also give --vocab-size"), without="--vocab-size"),
    Mistake(
        "tokenizer without a model",
        "--tokenizer-type SentencePieceTokenizer",
        ("--tokenizer-type SentencePieceTokenizer", "also give --tokenizer-model"),
    ),
    Mistake(
        "missing tokenizer model",
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model absent.model",
        ("--tokenizer-model absent.model", "no such file", "give the model"),
    ),
    Mistake(
        "broken SentencePiece model",
        "--tokenizer-type SentencePieceTokenizer --tokenizer-model broken.model",
        ("--tokenizer-model broken.model", "is not a model", "give the model"),
    ),
    Mistake(
        "missing Hugging Face directory",
        "--tokenizer-type HuggingFaceTokenizer --tokenizer-model ./absent",
        ("--tokenizer-model ./absent", "no such directory", "give the one"),
    ),
    Mistake(
        "GPT-2's tokenizer without its files",
        "--tokenizer-type GPT2BPETokenizer",
        ("--tokenizer-type GPT2BPETokenizer", "also give --vocab-file and --merge-file"),
    ),
    # The data
    Mistake("missing data", "--data-path absent", ("--data-path: absent.bin", "no such file", "give the PREFIX")),
    Mistake(
        "prefix with its suffix", "--data-path corpus.bin", ("--data-path: corpus.bin.bin", "give the prefix without")
    ),
    Mistake("incomplete prefix", "--data-path text", ("--data-path: text.bin", "did you mean text_text_document?")),
    Mistake("text that is not tokenized", "--data-path raw.jsonl", ("--data-path: raw.jsonl.bin", "tokenize it with")),
    Mistake("index without tokens", "--data-path half", ("--data-path: half.bin", "no such file")),
    Mistake("incomplete copy", "--data-path cut", ("--data-path: cut.bin", "has 4000 bytes", "copy it again")),
    Mistake(
        "tokens beyond the vocabulary",
        "--data-path corpus --vocab-size 50",
        ("--data-path: corpus.bin", "token 51", "vocabulary of 51", "--vocab-size above"),
    ),
    Mistake("weights without data", "--data-path 1 corpus 2", ("--data-path 1 corpus 2", "pairs")),
    Mistake("weight of 0", "--data-path 0 corpus 1 text_text_document", ("--data-path 0 corpus", "weights above 0")),
    Mistake("split that is none", "--split most", ("--split most", "such as 969,30,1")),
    Mistake("split without training", "--split 0,1,1", ("--split 0,1,1", "first must be above 0")),
    Mistake(
        "split without documents",
        "--data-path few",
        ("--data-path: few", "--split 8,1,1", "none of its 3 documents for the test set", "give more documents"),
    ),
    Mistake(
        "samples longer than the data", "--seq-length 6000", ("--seq-length 6000", "5000 tokens", "give more data")
    ),
    # Directories and checkpoints
    Mistake("--save that is a file", "--save raw.jsonl", ("--save raw.jsonl", "not a directory", "choose another")),
    Mistake(
        "log below a file", "--tensorboard-dir raw.jsonl/log", ("--tensorboard-dir raw.jsonl/log", "not a directory")
    ),
    Mistake(
        "no checkpoint",
        "--load absent --exit-on-missing-checkpoint",
        ("--load absent", "no checkpoint there", "give a directory"),
    ),
    Mistake("absent iteration", "--load saved --ckpt-step 7", ("--ckpt-step 7", "iterations [20, 10]", "choose one")),
    Mistake(
        "flags of no checkpoint",
        "--load absent --use-checkpoint-args",
        ("--use-checkpoint-args", "--load absent", "give the model's flags"),
    ),
    # Balancing and communication
    Mistake("unknown policy", "--balance-policy quotas", ("--balance-policy quotas", "choose from", "quota")),
    Mistake(
        "policy's module missing",
        "--balance-policy nobodys:Policy",
        ("nobodys:Policy", "cannot be imported"),
        dry=False,
    ),
    Mistake("class that is no policy", "--balance-policy odd:Policy", ("odd:Policy", "has no method plan"), dry=False),
    Mistake(
        "missing profile",
        "--balance-policy top2 --balance-profile absent.json",
        ("--balance-profile absent.json", "No such file"),
    ),
    Mistake(
        "damaged profile",
        "--balance-policy top2 --balance-profile damaged.json",
        ("--balance-profile damaged.json", "not JSON"),
    ),
    Mistake(
        "too few capacities",
        "--balance-policy top2 --balance-capacities 1 2",
        ("--balance-capacities 1.0 2.0", "4 in all"),
    ),
    Mistake(
        "too many guest slots",
        "--balance-policy top2 --balance-guest-slots 9",
        ("--balance-guest-slots 9", "1 to 6"),
    ),
    Mistake(
        "slots without a policy", "--balance-guest-slots 2", ("--balance-guest-slots", "has no effect", "leave it out")
    ),
    Mistake("unknown codec", "--moe-comm-codec gzip", ("--moe-comm-codec gzip", "choose from", "int8")),
    Mistake(
        "nodes that cut groups",
        "--balance-policy top2 --moe-comm-node-size 3",
        ("--moe-comm-node-size 3", "unevenly", "multiple or a divisor of 4"),
    ),
]


def write_files(directory: Path) -> None:
    """Write the files that `VALID` and the mistakes name."""
    _write_data(directory / "corpus", documents=50)
    _write_data(directory / "text_text_document", documents=50)
    _write_data(directory / "few", documents=3)
    _write_data(directory / "half", documents=50)
    _write_data(directory / "cut", documents=50)
    (directory / "half.bin").unlink()
    os.truncate(directory / "cut.bin", 4000)
    for iteration in (10, 20):
        (directory / "saved" / f"iter_{iteration:07d}").mkdir(parents=True)
    (directory / "raw.jsonl").write_text('{"text": "a"}\n')
    (directory / "bad.yaml").write_text("num-layers: [1")
    (directory / "damaged.json").write_text("{")
    (directory / "broken.model").write_bytes(b"not a model")
    (directory / "odd.py").write_text("class Policy: pass\n")


def _write_data(prefix: Path, documents: int) -> None:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(documents):
        builder.add_document(np.arange(100), [100])
    builder.finalize(f"{prefix}.idx")


def run(mistake: Mistake, directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Make a mistake in a process of its own, without a launcher, as rank 0 of 8."""
    clean = {name: value for name, value in os.environ.items() if name not in ADDRESS}
    paths = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
    with socket.create_server(("127.0.0.1", 0)) if mistake.joins else contextlib.nullcontext() as server:
        own = dict(mistake.environment)
        if server is not None and own.get("MASTER_PORT") == "taken":
            own["MASTER_PORT"] = str(server.getsockname()[1])
        return subprocess.run(
            [sys.executable, str(ENTRY_POINT), *mistake.argv, *flags],
            cwd=directory,
            env=clean | LAUNCHED | own | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=300,
        )


def message(output: str) -> str:
    """Return the lines with which the program ended, apart from argparse's usage."""
    lines = output.splitlines()
    first = next((index for index, line in enumerate(lines) if ": error: " in line), 0)
    return "\n".join(lines[first:])


def problems(mistake: Mistake, output: str) -> list[str]:
    """Return what is wrong with the output of a mistake."""
    told = message(output)
    found = [f"does not say {part!r}" for part in mistake.said if part not in told]
    found += ["has a traceback"] if "Traceback" in output else []
    found += ["has several lines"] if len(told.splitlines()) != 1 else []
    return found + (["is too long"] if len(told) > 500 else [])
