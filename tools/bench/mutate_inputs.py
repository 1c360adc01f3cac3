"""Tests all readers of a user's text or files with mutated and hostile inputs.

    python tools/bench/mutate_inputs.py [--kinds yaml moe-layer-freq] [--count 10000] [--seed 1]

Every reader must accept its input or refuse it with a clear error, within LIMIT_S seconds, and must not evaluate it:
hostile inputs try to create a file, the canary. This prints one summary line per kind and exits with status 1 after any
failure. Seconds are CPU time, so that other work on the machine does not count. Memory is the growth of the process's
peak resident size (ru_maxrss) after the valid inputs; one input must not add more than LIMIT_MB.
"""

import argparse
import contextlib
import io
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from file_kinds import FILE_KINDS
from mutations import Kind, Refused, edited

LIMIT_S = 2.0
LIMIT_MB = 300
HANG_S = 60


@dataclass
class Result:
    """Results of a campaign against one kind."""

    accepted: int = 0
    refused: int = 0
    worst_s: float = 0.0
    grown_mb: float = 0.0
    failures: list[str] = field(default_factory=list)


def yaml_kind(folder: Path, canary: Path) -> Kind:
    """`--yaml-cfg`, from a file to parsed flags."""
    from megatron_balance.cli.arguments import build_parser, yaml_flags

    parser = build_parser()
    path = folder / "flags.yaml"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                flags = yaml_flags(parser, ["--yaml-cfg", str(path)])
            parser.parse_args(flags)
        except ValueError as error:
            said.write(str(error))
        except SystemExit as error:
            assert error.code == 2
        else:
            return
        assert str(path) in said.getvalue(), f"the file is not named: {said.getvalue()}"
        raise Refused

    python = f"__import__('pathlib').Path('{canary}').touch()"
    hostile = [
        f"lr: !!python/object/apply:os.system ['touch {canary}']",
        f"!!python/object/new:os.system ['touch {canary}']",
        f'lr: !!python/object/apply:builtins.eval ["{python}"]',
        f"? !!python/object/apply:os.system ['touch {canary}']\n: 1",
        f'moe-layer-freq: "{python}"',
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]",
        "a: &a {a: *a}",
        "<<: {lr: 1}",
        "lr: .nan\n",
        "lr: nan",
        "lr: 1e999",
        "lr: -.inf",
        "num-layers: 1\nnum_layers: 2",
        "num-layers: {a: {b: {c: 1}}}",
        "num-layers: [[1]]",
        "bf16: maybe",
        "bf16: 1",
        "help: true",
        "yaml-cfg: other.yaml",
        "use-cpu-initialization: true",
        "save: --load",
        "data-path: [--load, x]",
        'lr: "\\UFFFFFFFF"',
        "lr: 1\n---\nlr: 2",
        "%YAML 9.9\n---\nlr: 1",
        "- lr\n- 1",
        "lr",
        "2024-01-01: 2024-01-01",
        "? [a, b]\n: 1",
        *("[" * 60000, "{" * 60000, "- " * 30000, "? " * 30000, "{a: " * 10000, "a:\n" + " " * 60000),
        *("a: 1\n" * 12000, "data-path: [" + "a," * 30000 + "]", "&a " * 20000, "!" * 60000, "a" * 60000 + ": 1"),
        *("lr: '" + "9" * 60000 + "'", "num-layers: " + "9" * 60000, "#" * 70000, "moe-layer-freq: '" + "(" * 50000),
    ]
    valid = [
        "num-layers: 4\nhidden_size: 48\nlr: 1e-3\nbf16: true\nswiglu: no\nsave: null\nnormalization: 'RMSNorm'\n",
        "# sections\nmodel_parallel:\n  tensor_model_parallel_size: 2\nlanguage_model:\n  size: {num_layers: 2}\n",
        "data-path: [0.3, a, 0.7, b]\nmoe-layer-freq: ([0]*1+[1]*3)\nwindow-size: 128,0\nexit-signal: SIGINT\n",
        "moe-router-load-balancing-type:\n  - aux_loss\n  - sinkhorn\nmoe-aux-loss-coeff:\n  - 1e-2\n  - 0.5\n",
        "tiktoken-pattern: |\n  v2\nload: >-\n  a\n  b\ntrain-iters: 1_000\nno-rope-fusion: yes\n",
    ]
    return Kind(read, [text.encode() for text in valid], [text.encode() for text in hostile])


