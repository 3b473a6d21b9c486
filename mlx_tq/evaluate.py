"""`mlx-tq eval`: what a cache format costs in quality, measured in a model, and the bytes it holds.

Every format decodes token by token (teacher-forced) through the cache a user gets, beside the model's own cache; the
next-token distributions of both are compared. All numbers of one format make one row of the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import __version__
from .doctor import device_name
from .format import TQFormat
from .integrate import leaves, make_prompt_cache
from .loading import add_model_argument, attention_path, load, new_file, positive, write_csv
from .plan import fill, rows_of
from .plots import REFERENCE, plot

MLX_LM = {"mlx-lm-4": 4, "mlx-lm-8": 8}
DEFAULT_FORMATS = (*TQFormat.presets(), *MLX_LM)

_PREFILL = 512  # tokens of a prefill call
_BLOCK = 16  # steps between two waits for results
_GROUP = 4  # formats that share one run of the model's own cache
_SEED = 0  # of random passages and of the needle's code
_COPIES = 3  # times a passage stands in a row: a model that has seen it repeat once repeats it surely
_TRIAL = 64  # tokens of a call that tries whether a format runs on this device
_FACT = " The secret code of the old lighthouse is {code}."
_QUESTION = "\n\nWhat is the secret code of the old lighthouse? The secret code of the old lighthouse is"

TABLE = (
    "format bits_per_element bytes_per_token ppl kl_mean kl_p99 top1 copy_kl copy_top1 needle_found "
    "needle_agreement seconds"
).split()


# ------------------------------------------------------------------ formats


@dataclass(frozen=True)
class CacheFormat:
    """A kind of cache to measure: `format` for ours, `bits` for mlx-lm's quantised one, neither for the model's own."""

    name: str
    format: TQFormat | None = None
    bits: int | None = None

    def describe(self) -> str:
        if self.format is not None:
            return self.format.describe()
        return "the model's own cache" if self.bits is None else f"mlx-lm's quantised cache, {self.bits} bits"

    def caches(self, model) -> list:
        """Caches for one batch; mlx-lm's become quantised ones in `Runner`, after the first call as in mlx-lm."""
        from mlx_lm.models.cache import make_prompt_cache as stock_caches

        return stock_caches(model) if self.format is None else make_prompt_cache(model, self.format)


def group_size(*dims: int) -> int:
    """Group of mlx-lm's quantised cache: 64 as is its default, 32 where a width is no multiple of 64.

    Raises ValueError for a width that is no multiple of 32 either.
    """
    for size in (64, 32):
        if not any(dim % size for dim in dims):
            return size
    raise ValueError(f"mlx-lm's quantised cache needs widths that are multiples of 32, got {dims}")


def parse_format(spec: str) -> CacheFormat:
    """A format from `name`, `name:field=value,...` or `field=value,...` (changes to the default).

    Raises ValueError for unknown names or fields and bad values.
    """
    if spec == REFERENCE:
        return CacheFormat(spec)
    if spec in MLX_LM:
        return CacheFormat(spec, bits=MLX_LM[spec])
    name, colon, changes = spec.partition(":")
    if not colon and "=" in spec:
        name, changes = "default", spec
    known = TQFormat.presets()
    if name not in known:
        raise ValueError(f"format must be one of {', '.join([*known, REFERENCE, *MLX_LM])}, got {name!r}")
    types = {key: type(value) for key, value in known[name].as_dict().items()}
    values = {}
    for change in changes.split(",") if changes else ():
        key, equals, text = change.partition("=")
        if not equals or key not in types:
            raise ValueError(f"{spec!r}: expected field=value with a field of {', '.join(types)}, got {change!r}")
        values[key] = _value(types[key], key, text)
    return CacheFormat(spec, TQFormat.preset(name, **values))


def _value(kind: type, key: str, text: str):
    if kind is bool:
        words = {"true": True, "1": True, "false": False, "0": False}
        if text.lower() not in words:
            raise ValueError(f"{key} must be true or false, got {text!r}")
        return words[text.lower()]
    if kind is int:
        if not text.isdecimal():
            raise ValueError(f"{key} must be a whole number, got {text!r}")
        return int(text)
    return text


