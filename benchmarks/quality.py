"""The quality results as tables and pictures: `mlx-tq eval` makes them, in one run or in several on several devices.

    python benchmarks/quality.py                               # a table of formats, in Markdown
    python benchmarks/quality.py --write benchmarks/results    # quality.csv, kl.png and needle.png

The column "slots" is an instruction count of the decode kernel from results/agx.csv, for a key, a value and a query
head at head_dim 128; it is left out where there is no such file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from speed import RESULTS, markdown, read

from mlx_tq import TQFormat
from mlx_tq.evaluate import MLX_LM, measured, read_rows, write_csv
from mlx_tq.plots import REFERENCE, plot


def slots(path: Path) -> dict[str, str]:
    """Slots for one query head and for four, by format."""
    rows = [r for r in read(path) if (r["kernel"], r["head_dim"]) == ("attend", "128")]
    if not rows:
        return {}
    by_group = {(row["format"], row["group"]): row["slots"] for row in rows}
    return {name: f"{by_group[name, '1']} / {by_group[name, '4']}" for name in TQFormat.presets()}


def table(rows: list[dict], cost: dict[str, str]) -> str:
    """One line for each preset, mlx-lm's quantised caches and the model's own cache run a second time."""
    found = {row["format"]: row for row in rows}
    named = TQFormat.presets()
    heads = ["format", "bits per element, head_dim 64 / 128", "KL, nats", "top-1", "copy top-1"]
    heads += ["slots, 1 / 4 heads"] * bool(cost) + ["contents"]
    lines = [heads]
    for name in (*named, *MLX_LM, REFERENCE):
        if name not in found:
            continue
        row = found[name]
        bits = f"{row['bits_per_element']:.2f}"
        if name in named:
            bits = " / ".join(f"{named[name].bits_per_element(dim):.2f}" for dim in (64, 128))
        line = [f"`{name}`", bits, f"{row['kl_mean']:.4f}", f"{row['top1']:.1%}", f"{row['copy_top1']:.1%}"]
        lines.append(line + [cost.get(name, "-")] * bool(cost) + [row["about"]])
    return markdown(lines)


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "quality.json", help="what `mlx-tq eval --out` wrote")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the CSV and the pictures here")
    return parser


def main(argv: list[str] | None = None) -> int:
    args = setup_arg_parser().parse_args(argv)
    rows = read_rows(args.json)
    numbers = [row for row in rows if measured(row)]
    if not numbers:
        sys.exit(f"error: {str(args.json)!r} has no results: `mlx-tq eval --out` writes them")
    print(table(numbers, slots(RESULTS / "agx.csv")))
    for device in dict.fromkeys(f"{row['device']}, {row['dtype']}, mlx {row['mlx']}" for row in numbers):
        print(f"\nmeasured on {device}", file=sys.stderr)
    if args.write is not None:
        write_csv(args.write / "quality.csv", rows)
        plot(numbers, args.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