def layer_frequency_kind(_: Path, canary: Path) -> Kind:
    """`--moe-layer-freq` expressions."""
    from megatron_balance.cli.layer_frequency import parse_layer_frequency

    def read(data: bytes) -> None:
        try:
            value = parse_layer_frequency(data.decode("utf-8", "surrogateescape"))
        except argparse.ArgumentTypeError as error:
            assert len(str(error)) < 1000
            raise Refused from error
        assert value >= 1 if isinstance(value, int) else value and set(value) <= {0, 1}

    python = f"__import__('pathlib').Path('{canary}').touch()"
    hostile = [
        *(python, f"[{python}]", f"[1]*{python}", f"(lambda: {python})()", f"[{python} for _ in [1]]"),
        *(f"f'{{{python}}}'", f"(x:={python})", f"[1]+[open('{canary}','w')]", f'exec(\'open("{canary}","w")\')'),
        *("[1]*999999999999", "999999999*[1]", "[1]*99999*99999", "9" * 5000, "9**9**9", "1<<99999999", "-1", "1e9"),
        *("(" * 50000 + "1" + ")" * 50000, "[" * 50000, "-" * 50000 + "1", "~" * 50000 + "1", "1" + "+1" * 50000),
        *("[1]" + "+[1]" * 30000, "[" + "1," * 200000 + "]", "[" + "[0]*100000," * 3000 + "]", "[0,1]" + "*2" * 5000),
        *("1" + "*1" * 50000, "'" * 100000, "#" * 100000, "\\\n" * 50000, "lambda:" * 20000, "not " * 20000 + "1"),
    ]
    valid = ["1", "12", "([0]*1+[1]*23)", "[0,1]*4", "2*([1]+[0]*2)", "[1*1,0+0]", "[0, 1, ]", "(([1]))", "3*2+1"]
    return Kind(read, [text.encode() for text in valid], [text.encode() for text in hostile])


