"""Tokens per second of mlx-lm's generation loop over a long cache: the model's own cache and compressed ones in turn.

The caches are filled with random rows instead of a prompt, so that 131,072 tokens take seconds; from there on it is
mlx_lm's generate_step, one token after the other. Caches are cut back to their length after every round. `llama-8b` has
the shape of Llama 3.1 8B and random weights of 4 bits; other names are models as for `mlx-tq generate --model`.

`own_ops` and `ours_ops` count the operations in the graph of one token, `ours_launches` the kernels of this project
among them.

    python benchmarks/generation.py --out benchmarks/results/generation.csv
"""

from __future__ import annotations

import argparse
import io
import re
from collections import Counter
from time import perf_counter

import mlx.core as mx
import numpy as np
from attention import commit, conditions

import mlx_tq
from mlx_tq.loading import attention_path, load, new_file, positive, write_csv

LENGTHS = (256, 1024, 8192, 32768, 131072)
CHUNK = 8192
OWN = "mlx-lm"
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def random_llama():
    """A model of the shape of Llama 3.1 8B with random weights, bfloat16 and 4-bit."""
    import mlx.nn as nn
    from mlx_lm.models import llama

    model = llama.Model(llama.ModelArgs(**LLAMA_8B))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model


def key_shapes(model) -> list[tuple[mx.Dtype, int, int]]:
    """Dtype, n_kv_heads and head_dim of each layer's keys."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[1]]), cache=caches))
    return [(cache.keys.dtype, cache.keys.shape[1], cache.keys.shape[3]) for cache in caches]


def filled(model, format: str, cached: int, shapes) -> list:
    """Caches of all layers with so many random rows."""
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model) if format == OWN else mlx_tq.make_prompt_cache(model, format)
    for cache, (dtype, heads, dim) in zip(caches, shapes, strict=True):
        for start in range(0, cached, CHUNK):
            shape = (1, heads, min(CHUNK, cached - start), dim)
            cache.update_and_fetch(*(mx.random.normal(shape).astype(dtype) for _ in range(2)))
            mx.eval([a for a in cache.state if isinstance(a, mx.array)])
    mx.clear_cache()
    return caches


def operations(model, caches: list) -> Counter:
    """How many operations of each kind the graph of one token has."""
    out, dot = model(mx.array([[1]]), cache=caches), io.StringIO()
    mx.export_to_dot(dot, out)
    mx.eval(out)
    cut(caches, 1)
    return Counter(re.findall(r'label ="(\w+)"', dot.getvalue()))


def cut(caches: list, tokens: int) -> None:
    for cache in caches:
        cache.trim(tokens)


def run(model, caches: list, tokens: int) -> float:
    """Tokens per second, the first two left out."""
    from mlx_lm.generate import generate_step

    before = caches[0].offset
    for i, (token, _) in enumerate(generate_step(mx.array([1]), model, prompt_cache=caches, max_tokens=tokens + 2)):
        mx.eval(token)
        if i == 1:
            started = perf_counter()
    elapsed = perf_counter() - started
    mx.synchronize()
    cut(caches, caches[0].offset - before)
    return tokens / elapsed


def measure(model, name: str, cached: int, format: str, rounds: int, tokens: int, shapes) -> dict:
    caches = {kind: filled(model, kind, cached, shapes) for kind in (OWN, format)}
    ops = {kind: operations(model, held) for kind, held in caches.items()}
    rates = {kind: [] for kind in caches}
    for held in caches.values():
        run(model, held, tokens)  # compiles, and grows the caches
    for _ in range(rounds):
        for kind, held in caches.items():
            rates[kind].append(run(model, held, tokens))
    own, ours = (np.percentile(rates[kind], (20, 50, 80)) for kind in caches)
    sizes = [sum(cache.nbytes for cache in held) for held in caches.values()]
    return {
        "model": name,
        "cached": cached,
        "format": format,
        "tokens": tokens,
        "own_tps": round(own[1], 2),
        "ours_tps": round(ours[1], 2),
        "ratio": round(ours[1] / own[1], 3),
        "own_p20": round(own[0], 2),
        "own_p80": round(own[2], 2),
        "ours_p20": round(ours[0], 2),
        "ours_p80": round(ours[2], 2),
        "own_bytes": sizes[0],
        "ours_bytes": sizes[1],
        "own_ops": ops[OWN].total(),
        "ours_ops": ops[format].total(),
        "ours_launches": ops[format]["CustomKernel"],
        "layers": len(shapes),
        "path": attention_path(caches[format]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "llama-8b"], help="default: smollm2 llama-8b")
    parser.add_argument(
        "--lengths", nargs="+", type=positive, default=LENGTHS, help="tokens held (default: 256 to 131,072)"
    )
    parser.add_argument("--format", default="default", help="preset (default: %(default)s)")
    parser.add_argument("--tokens", type=positive, default=64, help="tokens of a round (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--commit", default=commit(), help="what to write as the commit (default: git's)")
    parser.add_argument("--out", type=new_file, help="CSV file to write")
    args = parser.parse_args()
    about = conditions(args.commit)
    heads = ("cached", 8), ("own t/s", 10), ("ours t/s", 10), ("ratio", 7), ("own MB", 9), ("ours MB", 9)
    print(f"{'model':10s}{''.join(head.rjust(width) for head, width in heads)}  operations")
    out = []
    for name in args.models:
        model = random_llama() if name == "llama-8b" else load(name)[0]
        shapes = key_shapes(model)
        for cached in args.lengths:
            row = measure(model, name, cached, args.format, args.rounds, args.tokens, shapes)
            out.append(row | about)
            if args.out is not None:
                write_csv(args.out, out)
            print(
                f"{name:10s}{cached:8d}{row['own_tps']:10.1f}{row['ours_tps']:10.1f}{row['ratio']:7.2f}"
                f"{row['own_bytes'] / 1e6:9.1f}{row['ours_bytes'] / 1e6:9.1f}"
                f"  {row['own_ops']} / {row['ours_ops']}, {row['ours_launches']} launches",
                flush=True,
            )


if __name__ == "__main__":
    main()
