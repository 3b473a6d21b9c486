"""Other TurboQuant caches for MLX from the package index beside this one: error of keys and values, and bytes held.

Each peer is installed into a temporary virtual environment of its own and runs there through its public cache class,
on the CPU. What its cache gives back is compared here with what went in, the same way for all:

    key_mse, value_mse   mean squared error of an element; the part of every key that differs is N(0, 1), as are values
    kl                   mean over queries q ~ N(0, 1) of KL(softmax(q K / sqrt(d)) || softmax(q K' / sqrt(d))), nats;
                         * marks the smallest of a case and width (bits of a key)
    bytes                the cache's nbytes, spare capacity and what it keeps exact included
    bits                 bits an element of one more token: from nbytes at half and at all of the tokens

    python benchmarks/peers.py --out benchmarks/results/peers.csv
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HEADS, TOKENS, DIM, QUERIES = 2, 1024, 128, 64
SEED = 0
TIMEOUT = 900
OURS, STOCK = "mlx-tq", "mlx-lm"
FIELDS = "case width cache version setting bits bytes key_mse value_mse kl best device mlx note".split()


@dataclass(frozen=True)
class Peer:
    """A package, and its settings as (label, nominal bits of a key)."""

    name: str
    requirement: str
    settings: tuple[tuple[str, int], ...]


PEERS = (
    Peer("mlx-vlm", "mlx-vlm==0.7.10", (("4", 4), ("3.5", 3), ("3", 3))),
    Peer("mlx-turboquant", "mlx-turboquant==0.0.2", (("4", 4), ("3", 3))),
    Peer("turboquant-mlx-full", "turboquant-mlx-full==0.30.0", (("4", 4), ("k4v3", 4), ("3", 3))),
)
# Nothing is kept exact (k4v4 has no window), so that codes are compared with codes.
OUR_SETTINGS = (
    ("k4v4", 4),
    ("k4v4:codebook=lloyd", 4),
    ("k4v4:centered_keys=true", 4),
    ("k4v4:codebook=lloyd,centered_keys=true", 4),
    ("k4v4:value_bits=3,centered_keys=true", 4),
    ("k4v4:key_bits=3,value_bits=3", 3),
    ("k4v4:key_bits=3,value_bits=3,codebook=lloyd", 3),
    ("k4v4:key_bits=3,value_bits=3,centered_keys=true", 3),
    ("k4v4:key_bits=3,value_bits=3,codebook=lloyd,centered_keys=true", 3),
    ("k4v4:key_bits=3,centered_keys=true", 3),
)
STOCK_SETTINGS = (("4", 4), ("3", 3))


def cases() -> dict[str, np.ndarray]:
    """Keys `(1, HEADS, TOKENS, DIM)`, float16, and "values", by name."""
    rng = np.random.default_rng(SEED)
    shape = (1, HEADS, TOKENS, DIM)
    plain = rng.standard_normal(shape)
    direction = rng.standard_normal(DIM)
    direction /= np.linalg.norm(direction)
    few = rng.choice(DIM, 4, replace=False)
    outliers, channels = np.ones(DIM), np.zeros(DIM)
    outliers[few] = 8
    channels[few] = np.linspace(18, 30, 4)
    keys = {"plain": plain, "4 channels x 8": plain * outliers, "4 channels + 18..30": plain + channels}
    keys |= {f"bias {c}": plain + c * direction for c in (22, 605, 921)}
    keys["values"] = rng.standard_normal(shape)
    return {name: array.astype(np.float16) for name, array in keys.items()}


# ------------------------------------------------------------------ inside an environment


def roundtrip(cache: str, setting: str, keys, values):
    """(decoded keys, decoded values, bytes held) of one cache; keys and values are mlx arrays."""
    import mlx.core as mx

    if cache == "mlx-vlm":
        from mlx_vlm.turboquant import TurboQuantKVCache

        held = TurboQuantKVCache(bits=float(setting))
        held.update_and_fetch(keys, values)
        return *held.dequantize(), held.nbytes
    if cache == "turboquant-mlx-full":
        from turboquant_mlx.layers.polar_kv_cache import TurboQuantKVCache

        bits = {"k4v3": {"k_bits": 4, "v_bits": 3}}.get(setting) or {"tq_bits": int(setting)}
        held = TurboQuantKVCache(**bits)
        return *held.update_and_fetch(keys, values), held.nbytes
    if cache == "mlx-turboquant":
        from mlx_turboquant.kv_cache import TurboQuantKVCache

        held = TurboQuantKVCache(bits=int(setting))
    elif cache == STOCK:
        from mlx_lm.models.cache import KVCache

        held = KVCache().to_quantized(group_size=64, bits=int(setting))
    else:
        import mlx_tq
        from mlx_tq.evaluate import parse_format

        held = mlx_tq.TQKVCache(parse_format(setting).format)
        held.update_and_fetch(keys, values)
        rows = held.rows
        return mlx_tq.decode_keys(rows[0]), mlx_tq.decode_values(rows[1]), held.nbytes
    packed = held.update_and_fetch(keys, values)
    k, v = (mx.dequantize(*x, group_size=64, bits=int(setting)).astype(mx.float32) for x in packed)
    if cache == "mlx-turboquant":  # its keys stay rotated, and the rotation of the query undoes that
        k = k @ held.rotate_query(mx.eye(DIM)[None, None])[0, 0].T
    return k, v, held.nbytes


def work(cache: str, settings: list[str], source: Path, target: Path) -> None:
    """Runs one cache on all cases and writes what it gives back."""
    from importlib.metadata import version

    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    inputs = np.load(source)
    device = f"cpu, {mx.device_info(mx.cpu)['device_name']}"
    out = {"version": np.array(version(cache)), "mlx": np.array(version("mlx")), "device": np.array(device)}
    values = mx.array(inputs["values"])
    for name in inputs.files:
        for setting in settings if name != "values" else ():
            keys, half = mx.array(inputs[name]), TOKENS // 2
            _, _, before = roundtrip(cache, setting, keys[:, :, :half], values[:, :, :half])
            k, v, held = roundtrip(cache, setting, keys, values)
            k, v = (np.array(x.astype(mx.float32)) for x in (k, v))
            parts = {"k": k, "v": v, "bytes": np.array([before, held])}
            out |= {f"{name}|{setting}|{part}": array for part, array in parts.items()}
    np.savez(target, **out)


# ------------------------------------------------------------------ outside


def install(peer: Peer, folder: Path) -> Path:
    """The interpreter of a new environment with the peer in it. Raises RuntimeError with what pip said."""
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    mlx = "mlx" if sys.platform == "darwin" else "mlx[cpu]"
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", peer.requirement, mlx]
    run(command, "pip")
    return python


def run(command: list[str], what: str) -> None:
    """Runs a command. Raises RuntimeError with the last line it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{what} took more than {TIMEOUT} s") from None
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["nothing"]
        raise RuntimeError(f"{what}: {said[-1].strip()[:200]}")


