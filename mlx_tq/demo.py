"""`mlx-tq demo`: one prompt answered over the model's own cache and over a compressed one."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import mlx.core as mx

from .cache import TQKVCache
from .doctor import device_name, versions
from .format import TQFormat
from .integrate import leaves, make_prompt_cache
from .loading import add_format_argument, add_model_argument, attention_path, load, positive

_PREFILL_STEP = 128  # small, so that the progress bar moves on a CPU
_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} tokens [{elapsed}<{remaining}]"


@dataclass
class Answer:
    """What one run gave; `nbytes` is what its caches hold, spare capacity included."""

    tokens: list[int]
    text: str
    nbytes: int
    prompt_tps: float
    generation_tps: float


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mlx-tq demo", description=__doc__)
    add_model_argument(parser)
    add_format_argument(parser, default="default")
    parser.add_argument("--max-tokens", "-m", type=positive, default=48, help="tokens to generate (default: 48)")
    return parser


def encode(tokenizer, prompt: str) -> list[int]:
    """Tokens of a prompt, inside the chat template where the model has one."""
    if not tokenizer.has_chat_template:
        return tokenizer.encode(prompt)
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True)


def answer(model, tokenizer, prompt: list[int], caches: list, max_tokens: int, label: str) -> Answer:
    """Greedy tokens over `caches`, with a progress bar on stderr."""
    from mlx_lm import stream_generate
    from tqdm import tqdm

    tokens, text = [], ""
    with tqdm(total=len(prompt) + max_tokens, desc=label, bar_format=_BAR, leave=False) as bar:
        steps = stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=max_tokens,
            prompt_cache=caches,
            prefill_step_size=_PREFILL_STEP,
            prompt_progress_callback=lambda done, total: bar.update(done - bar.n),
        )
        for step in steps:
            tokens.append(step.token)
            text += step.text
            bar.update()
    return Answer(tokens, text.strip(), sum(c.nbytes for c in caches), step.prompt_tps, step.generation_tps)


def report(format: TQFormat, prompt_tokens: int, dtype: str, stock: Answer, mine: Answer, path: str) -> None:
    """Prints both answers and what they took."""
    agree = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(stock.tokens, mine.tokens, strict=False)))
    rows = [
        ("", f"{dtype} cache", "compressed"),
        ("cache, bytes", f"{stock.nbytes:,}", f"{mine.nbytes:,}"),
        ("prompt, tokens/s", f"{stock.prompt_tps:.1f}", f"{mine.prompt_tps:.1f}"),
        ("generation, tokens/s", f"{stock.generation_tps:.1f}", f"{mine.generation_tps:.1f}"),
    ]
    print(f"--- {dtype} cache\n{stock.text}\n\n--- compressed cache\n{mine.text}\n")
    for name, left, right in rows:
        print(f"{name:22}{left:>16}{right:>16}")
    print(f"\nThe cache is {stock.nbytes / mine.nbytes:.2f} times smaller.", end=" ")
    print(f"The first {agree} of {len(stock.tokens)} tokens agree.")
    if format.window:
        recent = f"{format.window} to {format.window + format.page - 1}"
        print(
            f"{prompt_tokens} prompt tokens are few: the last {recent} and the first {format.sinks} stay exact, "
            "so the ratio grows with the prompt."
        )
    print("One near tie decided otherwise changes all tokens after it: `mlx-tq eval` measures quality.")
    print(f"Attention over the compressed cache: {path}.")
    if path.startswith("MLX ops"):
        print("So the speed above is that of the slow, portable path, and not that of the kernels.")


def main(argv: list[str] | None = None) -> int:
    args = setup_arg_parser().parse_args(argv)
    from mlx_lm.models.cache import make_prompt_cache as stock_cache

    format = TQFormat.preset(args.tq_format)
    model, tokenizer = load(args.model)
    prompt = encode(tokenizer, (Path(__file__).parent / "demo_prompt.txt").read_text(encoding="utf-8"))
    print(f"{args.model}: {len(prompt)} prompt tokens, up to {args.max_tokens} new ones, the likeliest each time")
    print(f"format {args.tq_format}: {format.describe()}")
    print(f"{versions()}, {device_name()}\n", flush=True)

    def run(label: str, caches: list) -> Answer:
        return answer(model, tokenizer, prompt, caches, args.max_tokens, label)

    if mx.default_device() != mx.Device(mx.cpu):  # a GPU compiles kernels on first use
        run("warming up", stock_cache(model))
        run("warming up", make_prompt_cache(model, format))
    stock_caches, caches = stock_cache(model), make_prompt_cache(model, format)
    compressed = [i for i, cache in enumerate(leaves(caches)) if isinstance(cache, TQKVCache)]
    if not compressed:
        sys.exit(f"error: --model {args.model!r} has no plain KV cache to compress")
    stock, mine = run("usual cache", stock_caches), run("compressed cache", caches)
    dtype = str(leaves(stock_caches)[compressed[0]].keys.dtype).rpartition(".")[2]
    report(format, len(prompt), dtype, stock, mine, attention_path(caches))
    return 0
