"""`mlx-tq plan`: how many tokens of one sequence fit in memory over each kind of cache.

The model is built from its config and no weight is read. Tokens that are never evaluated show what keys and values
every cache gets; then each kind of cache is filled with zeros that are never evaluated either, and asked for its
`nbytes`. So spare capacity, exact rows, bounded windows and layers that are left as they are count as they do in use.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from .format import TQFormat
from .integrate import leaves, make_prompt_cache
from .loading import ModelError, add_model_argument, model_path, positive

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)B?")
_DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
_STEPS, _STEP = 128, 256  # at most so many steps of filling, of at least so many tokens
_LONGEST = 1 << 17  # tokens, where the config names no context length
_GROUP_SIZE = 64  # of mlx-lm's quantised cache, as its --kv-group-size has it


def size(text: str) -> int:
    """An argparse type: bytes, as in 16GB (10**9 each), 16GiB (2**30 each) or 500M."""
    match = _SIZE.fullmatch(text.strip().upper())
    if not match or (match[3] and not match[2]) or not (number := float(match[1])):
        raise argparse.ArgumentTypeError(f"must be a size such as 16GB or 512MiB, got {text!r}")
    return int(number * (1024 if match[3] else 1000) ** "BKMGT".find(match[2]))


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx-tq plan", description="How many tokens fit in memory over each cache.")
    add_model_argument(parser)
    parser.add_argument(
        "--memory",
        type=size,
        help="for weights and cache, such as 16GB (default: what the GPU may use, or all there is)",
    )
    parser.add_argument("--weights", type=size, help="of the model (default: the size of its safetensors files)")
    parser.add_argument("--tokens", type=positive, help="show bytes for so many (default: the context length)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code, if it has some")
    return parser


# ------------------------------------------------------------------ the model


def config_folder(name: str) -> Path:
    """Folder with a model's config; of a hub's model nothing else is downloaded."""
    from mlx_lm.utils import _download

    path = model_path(name)
    try:
        return _download(path, allow_patterns=["*.json", "*.py"])
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r} cannot be read: {error}") from error


def context_length(config: dict) -> int | None:
    """Tokens the model was made for, where its config says."""
    for part in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "max_seq_len", "n_positions", "model_max_length"):
            if isinstance(part.get(key), int):
                return part[key]
    return None


def weight_bytes(folder: Path) -> int | None:
    """Bytes of a model's safetensors files, or those their index names where files are missing; None without both."""
    files = {path.name: path.stat().st_size for path in folder.glob("model*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        if not files.keys() >= set(content["weight_map"].values()):
            total = (content.get("metadata") or {}).get("total_size")
            return None if total is None else int(total)
    return sum(files.values()) or None


def build(folder: Path, trust_remote_code: bool = False):
    """The model and its config, no weight read: in the dtype of its files, or without them that of the config."""
    from mlx_lm.utils import load_model

    model, config = load_model(folder, lazy=True, strict=False, trust_remote_code=trust_remote_code)
    if not list(folder.glob("model*.safetensors")):
        text = config.get("text_config") or {}
        named = next((c[k] for c in (config, text) for k in ("torch_dtype", "dtype") if c.get(k)), "bfloat16")
        model.set_dtype(_DTYPES.get(named, mx.bfloat16))
    return model, config


# ------------------------------------------------------------------ caches


def tried(model) -> list:
    """The model's own caches after tokens that are never evaluated.

    Raises ValueError where one grows that does not hold keys and values.
    """
    from mlx_lm.models.cache import make_prompt_cache as stock_cache

    caches, before = stock_cache(model), None
    for _ in range(2):
        model(mx.zeros((1, _STEP), mx.int32), cache=caches)
        others = [cache for cache in leaves(caches) if rows_of(cache) is None]
        now = [cache.nbytes for cache in others]
        if before is not None and now != before:
            raise ValueError(f"its {type(others[0]).__name__} grows with the context, and not by keys and values")
        before = now
    return caches


def rows_of(cache) -> tuple[tuple, tuple, mx.Dtype] | None:
    """Shapes of a token's keys and values in a cache, and their dtype; None where it holds something else."""
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
        return None
    return (1, keys.shape[1], keys.shape[3]), (1, values.shape[1], values.shape[3]), keys.dtype


def kinds(model) -> dict:
    """Name of every kind of cache, and a function that makes empty ones for the model.

    That of a kind the model cannot use raises what the model raises.
    """
    from mlx_lm.generate import maybe_quantize_kv_cache
    from mlx_lm.models.cache import make_prompt_cache as stock_cache

    def quantised(bits: int) -> list:
        used, unused = stock_cache(model), stock_cache(model)
        for caches in (used, unused):
            maybe_quantize_kv_cache(caches, 0, _GROUP_SIZE, bits)
        model(mx.zeros((1, 1), mx.int32), cache=used)
        return unused

    out = {"mlx-lm": lambda: stock_cache(model)}
    out |= {f"mlx-lm {bits}-bit": partial(quantised, bits) for bits in (8, 4)}
    return out | {name: partial(make_prompt_cache, model, name, fused="never") for name in TQFormat.presets()}


def fill(cache, rows: tuple[tuple, tuple, mx.Dtype], step: int, steps: int) -> list[int]:
    """`nbytes` of a cache after each of `steps` appends of `step` zeros that are never evaluated."""
    (batch, heads, dim), (_, value_heads, value_dim), dtype = rows
    out = []
    for _ in range(steps):
        if hasattr(cache, "maybe_trim_front"):  # a ChunkedKVCache, which its model trims
            cache.maybe_trim_front()
        cache.update_and_fetch(
            mx.zeros((batch, heads, step, dim), dtype), mx.zeros((batch, value_heads, step, value_dim), dtype)
        )
        out.append(cache.nbytes)
    return out


def curve(caches: list, held: list, step: int, steps: int) -> np.ndarray:
    """Bytes of all caches after each of `steps` steps; `held` are those of `tried`."""
    groups, examples, constant = Counter(), {}, 0
    for cache, own in zip(leaves(caches), leaves(held), strict=True):
        rows = rows_of(own)
        if rows is None:
            constant += own.nbytes
            continue
        settings = {k: v for k, v in vars(own).items() if isinstance(v, int)}  # max_size and the like
        key = (type(cache), *rows, *settings.items())
        groups[key] += 1
        examples[key] = cache, rows
    out = np.full(steps, constant, np.int64)
    for key, count in groups.items():
        out += count * np.array(fill(*examples[key], step, steps), np.int64)
    return out


# ------------------------------------------------------------------ the command


def machine_memory() -> int:
    """Bytes the GPU may use, or else those of the machine."""
    info = mx.device_info() if mx.default_device() != mx.Device(mx.cpu) else {}
    for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
        if info.get(key):
            return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def fitting(sizes: np.ndarray, memory: int, step: int) -> int:
    """Tokens after the last step before the first whose bytes do not fit."""
    over = np.flatnonzero(sizes > memory)
    return step * int(over[0] if len(over) else len(sizes))


def table(model, memory: int, tokens: int, longest: int) -> list[str]:
    """Lines for `memory` bytes of caches: bytes of a sequence of so many tokens, and how much fits."""
    most = max(longest, tokens)
    step = -(-most // _STEPS // _STEP) * _STEP
    steps = -(-most // step)
    held, first = tried(model), None
    lines = [f"{'cache':14}{f'at {tokens:,} tokens':>20}{'':8}{'such sequences':>16}{'longest sequence':>18}"]
    for name, make in kinds(model).items():
        try:
            sizes = curve(make(), held, step, steps)
        except Exception as error:  # whatever the model raises that is handed such a cache
            lines.append(f"{name:14}  not for this model: {str(error).splitlines()[0].partition('. ')[0]}")
            continue
        used = int(sizes[-(-tokens // step) - 1])
        first = first or used
        fits = min(fitting(sizes, memory, step), longest)
        length = f"{fits:,}" + " (all)" * (fits == longest)
        lines.append(f"{name:14}{used / 1e9:17.3f} GB{used / first:8.1%}{memory // used:16,}{length:>18}")
    about = (
        f"Bytes count spare room, up to a quarter of the packed rows; worked out every {step:,} tokens. What a prompt's"
        " activations take comes on top."
    )
    return [*lines, "", about]


def main(argv: list[str] | None = None) -> int:
    parser = setup_arg_parser()
    args = parser.parse_args(argv)
    folder = config_folder(args.model)
    try:
        weights = args.weights or weight_bytes(folder)
    except Exception as error:  # an index that is not one ends in errors of many kinds
        raise ModelError(f"model {args.model!r} has no readable index: {type(error).__name__}: {error}") from error
    if weights is None:
        parser.error(f"--weights must be given: {args.model} has no safetensors files here")
    memory = args.memory or machine_memory()
    if weights >= memory:
        parser.error(f"--memory must be more than the weights, {weights / 1e9:.2f} GB, got {memory / 1e9:.2f} GB")
    try:
        model, config = build(folder, args.trust_remote_code)
        longest = context_length(config) or max(_LONGEST, args.tokens or 0)
        lines = table(model, memory - weights, args.tokens or longest, longest)
    except Exception as error:  # a config that is not a language model's ends in errors of any kind
        raise ModelError(f"model {args.model!r} cannot be planned for: {type(error).__name__}: {error}") from error
    print(f"{args.model}: weights {weights / 1e9:.2f} GB, context length {longest:,} tokens")
    print(f"memory {memory / 1e9:.2f} GB, so {(memory - weights) / 1e9:.2f} GB for caches\n")
    print("\n".join(lines))
    return 0