def split_specs(arguments: list[str]) -> list[str]:
    """Specs out of arguments that may each hold several, separated by commas.

    A comma also separates the fields of one spec: after `field=value`, another `field=value` belongs to it.
    """
    specs = []
    for argument in arguments:
        continues = False
        for part in filter(None, (p.strip() for p in argument.split(","))):
            is_field = "=" in part and ":" not in part
            if continues and is_field:
                specs[-1] += "," + part
            else:
                specs.append(part)
            continues = "=" in part
    return list(dict.fromkeys(specs))


# ------------------------------------------------------------------ text


def default_text() -> str:
    """Prose that comes with CPython: the long paragraphs of the language reference in `pydoc_data.topics`.

    Differs between Python versions; results carry its sha256. Raises ValueError where it is not installed.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python has no pydoc_data.topics: give a text with --text") from None
    found = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            prose = not paragraph[:1].isspace() and len(paragraph) >= 200 and paragraph.rstrip().endswith(".")
            if prose:
                found[" ".join(paragraph.split())] = None
    return "\n\n".join(found)


def read_text(path: str | None) -> str:
    """The text of a file, or the default one. Raises ValueError with the reason where it cannot be read."""
    if path is None:
        return default_text()
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {path!r} cannot be read: {error}") from None


class Tokens:
    """Token ids of a text for one model: what every sequence starts with, and the stream of the text."""

    def __init__(self, tokenizer, text: str):
        self.start = list(tokenizer.encode(""))
        self._encode = lambda part: list(tokenizer.encode(part, add_special_tokens=False))
        # A paragraph at a time: tokenizers warn of texts beyond the model's context.
        parts = text.split("\n\n")
        self.stream = [t for i, part in enumerate(parts) for t in self._encode(part + "\n\n" * (i + 1 < len(parts)))]
        if not self.stream:
            raise ValueError("the text must not be empty")

    def text_rows(self, batch: int, length: int) -> np.ndarray:
        """Consecutive pieces of the text, `(batch, length)`. Raises ValueError where the text is too short."""
        own = length - len(self.start)
        if batch * own > len(self.stream):
            raise ValueError(
                f"the text must have {batch * own} tokens for these settings, got {len(self.stream)}: "
                "lower --limit, --prefix or --batch, or give a longer --text"
            )
        return np.array([self.start + self.stream[i * own : (i + 1) * own] for i in range(batch)])

    def filler(self, start: int, count: int) -> list[int]:
        """`count` tokens of the text from `start`, beginning again at its end."""
        return [self.stream[(start + i) % len(self.stream)] for i in range(count)]

    def copy_rows(self, rows: int, distance: int, random: bool = False) -> np.ndarray:
        """A passage of `distance` tokens of the text, or of random tokens of it, three times in a row."""
        rng, choices = np.random.default_rng(_SEED), np.unique(self.stream)
        passages = [
            rng.choice(choices, distance).tolist() if random else self.filler(row * distance, distance)
            for row in range(rows)
        ]
        return np.array([self.start + passage * _COPIES for passage in passages])

    def needle_rows(self, length: int, depths: list[float]) -> tuple[np.ndarray, int, int]:
        """(rows, question, answer): filler of `length` tokens in all with a fact at each depth, and what is asked.

        The last `question + answer` tokens of the rows are the question and its answer.
        """
        code = str(np.random.default_rng(_SEED + length).integers(10_000, 100_000))
        fact, answer = self._encode(_FACT.format(code=code)), self._encode(" " + code)
        question = self._encode(_QUESTION)
        room = length - len(self.start) - len(fact) - len(question)
        if room < 1:
            raise ValueError(f"--needle-lengths must leave room for the fact and the question, got {length}")
        filler = self.filler(0, room)
        rows = []
        for depth in depths:
            at = round(depth * room)
            rows.append(self.start + filler[:at] + fact + filler[at:] + question + answer)
        return np.array(rows), len(question), len(answer)


# ------------------------------------------------------------------ running


class _BlasLinear(nn.Linear):
    """A linear layer that multiplies with NumPy's BLAS."""

    def __call__(self, x):
        y = _blas(x, self.weight)
        return y + self.bias if "bias" in self else y


