"""Simulates tables of the papers at their own models and clusters, next to the papers' numbers.

    python tools/reproduce.py [NAME ...]

Times are simulated (simulate.py) with the rates of data sheets. The tables are in tools/reproduction/, with the loads
and the baselines of each paper. A plan takes a millisecond. A ratio is ours over the paper's number, or over the
nearest end of the range that the paper's text gives.
"""

import argparse
import sys

from megatron_balance.device import cpu, quiet
from reproduction import demi, flexmoe, parm, pro_prophet, schemoe
from reproduction.tables import Found, Table, heading, summary

TABLES: dict[str, Table] = {
    name: table for paper in (pro_prophet, flexmoe, demi, schemoe, parm) for name, table in paper.TABLES.items()
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"tables (default: all): {', '.join(TABLES)}")
    iterations = "iterations to simulate, of which the first does not count (default: 3)"
    parser.add_argument("--iterations", type=int, metavar="N", default=3, help=iterations)
    args = parser.parse_args(argv)
    for name in args.names:
        if name not in TABLES:
            parser.error(f"{name}: choose from {', '.join(TABLES)}")
    if args.iterations < 2:
        parser.error(f"--iterations {args.iterations}: give at least 2, because the first one does not count")
    quiet.silence_expected_warnings()
    cpu.install(always=True)
    found: dict[str, list[Found]] = {}
    for name in args.names or TABLES:
        print(heading(TABLES[name]))
        found[name] = []
        for row in TABLES[name].rows(args.iterations):
            print(row, flush=True)
            found[name].append(row)
    print("\n".join(summary(TABLES, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
