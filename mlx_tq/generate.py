"""`mlx-tq generate`: text from an mlx-lm model over a compressed cache."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import mlx.core as mx

from . import smollm2
from .attention import explain
from .cache import TQKVCache
from .format import TQFormat
from .integrate import make_prompt_cache

DEMO_MODEL = "smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def positive(text: str) -> int:
    """An argparse type: whole numbers from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def format_name(text: str) -> str:
    """An argparse type: the name of a preset."""
    try:
        TQFormat.preset(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEMO_MODEL,
        help="a model folder, a hub id such as owner/name, or smollm2, fetched without a hub (default: %(default)s)",
    )
    parser.add_argument(
        "--tq-format", type=format_name, default="default", metavar="NAME", help="one of those `mlx-tq formats` lists"
    )


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx-tq generate", description=__doc__)
    add_model_arguments(parser)
    parser.add_argument("--tq-off", action="store_true", help="use mlx-lm's own cache")
    parser.add_argument("--prompt", "-p", required=True, help="message to the model; - reads it from stdin")
    parser.add_argument("--system-prompt", help="system message for the chat template")
    parser.add_argument("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    parser.add_argument("--max-tokens", "-m", type=positive, default=100, help="tokens to generate (default: 100)")
    parser.add_argument("--temp", type=float, default=0.0, help="sampling temperature (default: 0, greedy)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sampling top-p (default: 1)")
    parser.add_argument("--seed", type=int, help="seed of the sampling")
    return parser


def load(name: str):
    """Model and tokenizer for a `--model`, or exit with a message."""
    if name == DEMO_MODEL:
        return smollm2.load()
    from mlx_lm import load as load_model

    path = Path(name).expanduser()
    if path.exists():
        name = str(path)
        if not (path / "config.json").is_file():
            sys.exit(f"error: --model must be a folder with a config.json, and {name!r} is not")
    elif not _HUB_ID.fullmatch(name):
        sys.exit(f"error: --model must be a model folder, a hub id such as owner/name, or smollm2, got {name!r}")
    try:
        return load_model(name)
    except (OSError, ValueError) as error:
        sys.exit(f"error: --model {name!r} cannot be loaded: {error}")


def encode(tokenizer, prompt: str, system: str | None = None, raw: bool = False) -> list[int]:
    """Tokens of a prompt, inside the chat template where the model has one."""
    if raw or not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def attention_path(caches: list) -> str:
    """Which path attention took over the compressed caches among these, which hold tokens."""
    return "; ".join(sorted({explain(cache) for cache in caches if isinstance(cache, TQKVCache)})) or "mlx-lm's own"


def main(argv: list[str] | None = None) -> int:
    parser = setup_arg_parser()
    args = parser.parse_args(argv)

    from mlx_lm import stream_generate
    from mlx_lm.models.cache import make_prompt_cache as stock_cache
    from mlx_lm.sample_utils import make_sampler

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    model, tokenizer = load(args.model)
    tokens = encode(tokenizer, prompt, args.system_prompt, args.ignore_chat_template)
    if not tokens:
        parser.error("--prompt must not be empty")
    caches = stock_cache(model) if args.tq_off else make_prompt_cache(model, args.tq_format)
    if args.seed is not None:
        mx.random.seed(args.seed)

    sampler = make_sampler(args.temp, args.top_p)
    for step in stream_generate(
        model, tokenizer, tokens, max_tokens=args.max_tokens, sampler=sampler, prompt_cache=caches
    ):
        print(step.text, end="", flush=True)
    print()

    format = "off" if args.tq_off else f"{args.tq_format} ({TQFormat.preset(args.tq_format).describe()})"
    print(
        f"\nprompt: {step.prompt_tokens} tokens, {step.prompt_tps:.1f} tokens/s\n"
        f"generation: {step.generation_tokens} tokens, {step.generation_tps:.1f} tokens/s\n"
        f"cache: {sum(cache.nbytes for cache in caches):,} bytes, format {format}\n"
        f"attention: {attention_path(caches)}",
        file=sys.stderr,
    )
    return 0
