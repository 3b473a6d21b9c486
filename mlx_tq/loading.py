"""What the commands share: their common arguments, and models by name."""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_reduce

from . import smollm2
from .attention import explain
from .cache import TQKVCache
from .format import TQFormat
from .integrate import leaves

DEMO_MODEL = "smollm2"
MODEL_HELP = "a model folder, a hub id such as owner/name, or smollm2, fetched without a hub"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelError(ValueError):
    """A name that stands for no model; the message says what it must be."""


def positive(text: str) -> int:
    """An argparse type: whole numbers from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """An argparse type: a number of seconds, 0 included."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return number


def new_file(text: str) -> Path:
    """An argparse type: a file that can be written, as far as its folder exists."""
    path = Path(text)
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be in a folder that exists, got {text!r}")
    return path


def format_name(text: str) -> str:
    """An argparse type: the name of a preset."""
    try:
        TQFormat.preset(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO_MODEL, help=f"{MODEL_HELP} (default: %(default)s)")


def add_format_argument(parser, **options) -> None:
    """Adds `--tq-format` to a parser or a group of one."""
    help = "one of those `mlx-tq formats` lists (default: default)"
    parser.add_argument("--tq-format", type=format_name, metavar="NAME", **{"help": help} | options)


def model_path(name: str) -> str:
    """The folder or hub id that a model's name stands for; the demo model is fetched.

    Raises ModelError, or FetchError for the demo model.
    """
    if name == DEMO_MODEL:
        return str(smollm2.fetch())
    path = Path(name).expanduser()
    if path.exists():
        if not (path / "config.json").is_file():
            raise ModelError(f"model must be a folder with a config.json, got {name!r}, which has none")
        return str(path)
    if name.startswith(("~", ".", "/")) or name.count("/") > 1:
        raise ModelError(f"model must be a folder that exists, got {name!r}: no such folder")
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"model must be {MODEL_HELP}, got {name!r}")
    return name


def _nbytes(model) -> int:
    """Of all parameters."""
    return tree_reduce(lambda total, array: total + array.nbytes, model.parameters(), 0)


def unpack_on_cpu(model) -> None:
    """Unpacks quantised weights in place where MLX runs on a CPU, which multiplies them so slowly that a token of even
    a small model takes seconds. Says so on stderr.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return
    from mlx_lm.utils import dequantize_model

    before = _nbytes(model)
    dequantize_model(model)
    mx.eval(model.parameters())
    if (after := _nbytes(model)) != before:
        print(
            f"no GPU: quantised weights are unpacked, which is faster on a CPU and takes {after / 1e9:.2f} GB "
            f"instead of {before / 1e9:.2f} GB",
            file=sys.stderr,
        )


def load(name: str, *args, loader=None, **options):
    """Model and tokenizer for a `--model`, or what another loader of mlx-lm gives.

    Raises ModelError where it names none or cannot be loaded, or FetchError for the demo model.
    """
    import mlx_lm

    path = model_path(name)
    try:
        loaded = (loader or mlx_lm.load)(path, *args, **options)
    except Exception as error:  # a folder that is incomplete ends in errors of any kind
        raise ModelError(f"model {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    unpack_on_cpu(loaded[0])
    return loaded


def attention_path(caches: list) -> str:
    """Which path attention took over the compressed caches among these, which hold tokens."""
    paths = {explain(cache) for cache in leaves(caches) if isinstance(cache, TQKVCache)}
    return "; ".join(sorted(paths)) or "mlx-lm's own"


def write_csv(path: Path, rows: list[dict]) -> None:
    """Rows as a table, with every field of any row; lists and dicts are left out."""
    names = dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list | dict))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(names), extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