class _BlasEmbedding(nn.Embedding):
    """An embedding whose use as output layer multiplies with NumPy's BLAS."""

    def as_linear(self, x):
        # The logits of a prefill are never looked at: left to MLX, they are never computed.
        return _blas(x, self.weight) if x.shape[-2] == 1 else super().as_linear(x)


def _blas(x: mx.array, weight: mx.array) -> mx.array:
    rows = np.array(x.reshape(-1, x.shape[-1]), copy=False)
    return mx.array(rows @ np.array(weight, copy=False).T).reshape(*x.shape[:-1], -1)


def prepare(model):
    """The model as it runs here: as it is on a GPU, in float32 on a CPU.

    MLX multiplies half-precision matrices slowly on CPUs, and its Linux build all others too: there the matrix
    products are NumPy's.
    """
    if mx.default_device() != mx.Device(mx.cpu):
        return model
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    if sys.platform == "linux":
        for _, module in model.named_modules():
            module.__class__ = {nn.Linear: _BlasLinear, nn.Embedding: _BlasEmbedding}.get(type(module), type(module))
    return model


class Runner:
    """Runs a batch of sequences through the caches of one format and counts the seconds."""

    def __init__(self, model, format: CacheFormat, group: int = 64):
        self.model, self.format, self.group = model, format, group
        self.caches = format.caches(model)
        self.seconds = 0.0

    def _call(self, tokens: mx.array) -> mx.array:
        from mlx_lm.generate import maybe_quantize_kv_cache

        logits = self.model(tokens, cache=self.caches)
        maybe_quantize_kv_cache(self.caches, 0, self.group, self.format.bits)
        return logits

    def prefill(self, tokens: mx.array, bar) -> None:
        """Feeds tokens `(B, L)` in large pieces."""
        started = perf_counter()
        for start in range(0, tokens.shape[1], _PREFILL):
            self._call(tokens[:, start : start + _PREFILL])
            mx.eval([c.state for c in self.caches])
            mx.clear_cache()
            bar.update(_bar_units(tokens[:, start : start + _PREFILL].shape[1]))
        self.seconds += perf_counter() - started

    def step(self, tokens: mx.array) -> mx.array:
        """Log-probabilities `(B, vocabulary)`, float32, behind one more token `(B, 1)`."""
        return log_softmax(self._call(tokens)[:, -1])

    def missing(self, rows: int) -> str | None:
        """Why this device cannot run the format over `rows` sequences, or None. Also compiles what it runs."""
        tokens = mx.zeros((rows, _TRIAL), mx.int32)
        try:
            for call in (tokens, tokens, tokens[:, :1]):
                mx.eval(self._call(call))
        except RuntimeError as error:  # what MLX raises where a backend has no such operation
            return str(error)
        return None


