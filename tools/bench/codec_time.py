"""Measures the codecs of --moe-comm-codec: encoding and decoding speed, compression and errors.

    python tools/bench/codec_time.py [--device cuda] [--rows 4096] [--hidden 4096] [--dtypes bfloat16 float32]

GB/s count the rows, not the payload, and are medians over rounds in which the codecs take turns; `copy` is a copy of
the rows, the upper limit of a device. `gain` is the bandwidth, in GB/s of rows per rank, below which the codec pays:
there, the time saved on the wire equals the time to encode and decode once. Errors are for standard normal elements.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

from megatron_balance.comm.codecs import CODECS, Codec, load_codec

ROUNDS = 7

Actions = dict[tuple[str, str], Callable[[], object]]
"""Actions by codec and direction."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--codecs", nargs="+", help="names or package.module:Class; by default all for the device")
    args = parser.parse_args()
    device = torch.device(args.device)
    names = args.codecs or [name for name in CODECS if name != "zfp" or device.type == "cpu"]
    print(f"{args.rows} rows of {args.hidden} on {device}, {torch.get_num_threads()} threads")
    print("dtype     codec  ratio  encode GB/s  decode GB/s   gain GB/s  max error  mean error")
    for dtype in args.dtypes:
        rows = torch.randn(args.rows, args.hidden, device=device).to(getattr(torch, dtype))
        _table(rows, {name: load_codec(name) for name in names})
    return 0


def _table(rows: torch.Tensor, codecs: dict[str, Codec]) -> None:
    hidden = rows.shape[1]
    gigabytes = rows.nbytes / 1e9
    dtype = str(rows.dtype).removeprefix("torch.")
    payloads = {name: codec.encode(rows) for name, codec in codecs.items()}
    actions: Actions = {("copy", "encode"): rows.clone}
    for name, codec in codecs.items():
        actions[name, "encode"] = lambda codec=codec: codec.encode(rows)
        actions[name, "decode"] = lambda codec=codec, payload=payloads[name]: codec.decode(payload, hidden, rows.dtype)
    seconds = _medians(actions, rows.device)
    print(f"{dtype:9s} copy   {1:5.2f}  {gigabytes / seconds['copy', 'encode']:11.2f}")
    for name, codec in codecs.items():
        encode = seconds[name, "encode"]
        decode = seconds[name, "decode"]
        ratio = rows.nbytes / payloads[name].nbytes
        gain = gigabytes * (1 - 1 / ratio) / (encode + decode)
        error = (codec.decode(payloads[name], hidden, rows.dtype).double() - rows.double()).abs()
        print(
            f"{dtype:9s} {name:6s} {ratio:5.2f}  {gigabytes / encode:11.2f}  {gigabytes / decode:11.2f}  {gain:10.2f}"
            f"  {error.max():9.2e}  {error.mean():10.2e}",
            flush=True,
        )


def _medians(actions: Actions, device: torch.device) -> dict[tuple[str, str], float]:
    """Return the median seconds of each action, including the wait for the device."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in actions}
    for round_ in range(ROUNDS + 1):
        for key, action in actions.items():
            _wait(device)
            start = time.perf_counter()
            action()
            _wait(device)
            if round_:
                times[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in times.items()}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
