"""A tiny Llama model, as a GGUF file such as the demo model's and as the folder converted from it."""

from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_tq import smollm2

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 64
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}<|im_start|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_tokens() -> list[str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return [chr(b) for b in printable] + [chr(256 + i) for i in range(len(others))]


def gguf_order(rows: mx.array, n_heads: int) -> mx.array:
    """Rows as GGUF files hold them: the two of a rotary pair side by side."""
    halves = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def tiny_model(tokens: list[str]) -> llama.Model:
    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=HEADS * HEAD_DIM,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        vocab_size=len(tokens),
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    model = llama.Model(args)
    model.set_dtype(mx.float16)
    return model


def write_gguf(path, model: llama.Model, tokens: list[str]) -> None:
    inner = {name: part for part, name in smollm2._INNER.items()}
    outer = {name: part for part, name in smollm2._OUTER.items()}
    arrays = {}
    for name, array in tree_flatten(model.parameters()):
        module = name.removesuffix(".weight")
        if module in outer:
            arrays[f"{outer[module]}.weight"] = array
            continue
        _, _, layer, module = module.split(".", 3)
        if inner[module] in ("attn_q", "attn_k"):
            array = gguf_order(array, HEADS if inner[module] == "attn_q" else KV_HEADS)
        arrays[f"blk.{layer}.{inner[module]}.weight"] = array
    args = model.args
    numbers = {
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.block_count": args.num_hidden_layers,
        "llama.context_length": 8192,
        "llama.embedding_length": args.hidden_size,
        "llama.feed_forward_length": args.intermediate_size,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    meta = {name: mx.array(number, mx.uint32) for name, number in numbers.items()}
    meta["llama.attention.layer_norm_rms_epsilon"] = mx.array(args.rms_norm_eps)
    meta["llama.rope.freq_base"] = mx.array(args.rope_theta)
    meta["tokenizer.ggml.pre"] = "smollm"
    meta["tokenizer.ggml.tokens"] = tokens
    meta["tokenizer.ggml.merges"] = ["h e", "Ġ 1", "1 2"]
    meta["tokenizer.ggml.token_type"] = mx.array([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)), mx.int32)
    meta["tokenizer.chat_template"] = TEMPLATE
    mx.save_gguf(str(path), arrays, meta)


def make(folder: Path) -> tuple[llama.Model, Path, Path]:
    """The model, its GGUF file and its folder."""
    tokens = [*SPECIAL, *byte_tokens(), "he", "Ġ1", "12"]
    model = tiny_model(tokens)
    write_gguf(folder / "tiny.gguf", model, tokens)
    smollm2.convert(folder / "tiny.gguf", folder / "model")
    return model, folder / "tiny.gguf", folder / "model"