def _bar_units(prefill: int) -> int:
    """Decode steps that a prefill of so many tokens counts as in progress bars."""
    return -(-prefill // 16)


def log_softmax(logits: mx.array) -> mx.array:
    """Log-probabilities over the last axis, float32."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


@dataclass
class Predictions:
    """What was measured at each prediction, arrays `(B, steps)`; `_ref` is the model's own cache.

    Attributes:
        kl: KL(ref || format) of the next-token distributions, nats.
        nll, nll_ref: -log p of the token that follows, nats.
        same: the likeliest token is the reference's.
        hit, hit_ref: the likeliest token is the one that follows.
    """

    kl: np.ndarray
    nll: np.ndarray
    nll_ref: np.ndarray
    same: np.ndarray
    hit: np.ndarray
    hit_ref: np.ndarray


def measures(reference: mx.array, other: mx.array, target: mx.array) -> list[mx.array]:
    """The fields of Predictions for log-probabilities `(B, vocabulary)` and following tokens `(B,)`."""
    nll, nll_ref = (-mx.take_along_axis(x, target[:, None], axis=-1)[:, 0] for x in (other, reference))
    best, best_ref = mx.argmax(other, axis=-1), mx.argmax(reference, axis=-1)
    weight = mx.exp(reference)
    kl = mx.sum(mx.where(weight > 0, weight * (reference - other), 0), axis=-1)
    return [kl, nll, nll_ref, best == best_ref, best == target, best_ref == target]


def compare(reference: Runner, others: list[Runner], ids: np.ndarray, prefix: int, bar) -> list[Predictions]:
    """Prefills the first `prefix` columns of ids `(B, T)`, feeds the others one by one, all but the last.

    Returns one Predictions with T - prefix - 1 steps for each of `others`; their `seconds` grow.
    """
    tokens = mx.array(ids.astype(np.int32))
    runners = [reference, *others]
    for runner in runners:
        runner.prefill(tokens[:, :prefix], bar)
    found = [[] for _ in others]
    for start in range(prefix, ids.shape[1] - 1, _BLOCK):
        block = range(start, min(start + _BLOCK, ids.shape[1] - 1))
        wanted = []
        for runner in runners:
            started, out = perf_counter(), []
            for i, t in enumerate(block):
                step = runner.step(tokens[:, t : t + 1])
                if runner is reference:
                    wanted.append(step)
                else:
                    step = mx.stack([x.astype(mx.float32) for x in measures(wanted[i], step, tokens[:, t + 1])])
                    out.append(step)
                mx.async_eval(step)
                bar.update()
            mx.eval(wanted if runner is reference else out)
            if runner is not reference:
                found[others.index(runner)] += [np.array(x) for x in out]
            runner.seconds += perf_counter() - started
    return [Predictions(*np.stack(steps, axis=-1).astype(np.float64)) for steps in found]


# ------------------------------------------------------------------ bytes


def cached_rows(model) -> list[tuple | None]:
    """`rows_of` each cache of a model, those in lists too, after one token; None for what is no plain KV cache.

    Raises ValueError where the model has no plain one.
    """
    from mlx_lm.models.cache import KVCache

    caches = CacheFormat(REFERENCE).caches(model)
    mx.eval(model(mx.array([[0]]), cache=caches))
    rows = [rows_of(cache) if type(cache) is KVCache else None for cache in leaves(caches)]
    if not any(rows):
        raise ValueError("the model has no plain KV cache to compress")
    return rows


def bytes_per_token(format: CacheFormat, model, rows: list[tuple | None], group: int = 64) -> float:
    """Bytes that one more token takes in all plain KV caches: `nbytes` at two lengths, where all capacity is in use.

    rows: what `cached_rows` says of the model.
    """
    from mlx_lm.generate import maybe_quantize_kv_cache

    exact = format.format.sinks + format.format.window + format.format.page if format.format is not None else 0
    short = -(-exact // 256) * 256 + 256

    def held(length: int) -> int:
        caches = format.caches(model)
        maybe_quantize_kv_cache(caches, 0, group, format.bits)
        return sum(fill(cache, own, length, 1)[0] for cache, own in zip(leaves(caches), rows, strict=True) if own)

    return (held(short + 512) - held(short)) / 512


# ------------------------------------------------------------------ the tests


@dataclass
class Evaluation:
    """The tests on one model: sequences are built once, `run` measures formats on them."""

    model: object
    tokens: Tokens
    rows: list
    args: argparse.Namespace

    def __post_init__(self):
        args = self.args
        steps = -(-args.limit // args.batch)
        self.plan = [("text", self.tokens.text_rows(args.batch, args.prefix + steps + 1), args.prefix)]
        if args.copy:
            ids = self.tokens.copy_rows(args.copy_rows, args.copy_distance, args.copy_random)
            self.plan.append(("copy", ids, ids.shape[1] - args.copy_distance))
        self.answers = {}
        for length in args.needle_lengths if args.needle else ():
            ids, question, answer = self.tokens.needle_rows(length, args.needle_depths)
            self.plan.append((length, ids, ids.shape[1] - question - answer))
            self.answers[length] = answer

    def units(self, formats: int) -> int:
        """Progress-bar units of a group of formats."""
        one = sum(_bar_units(prefix) + ids.shape[1] - 1 - prefix for _, ids, prefix in self.plan)
        return one * (formats + 1)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(1, n_kv_heads, D) of the keys and of the values of every plain KV cache."""
        return [shape for own in self.rows if own for shape in own[:2]]

    def runner(self, format: CacheFormat) -> Runner:
        """A runner with empty caches. Raises ValueError for a format that does not go with the model."""
        return Runner(self.model, format, group_size(*(dim for *_, dim in self.shapes)) if format.bits else 64)

    def missing(self, format: CacheFormat) -> str | None:
        """Why this device or model cannot run a format, or None."""
        try:
            return self.runner(format).missing(self.args.batch)
        except ValueError as error:
            return str(error)

    def run(self, formats: list[CacheFormat], bar) -> list[dict]:
        """One result for each format."""
        rows = [{"seconds": 0.0, "needle": []} for _ in formats]
        for name, ids, prefix in self.plan:
            reference = self.runner(CacheFormat(REFERENCE))
            runners = [self.runner(format) for format in formats]
            for row, runner, p in zip(rows, runners, compare(reference, runners, ids, prefix, bar), strict=True):
                row["seconds"] += runner.seconds
                if name == "text":
                    row |= text_results(p) | {"path": attention_path(runner.caches)}
                elif name == "copy":
                    row |= copy_results(p)
                else:
                    row["needle"] += needle_results(p, name, self.args.needle_depths, self.answers[name])
        for row, format in zip(rows, formats, strict=True):
            row["bytes_per_token"] = bytes_per_token(format, self.model, self.rows, self.runner(format).group)
            row["bits_per_element"] = 8 * row["bytes_per_token"] / sum(heads * dim for _, heads, dim in self.shapes)
            for key in ("found", "found_ref", "agreement", "logprob", "logprob_ref"):
                cells = [cell[key] for cell in row["needle"]]
                row[f"needle_{key}"] = float(np.mean(cells)) if cells else None
        return rows


def text_results(p: Predictions) -> dict:
    """Perplexities, KL (mean and 99th percentile, nats) and agreement of the likeliest token."""
    return {
        "tokens": int(p.kl.size),
        "ppl": float(np.exp(p.nll.mean())),
        "ppl_ref": float(np.exp(p.nll_ref.mean())),
        "kl_mean": float(p.kl.mean()),
        "kl_p99": float(np.percentile(p.kl, 99)),
        "top1": float(p.same.mean()),
    }


def copy_results(p: Predictions) -> dict:
    """The same over the last copy of a passage, and how often each cache's likeliest token is the right one."""
    return {
        "copy_kl": float(p.kl.mean()),
        "copy_top1": float(p.same.mean()),
        "copy_right": float(p.hit.mean()),
        "copy_right_ref": float(p.hit_ref.mean()),
        "copy_tokens": int(p.kl.size),
    }


def needle_results(p: Predictions, length: int, depths: list[float], answer: int) -> list[dict]:
    """One cell for each depth: whether all tokens of the answer are the likeliest ones, their mean log-probability
    (nats) and the share of them where the likeliest token is that of the model's own cache."""
    return [
        {
            "length": length,
            "depth": depth,
            "found": bool(p.hit[i, -answer:].all()),
            "found_ref": bool(p.hit_ref[i, -answer:].all()),
            "logprob": float(-p.nll[i, -answer:].mean()),
            "logprob_ref": float(-p.nll_ref[i, -answer:].mean()),
            "agreement": float(p.same[i, -answer:].mean()),
        }
        for i, depth in enumerate(depths)
    ]


# ------------------------------------------------------------------ results


def settings_hash(settings: dict, format: CacheFormat) -> str:
    """Names everything that decides a row's numbers, but for the device and the versions of others."""
    everything = settings | {"bits": format.bits, "format": format.format and format.format.as_dict()}
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:16]


