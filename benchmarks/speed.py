"""The speed results as tables and pictures: `attention.py` and `generation.py` make them.

    python benchmarks/speed.py                               # tables in Markdown
    python benchmarks/speed.py --write benchmarks/results    # attention.png and generation.png

The picture of attention has the roofline of devices whose memory bandwidth is known here: the time to read the keys and
values once.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
# Bytes a second, from the makers' data sheets.
BANDWIDTH = {"H200": 4.8e12, "M4 Max": 546e9, "M3 Max": 400e9, "M1 Max": 400e9}


def read(path: Path) -> list[dict]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def markdown(lines: list[list]) -> str:
    head, *body = lines
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *body))


def attention_table(rows: list[dict]) -> str:
    """One line for each case: times, and how many times faster the default format is than MLX and mlx-lm."""
    head = ["case", "batch", "heads", "head_dim", "cached", "new", "ours, µs", "bf16, µs", "mlx-lm 4 bits, µs"]
    lines = [[*head, "bf16 / ours", "4 bits / ours"]]
    for r in rows:
        heads = f"{r['n_heads']}/{r['n_kv_heads']}"
        case = [r["case"], r["batch"], heads, r["head_dim"], f"{int(r['cached']):,}", r["queries"]]
        ours, bf16, q4 = (r[f"{name}_us"] for name in ("ours", "bf16", "mlx_lm_q4"))
        times = [f"{float(time):,.0f}" if time else "-" for time in (ours, bf16, q4)]
        ratio_q4 = f"{float(q4) / float(ours):.1f}" if q4 else "-"
        lines.append([*case, *times, f"{float(r['ratio_bf16']):.2f}", ratio_q4])
    return markdown(lines)


def generation_table(rows: list[dict]) -> str:
    lines = [["model", "cached", "own cache, tokens/s", "compressed, tokens/s", "ratio", "cache, MB"]]
    for r in rows:
        sizes = " → ".join(f"{int(r[key]) / 1e6:,.0f}" for key in ("own_bytes", "ours_bytes"))
        rates = [f"{float(r[key]):.1f}" for key in ("own_tps", "ours_tps")]
        lines.append([r["model"], f"{int(r['cached']):,}", *rates, f"{float(r['ratio']):.2f}", sizes])
    return markdown(lines)


def attention_picture(plt, rows: list[dict]):
    """Time against tokens of the decode cases, and the times in which memory gives keys and values once."""
    rows = [r for r in rows if r["case"] == "decode"]
    cached = [int(r["cached"]) for r in rows]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    device = rows[0]["device"]
    bandwidth = next((rate for name, rate in BANDWIDTH.items() if name in device), None)
    lines = (
        ("ours", "tab:blue", "mlx-tq, default"),
        ("bf16", "tab:orange", "MLX, bfloat16"),
        ("mlx_lm_q4", "tab:green", "mlx-lm, 4 bits"),
    )
    for name, colour, label in lines:
        if not all(r[f"{name}_us"] for r in rows):
            continue
        axes.plot(cached, [float(r[f"{name}_us"]) for r in rows], "o-", color=colour, label=label)
        if bandwidth is not None and f"{name}_bytes" in rows[0]:
            bound = [int(r[f"{name}_bytes"]) / bandwidth * 1e6 for r in rows]
            axes.plot(cached, bound, ":", color=colour, label=f"its bytes at {bandwidth / 1e12:.1f} TB/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(cached, map(short, cached))
    axes.set_xlabel("tokens held")
    axes.set_ylabel("µs for one query")
    shape = ", ".join(f"{label} {rows[0][key]}" for key, label in (("n_heads", "heads"), ("n_kv_heads", "KV heads")))
    axes.set_title(f"{device}: {shape}, head_dim {rows[0]['head_dim']}", fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    return figure


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def generation_picture(plt, rows: list[dict]):
    """Tokens per second against tokens held, a panel for each model."""
    models = list(dict.fromkeys(r["model"] for r in rows))
    figure, panels = plt.subplots(1, len(models), figsize=(4.5 * len(models), 3.6), squeeze=False, layout="constrained")
    for axes, model in zip(panels[0], models, strict=True):
        mine = [r for r in rows if r["model"] == model]
        cached = [int(r["cached"]) for r in mine]
        for key, colour, label in (("ours", "tab:blue", "mlx-tq"), ("own", "tab:orange", "mlx-lm's cache")):
            axes.plot(cached, [float(r[f"{key}_tps"]) for r in mine], "o-", color=colour, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(cached, map(short, cached))
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens held")
        axes.set_ylabel("tokens per second")
        axes.set_title(model, fontsize=10)
        axes.grid(True, alpha=0.25)
        axes.legend()
    figure.suptitle(rows[0]["device"], fontsize=10)
    return figure


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--attention", type=Path, default=RESULTS / "attention_h200.csv", help="what attention.py wrote"
    )
    parser.add_argument(
        "--generation", type=Path, default=RESULTS / "generation_h200.csv", help="what generation.py wrote"
    )
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the pictures here")
    args = parser.parse_args(argv)
    attention, generation = read(args.attention), read(args.generation)
    if not attention and not generation:
        sys.exit(f"error: neither {str(args.attention)!r} nor {str(args.generation)!r} has results")
    for rows, table in ((attention, attention_table), (generation, generation_table)):
        if rows:
            print(f"{table(rows)}\n")
            for about in dict.fromkeys(f"{row['device']}, mlx {row['mlx']}, commit {row['commit']}" for row in rows):
                print(about)
            print()
    if args.write is not None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        for rows, name, picture in (
            (attention, "attention.png", attention_picture),
            (generation, "generation.png", generation_picture),
        ):
            if rows:
                picture(plt, rows).savefig(args.write / name, dpi=150)
    return 0


if __name__ == "__main__":
    sys.exit(main())
