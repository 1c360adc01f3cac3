"""Writes the description of a cluster with the rates that gpu_rates.py measured on one of its GPUs.

    python tools/bench/measured_cluster.py rates.json [--base configs/clusters/h100.yaml] [--output FILE]

The links and the number of GPUs are the base's, which follows from the GPU's name. The GPU's memory and its rates for
copies and large products are measured, unless the base says which fractions of its rates are reached. All tables follow
in `measured`. Numbers that may contain time of the host are left out.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gpu_rates import ACROSS
from megatron_balance.files.reading import MIB, read_object
from megatron_balance.profile.cluster import read

CLUSTERS = Path(__file__).parents[2] / "configs/clusters"

ENDS = ("value", "spread")
"""The last columns of a table: the median, and half the interquartile range over it."""

DIGITS = 4


class _Plain(yaml.SafeDumper):
    """Writes every value out, because `read` refuses aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def described(found: Mapping[str, Any], base: Mapping[str, Any], name: str) -> str:
    """Return the text of a cluster's file.

    Args:
        found: content of gpu_rates.py's JSON.
        base: content of the file of a cluster with one kind of GPU.
        name: the cluster's name.

    Raises:
        ValueError: a rate that every description has was not measured.
    """
    facts = found["facts"]
    source = f"measured on {facts['device']}, {facts['date']}, torch {facts['torch']}: tools/bench/gpu_rates.py"
    rates = {
        "memory_gb_per_second": _value(found, "device copy", {}),
        "fp32_tflops": _value(found, "square product", {"dtype": "float32"}),
        "half_tflops": _value(found, "square product", {"dtype": "bfloat16"}),
    }
    if "memory_bytes" in facts:
        rates["memory_gb"] = _rounded(facts["memory_bytes"] / 1e9)
    gpu = dict(base["gpus"][0])
    if "reached" not in gpu:
        gpu |= {"name": facts["device"]} | {field: {"value": value, "source": source} for field, value in rates.items()}
    tables = [table for name in found["tables"] for table in _tables(found["tables"][name], name, source)]
    content = {**base, "name": name, "gpus": [gpu], "measured": tables}
    head = "# Written by tools/bench/measured_cluster.py. Links are not measured.\n"
    options: Any = {"sort_keys": False, "default_flow_style": None, "width": 10**6, "allow_unicode": True}
    return head + yaml.dump(content, Dumper=_Plain, **options)


def _value(found: Mapping[str, Any], table: str, key: Mapping[str, Any]) -> float:
    for row in found["tables"].get(table, {"rows": []})["rows"]:
        if key.items() <= row.items():
            return _rounded(row["value"])
    raise ValueError(f"{table} {', '.join(map(str, key.values()))}".strip() + ": was not measured")


def _tables(table: Mapping[str, Any], name: str, source: str) -> list[dict[str, Any]]:
    """Return a table for each combination of values in the columns that gpu_rates.py prints across."""
    across = ACROSS.get(name, ())
    columns = [column for column in table["columns"] if column not in across]
    parts: dict[str, list[list[Any]]] = {}
    for row in table["rows"]:
        if row.get("ahead", True):
            entry = [*(row[column] for column in columns), *(_rounded(row[end]) for end in ENDS)]
            parts.setdefault(", ".join([name, *(row[column] for column in across)]), []).append(entry)
    more = {"unit": table["unit"], "source": source, "columns": [*columns, *ENDS]}
    return [{"name": part, **more, "rows": rows} for part, rows in parts.items()]


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rates", type=Path, help="what gpu_rates.py wrote")
    parser.add_argument("--base", type=Path, help="cluster that the links are taken from; default: by the GPU's name")
    parser.add_argument("--output", type=Path, help="default: BASE_measured.yaml in configs/clusters")
    args = parser.parse_args(arguments)
    found = read_object(args.rates, 16 * MIB)
    device = found["facts"]["device"]
    bases = [CLUSTERS / f"{kind}_measured.yaml" for kind in ("h100", "h200") if kind.upper() in device]
    base = args.base or (bases[0] if bases else parser.error(f"{device}: name a cluster's file with --base"))
    read(base)
    output = args.output or CLUSTERS / f"{base.stem.removesuffix('_measured')}_measured.yaml"
    content = yaml.safe_load(base.read_text())
    name = content["name"] if "reached" in content["gpus"][0] else f"{content['name']}, measured"
    output.write_text(described(found, content, name))
    # Fails if the file is too large, or a number is out of its range
    tables = read(output).measured
    numbers = sum(len(table["rows"]) for table in tables)
    print(f"{output}: {len(tables)} tables, {numbers} numbers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