def read_rows(path: Path | None) -> list[dict]:
    """The rows in a results file. Raises ValueError where it holds something else."""
    if path is None or not path.exists():
        return []
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not all("settings" in row and "format" in row for row in rows):
            raise ValueError("a row has no format or settings")
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"--out {str(path)!r} exists and holds no results of this command: {error}") from None
    return rows


def measured(row: dict) -> bool:
    """Whether a row has numbers, rather than the reason why its format was skipped."""
    return "skipped" not in row


def write_rows(path: Path | None, rows: list[dict]) -> None:
    """Replaces a results file, never leaving half of one.

    Of a format with numbers, from whatever device, no row that says it was skipped is kept.
    """
    if path is not None:
        has = {(row["format"], row["model"]) for row in rows if measured(row)}
        rows = [row for row in rows if measured(row) or (row["format"], row["model"]) not in has]
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)


def _cell(name: str, value) -> str:
    if value is None:
        return "-"
    if name in ("top1", "copy_top1", "needle_found", "needle_agreement"):
        return f"{value:.2%}"
    if name in ("kl_mean", "kl_p99", "copy_kl"):
        return f"{value:.5f}"
    return value if isinstance(value, str) else f"{value:.{3 if name in ('ppl', 'bits_per_element') else 0}f}"


