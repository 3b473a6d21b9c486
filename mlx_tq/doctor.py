"""`mlx-tq doctor`: what this machine runs, whether the kernels are right on it, and how long they take."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from time import perf_counter

import mlx.core as mx

from . import kernels
from .attention import attention, explain
from .cache import TQKVCache

_CASE = {"n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "cached": 4096}
_CALLS, _ROUNDS = 10, 7


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx-tq doctor", description=__doc__)
    parser.add_argument("--no-timings", action="store_true", help="skip the timings")
    return parser


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def versions() -> str:
    """Those of this package, MLX and mlx-lm."""
    return ", ".join(f"{name} {_version(name)}" for name in ("mlx-tq", "mlx", "mlx-lm"))


def device_name() -> str:
    """The default device and what it calls itself."""
    device = mx.default_device()
    try:
        info = mx.device_info(device)
    except (AttributeError, RuntimeError):
        info = {}
    return f"{device.type.name}, {info.get('device_name') or info.get('architecture') or platform.processor()}"


def time_calls(call) -> float:
    """Median milliseconds of one call, many calls to an evaluation."""
    mx.eval(call())
    times = []
    for _ in range(_ROUNDS):
        start = perf_counter()
        mx.eval([call() for _ in range(_CALLS)])
        times.append((perf_counter() - start) / _CALLS * 1e3)
    return median(times)


def _timings() -> None:
    shape = (1, _CASE["n_kv_heads"], _CASE["cached"], _CASE["head_dim"])
    keys, values = mx.random.normal(shape).astype(mx.float16), mx.random.normal(shape).astype(mx.float16)
    q = mx.random.normal((1, _CASE["n_heads"], 1, _CASE["head_dim"])).astype(mx.float16)
    cache = TQKVCache()
    cache.update_and_fetch(keys, values)
    mx.eval(q, keys, values, cache.state)
    scale = _CASE["head_dim"] ** -0.5
    mine = time_calls(lambda: attention(q, *cache.rows, scale=scale))
    stock = time_calls(lambda: mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale))
    print(f"one query, {', '.join(f'{k} {v}' for k, v in _CASE.items())}:")
    print(f"  compressed cache   {mine:8.3f} ms   {cache.nbytes / 2**20:6.1f} MiB   {explain(cache)}")
    print(f"  float16 cache      {stock:8.3f} ms   {(keys.nbytes + values.nbytes) / 2**20:6.1f} MiB")


def main(argv: list[str] | None = None) -> int:
    args = setup_arg_parser().parse_args(argv)
    print(f"{versions()}, Python {platform.python_version()}")
    print(f"{platform.platform()}, device: {device_name()}")
    device, healthy = kernels.backend(), True
    if device is None:
        print(f"kernels: not used, {kernels.reason(128, 128)}")
    else:
        test = kernels.self_test(device)
        healthy = test.problem is None
        codes = "as float16 denormals" if test.denormal else "as integers"
        units = "" if test.mma else "; without matrix units, which failed it"
        print(
            f"kernels ({device}): self test passed, largest relative error {test.error:.1e}, codes read {codes}{units}"
            if healthy
            else f"kernels ({device}): not used, {test.problem}"
        )
    if not args.no_timings:
        _timings()
    return 0 if healthy else 1
