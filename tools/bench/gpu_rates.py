"""Measures the rates of one GPU that plans and simulations use: products, attention, memory, launches, copies.

    python tools/bench/gpu_rates.py --output rates.json [--sections products memory ...]

Tables are medians and, after ±, half the distance between the quartiles. A `*` marks a number that may contain time of
the host, which did not queue the calls soon enough. Tables:

    products        the experts' products as megatron_balance/flow/grouped_gemm.py computes them: operations are
                    2 * rows * inputs * outputs in each pass. By slot, weight gradients are added to float32 sums;
                    grouped, our code adds them afterwards, which is not measured
    rows            gather_rows and combine of a layer: bytes of tokens and rows
    others          see gpu_products.py, gpu_memory.py and gpu_latency.py

tools/bench/measured_cluster.py turns FILE into a cluster's description. A failure is noted, and the remaining parts
are measured; the exit status is then 1. --cpu tries all of it at tiny sizes on the host.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import device_timer
from megatron_balance.device import quiet

ACROSS = {"products": ("pass", "way"), "attention": ("pass",), "rows": ("operation",), "codecs": ("direction",)}
"""Columns whose values are columns of the printed tables."""


def sections(results: device_timer.Results) -> Mapping[str, Callable[[], object]]:
    """Return the function that measures each part; the most useful parts come first."""
    # megatron-core warns when it is imported, before `quiet`
    import gpu_latency
    import gpu_memory
    import gpu_products

    real = results.timer.cuda
    tokens, layers = (8192, gpu_memory.LAYERS) if real else (8, (gpu_memory.Layer(32, 4, 2),))
    shapes = gpu_products.SHAPES if real else gpu_products.TINY_SHAPES
    counts, uneven_rows = (gpu_products.ROWS, gpu_products.UNEVEN_ROWS) if real else ((4,), 6)

    def products() -> None:
        for shape in shapes:
            gpu_products.products(results, shape, counts, uneven_rows)

    def rows() -> None:
        for layer in layers:
            gpu_memory.layer_rows(results, layer, tokens)

    return {
        "copy": partial(gpu_memory.copies, results, 4 * 10**9 if real else 10**4),
        "square": partial(gpu_products.square, results, 8192 if real else 32),
        "products": products,
        "attention": partial(gpu_products.attention, results, *((4096, (1, 4)) if real else (16, (1,)))),
        "rows": rows,
        "swiglu": partial(gpu_memory.swiglu, results, *((16384, 4096) if real else (8, 16))),
        "launches": partial(gpu_latency.launches, results),
        "transfers": partial(gpu_latency.transfers, results, 256 * 2**20 if real else 8192),
        "codecs": partial(gpu_memory.codecs, results, *((16384, 4096) if real else (8, 16))),
        "adam": partial(gpu_memory.adam, results, 2**28 if real else 64),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the results, as JSON")
    parser.add_argument("--sections", nargs="+", help="parts to measure; default: all")
    parser.add_argument("--seconds", type=float, default=60, help="time after which nothing new is measured")
    parser.add_argument("--cpu", action="store_true", help="try all of it on the CPU, at tiny sizes")
    args = parser.parse_args(arguments)
    quiet.silence_expected_warnings()
    timer = device_timer.Timer(device_timer.device_of(args.cpu), **({"target": 1e-4, "most": 3} if args.cpu else {}))
    results = device_timer.Results(timer, args.output, args.seconds)
    all_sections = sections(results)
    names = args.sections or [*all_sections]
    if unknown := {*names} - {*all_sections}:
        parser.error(f"unknown sections {sorted(unknown)}; choose from {', '.join(all_sections)}")
    for name in names:
        results.section(name, all_sections[name])
    return results.finish(ACROSS)


if __name__ == "__main__":
    sys.exit(main())