def table(rows: list[dict]) -> str:
    """The results as aligned text."""
    cells = [TABLE] + [[_cell(name, row.get(name)) for name in TABLE] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = [c.rjust(w) for c, w in zip(line, widths, strict=True)]
        lines.append("  ".join([line[0].ljust(widths[0]), *padded[1:]]))
    return "\n".join(lines)


# ------------------------------------------------------------------ the command


def numbers(kind, low, high, what: str):
    """An argparse type: numbers separated by commas, each in [low, high]."""

    def parse(text: str) -> list:
        try:
            values = [kind(part) for part in text.split(",")]
            if all(low <= value <= high for value in values):
                return values
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"must be {what}, separated by commas, got {text!r}")

    return parse


def setup_arg_parser() -> argparse.ArgumentParser:
    presets = ", ".join(TQFormat.presets())
    parser = argparse.ArgumentParser(
        prog="mlx-tq eval",
        description="Measures cache formats on a model: perplexity, KL and agreement with the model's own cache, "
        "copying, a needle in a haystack, and bytes.",
        epilog=f"A format is {REFERENCE} (the model's own cache), {', '.join(MLX_LM)} (mlx-lm's quantised cache), a "
        f"preset ({presets}), or a preset with changes, name:field=value,field=value; without name: the default is "
        "changed. Fields are those of TQFormat, for example k4v4:sinks=4 or key_bits=3,value_bits=2,window=128.",
    )
    add_model_argument(parser)
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="a UTF-8 text (default: prose of the language reference that comes with Python; depends on its version)",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        default=list(DEFAULT_FORMATS),
        metavar="FORMAT",
        help=f"formats, separated by commas or spaces (default: {','.join(DEFAULT_FORMATS)})",
    )
    tests = parser.add_argument_group("tests")
    tests.add_argument(
        "--limit", type=positive, metavar="N", default=3072, help="predictions on the text (default: %(default)s)"
    )
    tests.add_argument(
        "--prefix", type=positive, metavar="N", default=512, help="tokens before the first (default: %(default)s)"
    )
    tests.add_argument(
        "--batch", type=positive, metavar="N", default=4, help="pieces of the text at a time (default: %(default)s)"
    )
    tests.add_argument("--no-copy", dest="copy", action="store_false", help="leave the copy test out")
    tests.add_argument(
        "--copy-distance",
        type=positive,
        metavar="N",
        default=512,
        help="tokens of a passage, which comes three times in a row; the third is measured (default: %(default)s)",
    )
    tests.add_argument("--copy-rows", type=positive, metavar="N", default=4, help="passages (default: %(default)s)")
    tests.add_argument(
        "--copy-random", action="store_true", help="copy random tokens of the text, not a passage of it: harder"
    )
    tests.add_argument("--no-needle", dest="needle", action="store_false", help="leave the needle test out")
    tests.add_argument(
        "--needle-lengths",
        type=numbers(int, 1, 1 << 24, "whole numbers of at least 1"),
        default=[512, 1024, 2048],
        metavar="N,N",
        help="tokens up to the answer (default: 512,1024,2048)",
    )
    tests.add_argument(
        "--needle-depths",
        type=numbers(float, 0, 1, "numbers from 0 to 1"),
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        metavar="X,X",
        help="where in the text the fact is, 0 its start (default: 0,0.25,0.5,0.75,1)",
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--out", type=new_file, metavar="JSON", help="results: rows are added, those with the same settings replaced"
    )
    files.add_argument("--resume", action="store_true", help="do not run what --out has with the same settings")
    files.add_argument("--csv", type=new_file, metavar="CSV", help="the rows of this run's formats as a table")
    files.add_argument("--plot", type=Path, metavar="FOLDER", help="writes kl.png and needle.png")
    return parser


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[CacheFormat]:
    """The formats of the command line; exits with a message where arguments do not go together."""
    try:
        formats = [parse_format(spec) for spec in split_specs(args.formats)]
    except ValueError as error:
        parser.error(f"--formats: {error}")
    if not formats:
        parser.error("--formats must name a format")
    if args.copy and args.copy_distance < 2:
        parser.error(f"--copy-distance must be at least 2, got {args.copy_distance}")
    if args.resume and args.out is None:
        parser.error("--resume needs --out")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install "mlx-tq[bench]"')
    return formats