def index_kind(folder: Path, _: Path) -> Kind:
    """PREFIX.idx with a PREFIX.bin; accepted files are read completely, in a process that may crash."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    from megatron_balance.training.data_files import check_indices

    def build(dtype: type, documents: list[list[int]]) -> bytes:
        builder = IndexedDatasetBuilder(f"{folder}/data.bin", dtype=dtype)
        for lengths in documents:
            builder.add_document(np.zeros(sum(lengths)), lengths)
        builder.finalize(f"{folder}/data.idx")
        return (folder / "data.idx").read_bytes()

    def read(data: bytes) -> None:
        (folder / "data.idx").write_bytes(data)
        try:
            check_indices([f"{folder}/data"], thorough=True)
        except ValueError as error:
            assert str(error).startswith(f"{folder}/data.idx: "), error
            raise Refused from error
        if (child := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                signal.alarm(HANG_S)
                dataset = IndexedDataset(f"{folder}/data")
                sum(int(dataset.get(index).sum()) for index in range(len(dataset)))
                os._exit(0)
            os._exit(1)
        _, status, used = os.wait4(child, 0)
        assert status == 0, f"reading an accepted file ended with status {status}"
        assert used.ru_utime + used.ru_stime < LIMIT_S

    # The last .bin file is the largest: it remains, and is long enough for all indices
    shapes = [[[5]], [[2, 3], [4]], [[1]] * 40, [[0, 7, 0], [0], [300]], [[9] * 30] * 4]
    valid = [build(dtype, shape) for shape in shapes for dtype in (np.uint8, np.uint16, np.int32, np.int64)]
    rng = random.Random(0)
    return Kind(read, valid, [_spoilt_index(rng.choice(valid), rng) for _ in range(6000)])


HEADER = 34
"""Number of bytes of an .idx file before its arrays."""

FIELDS = {0: 8, 9: 8, 17: 1, 18: 8, 26: 8}
"""Offset and size of its fields: magic, version, token type, numbers of sequences and documents."""

EXTREMES = (
    *(0, 1, 2, 5, 7, 8, 33, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**61),
    *(2**63 - 8, 2**63, 2**64 - 8, 2**64 - 1),
)


def _spoilt_index(valid: bytes, rng: random.Random) -> bytes:
    """Make one or two changes: of a bit, a field of the header, a number in the arrays, or the length of the file."""
    data = bytearray(valid)
    for _ in range(rng.randint(1, 2)):
        flipped = rng.randrange(len(data))
        field = rng.choice(list(FIELDS))
        start = rng.randrange(HEADER, len(data), 4)
        number = rng.choice((rng.choice(EXTREMES), rng.randrange(2**64), rng.randrange(64))).to_bytes(8, "little")
        edit = rng.randrange(5)
        if edit == 0:
            data[flipped] ^= 1 << rng.randrange(8)
        elif edit == 1:
            data[field : field + FIELDS[field]] = number[: FIELDS[field]]
        elif edit == 2:
            data[start : start + 8] = number
        elif edit == 3:
            del data[max(HEADER, flipped) :]
            data += b"\0" * (HEADER + 1 - len(data))
        else:
            data += rng.randbytes(rng.choice((1, 8, 4096)))
    return bytes(data)


KINDS: dict[str, Callable[[Path, Path], Kind]] = {
    "yaml": yaml_kind,
    "moe-layer-freq": layer_frequency_kind,
    "idx": index_kind,
    **FILE_KINDS,
}
"""Name -> function that builds the kind, given a folder for files and the path of the canary."""


def inputs(rng: random.Random, kind: Kind, count: int) -> Iterator[bytes]:
    """Yield the unchanged corpus, then mutations: `count` inputs in total, or the corpus if it is longer."""
    corpus = kind.valid + kind.hostile
    yield from corpus
    for _ in range(count - len(corpus)):
        yield edited(rng, kind)


def campaign(name: str, count: int, seed: int) -> Result:
    """Feed `count` inputs to one reader."""
    result = Result()
    signal.signal(signal.SIGALRM, _hangs)
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder) / "canary"
        kind = KINDS[name](Path(folder), canary)
        for data in kind.valid:
            with contextlib.suppress(Refused):
                kind.read(data)
                continue
            result.failures.append(f"a valid input was refused: {data!r}")
        start = _resident_mb()
        for data in inputs(random.Random(seed), kind, count):
            trouble = _attempt(kind, data, result)
            if canary.exists():
                canary.unlink()
                trouble = "code was evaluated"
            if trouble:
                result.failures.append(f"{trouble}\ninput: {data[:300]!r}")
        result.grown_mb = _resident_mb() - start
    return result


def _attempt(kind: Kind, data: bytes, result: Result) -> str:
    """Read one input; return a description of the failure, or an empty string."""
    signal.alarm(HANG_S)
    start = time.process_time()
    before = _resident_mb()
    trouble = ""
    try:
        kind.read(data)
        result.accepted += 1
    except Refused:
        result.refused += 1
    except BaseException:
        trouble = traceback.format_exc(limit=-4)
    finally:
        signal.alarm(0)
    seconds = time.process_time() - start
    result.worst_s = max(result.worst_s, seconds)
    if (grown := _resident_mb() - before) > LIMIT_MB:
        trouble = trouble or f"took {grown:.0f} MB"
    return trouble or (f"took {seconds:.1f} s" if seconds > LIMIT_S else "")


def _resident_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _hangs(*_: object) -> None:
    raise TimeoutError(f"no answer after {HANG_S} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--count", type=int, default=10_000, help="inputs per kind")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    failed = False
    for name in args.kinds:
        result = campaign(name, args.count, args.seed)
        failed |= bool(result.failures)
        print(
            f"{name}: {result.accepted + result.refused} inputs answered ({result.accepted} accepted, "
            f"{result.refused} refused), worst {result.worst_s:.2f} s, +{result.grown_mb:.0f} MB, "
            f"{len(result.failures)} failures",
            flush=True,
        )
        for failure in result.failures[:5]:
            print(failure, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
