"""Time of one attention call over a cache: ours, MLX's bfloat16 attention, and mlx-lm's 4-bit quantised attention.

All three run in one process, interleaved, over rotating caches as large together as those of a model. Each call waits
for the one before; the graph of many calls is built before the clock starts and evaluated at once, so times are those
of MLX and the device. What Python takes to build a call is in `host_us`; the times of a prompt's chunk, which is long
and starts to run while it is built, have it in them. Each result is checked before it is timed. Times are
microseconds per call: the median and the 20th and 80th percentile over rounds. Peaks are bytes beyond what was held
before one call. `append_us` is the time to put as many new tokens as there are queries into the cache: rotation,
packing and the copy into place, on average over the steps between two pages, or over the caches of several layers that
get a prompt's chunk; `bf16_append_us` is that of mlx-lm's own cache. `encode_us` is the part of rotation and packing
alone, in calls that wait for each other; formats with a window pack a page at once, and a single token gets its share
of that time.

    python benchmarks/attention.py --out benchmarks/results/attention.csv
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import numpy as np

import mlx_tq
from mlx_tq.doctor import device_name
from mlx_tq.loading import new_file, write_csv

# Bytes that the rotating caches of one method should reach together, as those of a model's layers do, and how many
# there are at most.
ROTATE_BYTES = 2 << 30
MAX_CACHES = 16
# Caches that get a prompt's chunk in one evaluation.
APPENDS = 8


@dataclass(frozen=True)
class Case:
    name: str
    cached: int
    queries: int = 1
    batch: int = 1
    n_heads: int = 32
    n_kv_heads: int = 8
    head_dim: int = 128


LENGTHS = (1024, 4096, 8192, 32768, 131072)
CASES = (
    [Case("decode", n) for n in LENGTHS]
    + [Case("batch", n, batch=b) for b in (4, 16) for n in (1024, 8192, 32768)]
    + [Case("group", n, n_kv_heads=h) for h in (32, 4) for n in (8192, 32768)]
    + [Case("head_dim", n, head_dim=d) for d in (64, 256) for n in (8192, 32768)]
    + [Case("prefill", n, queries=2048) for n in (8192, 32768, 131072)]
    + [Case("prefill", 32768, queries=512)]
)


def rows(shape) -> mx.array:
    return mx.random.normal(shape).astype(mx.bfloat16)


def filled(cache, keys: mx.array, values: mx.array):
    """The cache, once it has taken these rows in chunks."""
    for start in range(0, keys.shape[2], 8192):
        cache.update_and_fetch(*(x[:, :, start : start + 8192] for x in (keys, values)))
        mx.eval(cache.keys, cache.values)
    return cache


def methods(case: Case, format: str):
    """Per method a list of closures q -> output, one for each rotating cache; one of our caches; bytes in bfloat16."""
    from mlx_lm.models.base import quantized_scaled_dot_product_attention

    shape = (case.batch, case.n_kv_heads, case.cached, case.head_dim)
    bf16_bytes = 4 * int(np.prod(shape))
    count = max(2, min(MAX_CACHES, ROTATE_BYTES // (bf16_bytes // 4)))
    scale = case.head_dim**-0.5
    mask = "causal" if case.queries > 1 else None
    ours, stock, q4 = [], [], []
    for _ in range(count):
        keys, values = rows(shape), rows(shape)
        cache = filled(mlx_tq.TQKVCache(format), keys, values)
        packed = cache.rows
        quantised = [mx.quantize(x, group_size=64, bits=4) for x in (keys, values)]
        mx.eval(keys, values, quantised)
        ours.append(lambda q, p=packed: mlx_tq.attention(q, *p, scale=scale, mask=mask))
        stock.append(lambda q, k=keys, v=values: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask))
        q4.append(
            lambda q, k=quantised[0], v=quantised[1]: quantized_scaled_dot_product_attention(
                mx.array(q), k, v, scale=scale, mask=mask, group_size=64, bits=4
            )
        )
    return {"ours": ours, "bf16": stock, "mlx_lm_q4": q4}, cache, bf16_bytes


def run(calls, q, count: int) -> tuple[float, float]:
    """Seconds per call of `count` calls, each waiting for the one before: to evaluate, and to build the graph."""
    started, out = perf_counter(), None
    for i in range(count):
        out = calls[i % len(calls)](q if out is None else mx.depends(q, out))
    built = perf_counter()
    mx.eval(out)
    return (perf_counter() - built) / count, (built - started) / count


def append(case: Case, steps: int, new_cache) -> float:
    """Microseconds to put `case.queries` new tokens into a cache, on average over three rounds of so many steps.

    The caches grow from round to round, as those of a prompt do, and so make room for more where they have to.
    """
    held, new = ((case.batch, case.n_kv_heads, n, case.head_dim) for n in (case.cached, case.queries))
    keys, new = rows(held), rows(new)
    caches = [filled(new_cache(), keys, keys) for _ in range(1 if steps > 1 else APPENDS)]
    times = []
    for _ in range(4):  # the first compiles
        mx.eval(new, [[cache.keys, cache.values] for cache in caches])
        for cache in caches:
            for _ in range(steps):
                cache.update_and_fetch(new, new)
        started = perf_counter()
        mx.eval([[cache.keys, cache.values] for cache in caches])
        times.append((perf_counter() - started) / steps / len(caches) * 1e6)
    return float(np.mean(times[1:]))


def encode(case: Case, cache: mlx_tq.TQKVCache) -> float:
    """Microseconds to rotate and pack `case.queries` new keys and values as a cache does, median of some rounds."""
    tokens = max(case.queries, cache.format.page if cache.format.paged else 1)
    keys = rows((case.batch, case.n_kv_heads, tokens, case.head_dim))

    def call(keys: mx.array) -> list[mx.array]:
        return [array for region in cache._encode(keys, keys, (0, tokens)) for array in region if array is not None]

    mx.eval(keys)
    times = [run([call], keys, 50)[0] for _ in range(6)]
    return float(np.median(times[1:])) / tokens * case.queries * 1e6


def peak(call, q) -> int:
    """Bytes that one call needs at most beyond what is held."""
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call(q))
    return mx.get_peak_memory() - held


def measure(case: Case, format: str, rounds: int, budget_s: float, with_q4: bool) -> dict:
    from mlx_lm.models.cache import KVCache

    calls, cache, bf16_bytes = methods(case, format)
    steps = max(1, cache.format.page // case.queries)
    ours_bytes, path = cache.nbytes, mlx_tq.explain(cache)
    q = rows((case.batch, case.n_heads, case.queries, case.head_dim))
    mx.eval(q)
    if with_q4:
        try:
            mx.eval(calls["mlx_lm_q4"][0](q))
        except RuntimeError as error:  # MLX has no quantised product for this device, or this shape on it
            print(f"mlx-lm's quantised attention: {error}", file=sys.stderr)
            with_q4 = False
    if not with_q4:
        del calls["mlx_lm_q4"]
    outs = {name: fs[0](q).astype(mx.float32) for name, fs in calls.items()}
    error = mx.linalg.norm(outs["ours"] - outs["bf16"]) / mx.linalg.norm(outs["bf16"])
    if not error.item() < 0.25:  # the error of the format itself on random rows
        raise SystemExit(f"{case}: ours differs from bfloat16 attention by {error.item():.3f} (relative)")
    peaks = {name: peak(fs[0], q) for name, fs in calls.items()}
    counts = {}
    for name, fs in calls.items():
        run(fs, q, len(fs))
        once = sum(run(fs, q, len(fs)))
        counts[name] = max(len(fs), min(200, int(budget_s / rounds / len(calls) / once)))
    times, host = {name: [] for name in calls}, {name: [] for name in calls}
    for _ in range(rounds):
        for name, fs in calls.items():
            evaluated, built = run(fs, q, counts[name])
            times[name].append((evaluated + built * (case.queries > 1)) * 1e6)
            host[name].append(built * 1e6)
    mid = {name: float(np.median(t)) for name, t in times.items()}
    return {
        "case": case.name,
        **{f: getattr(case, f) for f in ("batch", "n_heads", "n_kv_heads", "head_dim", "cached", "queries")},
        "format": format,
        "ours_us": round(mid["ours"], 2),
        "bf16_us": round(mid["bf16"], 2),
        "mlx_lm_q4_us": round(mid["mlx_lm_q4"], 2) if with_q4 else "",
        "ratio_bf16": round(mid["bf16"] / mid["ours"], 3),
        "p20": round(float(np.percentile(times["ours"], 20)), 2),
        "p80": round(float(np.percentile(times["ours"], 80)), 2),
        "host_us": round(float(np.median(host["ours"])), 2),
        "bf16_host_us": round(float(np.median(host["bf16"])), 2),
        "append_us": round(append(case, steps, lambda: mlx_tq.TQKVCache(format)), 2),
        "bf16_append_us": round(append(case, steps, KVCache), 2),
        "encode_us": round(encode(case, cache), 3),
        "ours_bytes": ours_bytes,
        "bf16_bytes": bf16_bytes,
        "ours_peak": peaks["ours"],
        "bf16_peak": peaks["bf16"],
        "path": path,
    }


def commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        out = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=here)
    except OSError:
        return ""
    return out.stdout.strip()


def conditions(commit: str) -> dict[str, str]:
    """What every row says of where it was measured; printed too."""
    about = {"device": device_name(), "mlx": mx.__version__, "commit": commit}
    print(f"{about['device']}, mlx {about['mlx']}, commit {about['commit'] or 'unknown'}", file=sys.stderr)
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_file, help="CSV file to write")
    parser.add_argument("--formats", default="default", help="presets, separated by commas (default: %(default)s)")
    parser.add_argument("--cases", default="", help="only cases whose name is in this list")
    parser.add_argument("--max-cached", type=int, help="leave out longer caches (default: 4096 on a CPU, else none)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=3.0, help="seconds per case, about (default: %(default)s)")
    parser.add_argument("--commit", default=commit(), help="what to write as the commit (default: git's)")
    parser.add_argument("--no-q4", action="store_true", help="leave out mlx-lm's quantised attention")
    args = parser.parse_args()
    longest = args.max_cached or (131072 if mx.default_device().type == mx.gpu else 4096)
    about = conditions(args.commit)
    out = []
    print(
        f"{'case':9s} {'B':>3s} {'heads':>7s} {'D':>4s} {'cached':>7s} {'L':>5s} {'format':9s}"
        f" {'ours':>9s} {'bf16':>9s} {'q4':>9s} {'bf16/ours':>9s}"
    )
    for case in CASES:
        if case.cached > longest or (args.cases and case.name not in args.cases.split(",")):
            continue
        for format in args.formats.split(","):
            row = measure(case, format, args.rounds, args.budget, not args.no_q4 and case.queries == 1)
            out.append(row | about)
            if args.out is not None:
                write_csv(args.out, out)
            print(
                f"{case.name:9s} {case.batch:3d} {case.n_heads:4d}/{case.n_kv_heads:<2d} {case.head_dim:4d}"
                f" {case.cached:7d} {case.queries:5d} {format:9s} {row['ours_us']:9.1f} {row['bf16_us']:9.1f}"
                f" {row['mlx_lm_q4_us'] or 0:9.1f} {row['ratio_bf16']:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