def settings_of(args: argparse.Namespace, text: str) -> dict:
    """What decides the numbers besides the format; goes into every row."""
    folder = Path(args.model).expanduser()
    return {
        "model": folder.resolve().name if folder.is_dir() else args.model,
        "text": "pydoc_data.topics" if args.text is None else Path(args.text).name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "prefix": args.prefix,
        "batch": args.batch,
        "limit": args.limit,
        "copy": [args.copy_rows, args.copy_distance, args.copy_random] if args.copy else None,
        "needle_grid": [args.needle_lengths, args.needle_depths] if args.needle else None,
        "computed_in": "float32" if mx.default_device() == mx.Device(mx.cpu) else "as stored",
        "mlx_tq": __version__,
    }


def evaluate(args: argparse.Namespace, formats: list[CacheFormat], model=None, tokenizer=None) -> list[dict]:
    """One row for each format, in their order, written to `args.out` a group at a time.

    A format that this device cannot run has the reason under "skipped" and no numbers; it is tried again next time.
    Raises ValueError for texts, files and models that do not go with the settings.
    """
    from tqdm import tqdm

    text = read_text(args.text)
    settings = settings_of(args, text)
    hashes = {settings_hash(settings, format): format for format in formats}
    kept = read_rows(args.out)
    done = {row["settings"]: row for row in kept if row["settings"] in hashes and measured(row)} if args.resume else {}
    kept = [row for row in kept if row["settings"] not in hashes or row["settings"] in done]
    pending = [key for key in hashes if key not in done]
    if done:
        print(f"{len(done)} of {len(hashes)} formats are in {args.out} already", file=sys.stderr)
    if pending:
        if model is None:
            model, tokenizer = load(args.model)
        cached = cached_rows(model)  # before `prepare`, which may change the dtype
        evaluation = Evaluation(prepare(model), Tokens(tokenizer, text), cached, args)
        about = settings | {
            "device": device_name(),
            "dtype": ", ".join(sorted({str(own[2]).rpartition(".")[2] for own in cached if own})),
            "mlx": version("mlx"),
            "mlx_lm": version("mlx-lm"),
            "python": sys.version.split()[0],
        }

        def add(key: str, result: dict) -> None:
            named = {"format": hashes[key].name, "about": hashes[key].describe()}
            done[key] = named | result | about | {"settings": key}
            kept.append(done[key])

        for key in list(pending):
            if (reason := evaluation.missing(hashes[key])) is not None:
                add(key, {"skipped": reason})
                pending.remove(key)
        write_rows(args.out, kept)
        interval = 0.5 if sys.stderr.isatty() else 30  # seconds between two states of the bar: few in log files
        groups = [pending[i : i + _GROUP] for i in range(0, len(pending), _GROUP)]
        with tqdm(
            total=sum(evaluation.units(len(g)) for g in groups), unit="step", file=sys.stderr, mininterval=interval
        ) as bar:
            for group in groups:
                bar.set_description(" ".join(hashes[key].name for key in group))
                results = evaluation.run([hashes[key] for key in group], bar)
                for key, result in zip(group, results, strict=True):
                    add(key, result)
                write_rows(args.out, kept)
    return [done[key] | {"format": format.name} for key, format in hashes.items()]


def main(argv: list[str] | None = None) -> int:
    parser = setup_arg_parser()
    args = parser.parse_args(argv)
    rows = evaluate(args, _check(parser, args))
    if args.csv is not None:
        write_csv(args.csv, rows)
    print(table(rows))
    for row in rows:
        if not measured(row):
            print(f"{row['format']} was skipped on {row['device']}: {row['skipped']}", file=sys.stderr)
    rows = [row for row in rows if measured(row)]
    if rows:
        first = rows[0]
        print(f"{first['model']}, perplexity over its own cache {first['ppl_ref']:.3f}, {first['tokens']} predictions")
    if rows and args.plot is not None:
        for path in plot(rows, args.plot):
            print(f"wrote {path}")
    return 0 if rows else 1