def softmax_log(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Log of the attention weights, float64 `(HEADS, QUERIES, TOKENS)`."""
    scores = q @ keys.astype(np.float64).swapaxes(-1, -2) * DIM**-0.5
    scores -= scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def measure(cache: str, settings, inputs: dict[str, np.ndarray], out) -> list[dict]:
    """Rows of results of one cache."""
    q = np.random.default_rng(SEED + 1).standard_normal((HEADS, QUERIES, DIM))
    rows = []
    for case, keys in inputs.items():
        for setting, width in settings if case != "values" else ():
            k, v, held = (out[f"{case}|{setting}|{part}"] for part in ("k", "v", "bytes"))
            reference, log = softmax_log(q, keys[0]), softmax_log(q, k[0])
            row = {
                "case": case,
                "width": width,
                "cache": cache,
                "version": str(out["version"]),
                "device": str(out["device"]),
                "mlx": str(out["mlx"]),
                "setting": setting,
                "bits": 16 * int(held[1] - held[0]) / (keys.size + v.size),
                "bytes": int(held[1]),
                "key_mse": float(np.mean((k - keys.astype(np.float64)) ** 2)),
                "value_mse": float(np.mean((v - inputs["values"].astype(np.float64)) ** 2)),
                "kl": float(np.mean(np.sum(np.exp(reference) * (reference - log), axis=-1))),
            }
            rows.append(row)
    return rows


def mark_best(rows: list[dict]) -> None:
    """Marks the smallest KL of each case and key width."""
    for case, width in {(row["case"], row["width"]) for row in rows}:
        group = [row for row in rows if (row["case"], row["width"]) == (case, width)]
        best = min(row["kl"] for row in group)
        for row in group:
            row["best"] = "*" if row["kl"] == best else ""


def print_table(rows: list[dict]) -> None:
    layout = "{:20} {:>5} {:20} {:62} {:>6} {:>8} {:>9} {:>9} {:>8} {}"
    names = "case width cache setting bits bytes key_mse value_mse kl best".split()
    print(layout.format(*names))
    for row in rows:
        print(layout.format(*(f"{row[n]:.4f}" if isinstance(row[n], float) else row[n] for n in names)))


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="CSV", help="write the table here")
    parser.add_argument(
        "--only", metavar="NAMES", help=f"peers, separated by commas: {', '.join(p.name for p in PEERS)}"
    )
    parser.add_argument("--envs", type=Path, metavar="FOLDER", help="keep the environments here and use those there")
    parser.add_argument("--work", nargs=4, help=argparse.SUPPRESS)  # cache, settings, source, target: in a peer's venv
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = setup_arg_parser()
    args = parser.parse_args(argv)
    if args.work:
        cache, settings, source, target = args.work
        work(cache, settings.split(";"), Path(source), Path(target))
        return 0
    names = [p.name for p in PEERS] if args.only is None else args.only.split(",")
    if unknown := [n for n in names if n not in [p.name for p in PEERS]]:
        parser.error(f"--only must name peers, got {', '.join(unknown)}")

    inputs, rows, left_out = cases(), [], []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        source, target = folder / "in.npz", folder / "out.npz"
        np.savez(source, **inputs)
        todo = [(OURS, OUR_SETTINGS, None), (STOCK, STOCK_SETTINGS, None)]
        todo += [(p.name, p.settings, p) for p in PEERS if p.name in names]
        for cache, settings, peer in todo:
            print(f"{cache} ...", file=sys.stderr, flush=True)
            try:
                python = Path(sys.executable)
                if peer is not None:
                    home = (args.envs or folder) / peer.name
                    python = home / "bin" / "python" if (home / "done").exists() else install(peer, home)
                    (home / "done").touch()
                arguments = [cache, ";".join(s for s, _ in settings), str(source), str(target)]
                run([str(python), str(Path(__file__).resolve()), "--work", *arguments], cache)
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                left_out.append({"cache": cache, "note": f"left out: {error}"})
                continue
            rows += measure(cache, settings, inputs, np.load(target))
    order = list(inputs)
    rows.sort(key=lambda row: (order.index(row["case"]), -row["width"], row["kl"]))
    mark_best(rows)
    print_table(rows)
    for row in rows:
        if row["best"] and row["cache"] != OURS:
            print(f"{row['case']} keys, {row['width']} bits: {row['cache']} {row['setting']} has the smallest KL")
    for row in left_out:
        print(f"{row['cache']} {row['note']}")
    if args.out is not None:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS, restval="", lineterminator="\n")
            writer.writeheader()
            rounded = [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]
            writer.writerows([*rounded, *left_out])
    return 1 if any(row["cache"] == OURS for row in left_out) else 0


if __name__ == "__main__":
    sys.exit(main())
