"""`mlx-tq bench`: speed and memory of a model over its own cache and over compressed ones.

Prompts are random tokens and generation never stops early, as in mlx_lm.benchmark. Every trial runs all caches in turn,
so that a machine that warms up or slows down treats them alike; figures are medians of the trials.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from statistics import median_low
from time import sleep

import mlx.core as mx

from . import __version__
from .doctor import device_name, versions
from .integrate import enable
from .loading import (
    add_format_argument,
    add_model_argument,
    attention_path,
    load,
    new_file,
    positive,
    seconds,
    write_csv,
)

OWN = "mlx-lm"  # the model's own cache, among the names of formats


@dataclass(frozen=True)
class Trial:
    """One run, or medians of several: tokens per second, most bytes of all arrays, and bytes the caches hold after."""

    prompt_tps: float
    generation_tps: float
    peak_bytes: int
    cache_bytes: int


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-tq bench",
        description="Speed and memory of a model over its own cache and over compressed ones, in turn: medians.",
    )
    add_model_argument(parser)
    add_format_argument(
        parser,
        nargs="+",
        default=["default"],
        help="formats to compare with the model's own cache, of those `mlx-tq formats` lists (default: default)",
    )
    parser.add_argument("--prompt-tokens", "-p", type=positive, default=512, help="length of prompt (default: 512)")
    parser.add_argument(
        "--generation-tokens", "-g", type=positive, default=1024, help="length of completion (default: 1024)"
    )
    parser.add_argument("--batch-size", "-b", type=positive, default=1, help="sequences at a time (default: 1)")
    parser.add_argument("--num-trials", "-n", type=positive, default=5, help="trials of each cache (default: 5)")
    parser.add_argument(
        "--prefill-step-size", type=positive, default=2048, help="prompt tokens at a time (default: 2048)"
    )
    parser.add_argument("--delay", type=seconds, default=0, help="seconds to wait before each run (default: 0)")
    parser.add_argument("--csv", type=new_file, metavar="FILE", help="write the table there too")
    return parser


def run(model, tokenizer, prompts: list[list[int]], name: str, args: argparse.Namespace) -> tuple[Trial, str]:
    """One trial over the cache `name`, and which path attention took."""
    from mlx_lm import batch_generate, stream_generate
    from mlx_lm.models.cache import make_prompt_cache

    options = {"max_tokens": args.generation_tokens, "prefill_step_size": args.prefill_step_size}
    sleep(args.delay)
    mx.clear_cache()
    mx.reset_peak_memory()
    with nullcontext() if name == OWN else enable(model, name):
        if len(prompts) == 1:
            caches = make_prompt_cache(model)
            for step in stream_generate(model, tokenizer, prompts[0], prompt_cache=caches, **options):
                stats = step
        else:
            response = batch_generate(model, tokenizer, prompts, return_prompt_caches=True, **options)
            stats, caches = response.stats, [cache for sequence in response.caches for cache in sequence]
    held = sum(cache.nbytes for cache in caches)
    return Trial(stats.prompt_tps, stats.generation_tps, mx.get_peak_memory(), held), attention_path(caches)


def medians(trials: list[Trial]) -> Trial:
    """The median of each figure, of an even number the lower of the middle two."""
    return Trial(*(median_low(getattr(trial, field.name) for trial in trials) for field in fields(Trial)))


def main(argv: list[str] | None = None) -> int:
    args = setup_arg_parser().parse_args(argv)
    model, tokenizer = load(args.model)
    tokenizer._eos_token_ids = {}  # as mlx_lm.benchmark does it
    mx.random.seed(0)
    prompts = mx.random.randint(0, tokenizer.vocab_size, (args.batch_size, args.prompt_tokens)).tolist()
    names = [OWN, *dict.fromkeys(args.tq_format)]
    sizes = f"{args.prompt_tokens} prompt tokens, {args.generation_tokens} generated, batch size {args.batch_size}"
    print(f"{args.model}: {sizes}, medians of {args.num_trials}\n{versions()}, {device_name()}\n", flush=True)

    paths = {}
    for name in names:  # a GPU compiles kernels on first use
        print(f"warming up: {name}", file=sys.stderr)
        _, paths[name] = run(model, tokenizer, prompts, name, args)
    trials = {name: [] for name in names}
    for i in range(args.num_trials):
        print(f"trial {i + 1} of {args.num_trials}", file=sys.stderr)
        for name in names:
            trials[name].append(run(model, tokenizer, prompts, name, args)[0])
    rows = {name: medians(trials[name]) for name in names}

    print(f"{'cache':12}{'prompt tokens/s':>17}{'generation tokens/s':>21}{'peak GB':>10}{'cache MB':>10}  attention")
    for name, row in rows.items():
        print(
            f"{name:12}{row.prompt_tps:17.1f}{row.generation_tps:21.1f}{row.peak_bytes / 1e9:10.3f}"
            f"{row.cache_bytes / 1e6:10.2f}  {paths[name]}"
        )
    if args.csv is not None:
        settings = ("model", "prompt_tokens", "generation_tokens", "batch_size", "num_trials", "prefill_step_size")
        about = {name: getattr(args, name) for name in settings}
        about |= {"device": device_name(), "mlx_tq": __version__, "mlx": version("mlx"), "mlx_lm": version("mlx-lm")}
        lines = [{"cache": name, **asdict(row), "attention": paths[name], **about} for name, row in rows.items()]
        write_csv(args.csv, lines)
    return 0
