import copy
import functools
import gc
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from archs import configs
from oracle import attention64, decode64, max_error, normal, to64

import mlx_tq
from mlx_tq import TQFormat, TQKVCache, kernels
from mlx_tq.view import hook_installed, remove_hook

mlx_lm = pytest.importorskip("mlx_lm")
from mlx_lm import generate, stream_generate  # noqa: E402
from mlx_lm.generate import generate_step  # noqa: E402
from mlx_lm.models.cache import (  # noqa: E402
    CacheList,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

remove_hook()  # other modules may have used a cache already
STOCK = mx.fast.scaled_dot_product_attention
VOCABULARY = 256
COMMON = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
}
FULL, SLIDING = "full_attention", "sliding_attention"
CONFIGS = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": False},
    "gemma2": {"query_pre_attn_scalar": 64, "sliding_window": 8},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "sliding_window": 8,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 64,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "layer_types": [SLIDING, FULL] * 2,
        "rope_scaling": None,
    },
    "lfm2": {
        "num_hidden_layers": 4,
        "conv_L_cache": 3,
        "block_dim": 128,
        "block_ff_dim": 96,
        "block_multiple_of": 4,
        "block_ffn_dim_multiplier": 2.0,
        "block_auto_adjust_ff_dim": True,
        "layer_types": [FULL, "conv"] * 2,
        "norm_eps": 1e-5,
        "conv_bias": False,
    },
}
# What becomes of each layer: compressed, or the name of the cache that is left alone.
EXPECTED = {
    "llama": ["TQ"] * 3,
    "qwen3": ["TQ"] * 3,
    "gemma2": ["TQ"] * 3,
    "gemma3_text": ["RotatingKVCache", "RotatingKVCache", "TQ"] * 2,
    "gpt_oss": ["RotatingKVCache", "TQ"] * 2,
    "lfm2": ["TQ", "ArraysCache"] * 2,
}
# Something of all is packed after 40 tokens.
PACKED = {"window": 0, "sinks": 0}


def tiny_model(name="llama", seed=0):
    """A small model with random weights."""
    module = __import__(f"mlx_lm.models.{name}", fromlist=["Model"])
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict({"model_type": name, **COMMON, **CONFIGS[name]}))
    model.eval()
    mx.eval(model.parameters())
    return model


@pytest.fixture(autouse=True)
def clean_hook():
    """Each test starts without the hook and leaves none behind."""
    remove_hook()
    yield
    remove_hook()
    mlx_tq.integrate._enabled.clear()


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="w255", unk_token="w0")


def prompt(n, seed=0):
    return np.random.default_rng(seed).integers(1, VOCABULARY - 1, n)


def greedy(model, ids, n, **options):
    steps = generate_step(mx.array(ids), model, max_tokens=n, **options)
    return [int(token) for token, _ in steps]


def logits(model, ids, caches, split=None):
    """Logits of all positions, in pieces of the given sizes."""
    out, start = [], 0
    for n in [len(ids)] if split is None else split:
        out.append(model(mx.array(ids[start : start + n])[None], cache=caches).astype(mx.float32))
        mx.eval(out[-1])
        start += n
    return mx.concatenate(out, axis=1)


def cosine(a, b):
    a, b = to64(a), to64(b)
    return np.sum(a * b, -1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


# ------------------------------------------------------------------ enable and disable


def test_enable_and_disable_leave_no_trace():
    model = tiny_model()
    before = dict(model.__dict__)
    plan = mlx_tq.enable(model)
    assert hook_installed() and mx.fast.scaled_dot_product_attention is not STOCK
    assert [type(c) for c in make_prompt_cache(model)] == [TQKVCache] * 3
    assert [entry.format for entry in plan] == [TQFormat.preset("default")] * 3
    mlx_tq.disable(model)
    assert mx.fast.scaled_dot_product_attention is STOCK and not hook_installed()
    assert model.__dict__ == before
    assert [type(c) for c in make_prompt_cache(model)] == [KVCache] * 3
    mlx_tq.disable(model)
    assert mx.fast.scaled_dot_product_attention is STOCK


def test_context_manager_also_on_errors():
    model = tiny_model()
    with pytest.raises(KeyError), mlx_tq.enable(model, "tq3") as plan:
        assert make_prompt_cache(model)[1].format == TQFormat.preset("tq3") == plan[0].format
        raise KeyError
    assert "make_cache" not in model.__dict__ and mx.fast.scaled_dot_product_attention is STOCK


def test_enabling_twice_replaces_the_format():
    model = tiny_model()
    mlx_tq.enable(model, "k4v4")
    hook = mx.fast.scaled_dot_product_attention
    mlx_tq.enable(model, "tq3")
    assert mx.fast.scaled_dot_product_attention is hook
    caches = make_prompt_cache(model)
    assert [(type(c), c.format) for c in caches] == [(TQKVCache, TQFormat.preset("tq3"))] * 3
    mlx_tq.disable(model)
    assert [type(c) for c in make_prompt_cache(model)] == [KVCache] * 3
    assert mx.fast.scaled_dot_product_attention is STOCK


def test_leaving_an_inner_context_restores_the_outer():
    model = tiny_model()
    with mlx_tq.enable(model, "k4v4", fused="never"):
        with mlx_tq.enable(model, "tq3"):
            assert make_prompt_cache(model)[0].format == TQFormat.preset("tq3")
        cache = make_prompt_cache(model)[0]
        assert (cache.format, cache.fused) == (TQFormat.preset("k4v4"), "never") and hook_installed()
        with mlx_tq.enable(model, "tq3"):
            mlx_tq.disable(model)
        assert type(make_prompt_cache(model)[0]) is KVCache
    assert "make_cache" not in model.__dict__ and mx.fast.scaled_dot_product_attention is STOCK


def test_a_limit_of_tokens_is_refused_while_enabled():
    model = tiny_model("qwen3")  # mlx-lm itself drops the limit of a model with a make_cache
    with mlx_tq.enable(model):
        for make in (
            lambda: make_prompt_cache(model, 64),
            lambda: make_prompt_cache(model, max_kv_size=64),
            lambda: greedy(model, prompt(4), 1, max_kv_size=64),
            lambda: mlx_tq.make_prompt_cache(model, max_kv_size=64),
        ):
            with pytest.raises(ValueError, match=r"max_kv_size must be None, got 64: .*mlx_tq\.disable"):
                make()
        assert type(make_prompt_cache(model)[0]) is TQKVCache
    assert [type(c) for c in make_prompt_cache(model, 64)] == [RotatingKVCache] * 3


def test_two_models():
    one, two = tiny_model(), tiny_model(seed=1)
    mlx_tq.enable(one, "k4v4")
    mlx_tq.enable(two, "tq3")
    assert make_prompt_cache(one)[0].format != make_prompt_cache(two)[0].format
    mlx_tq.disable(one)
    assert hook_installed() and type(make_prompt_cache(one)[0]) is KVCache
    assert make_prompt_cache(two)[0].format == TQFormat.preset("tq3")
    mlx_tq.disable(two)
    assert mx.fast.scaled_dot_product_attention is STOCK


def test_a_model_that_is_gone_does_not_keep_the_hook():
    one, two = tiny_model(), tiny_model(seed=1)
    mlx_tq.enable(one)
    mlx_tq.enable(two)
    del one
    gc.collect()
    mlx_tq.disable(two)
    assert mx.fast.scaled_dot_product_attention is STOCK


def test_a_make_cache_of_the_models_own_survives():
    """Set on the model itself, by its owner: used while enabled, and there again afterwards."""
    model = tiny_model()
    own = lambda: [KVCache() for _ in range(2)]  # noqa: E731
    model.make_cache = own
    for _ in range(2):
        mlx_tq.enable(model, "k4v4")
        assert [type(c) for c in make_prompt_cache(model)] == [TQKVCache] * 2
    mlx_tq.disable(model)
    assert model.make_cache is own
    assert len(mlx_tq.make_prompt_cache(model)) == 2


def test_make_prompt_cache_changes_no_model():
    model = tiny_model()
    caches = mlx_tq.make_prompt_cache(model, "tq3")
    assert [(type(c), c.layer_index) for c in caches] == [(TQKVCache, i) for i in range(3)]
    assert "make_cache" not in model.__dict__
    mlx_tq.enable(model, "k4v4")
    assert mlx_tq.make_prompt_cache(model, "tq3")[0].format == TQFormat.preset("tq3")
    assert make_prompt_cache(model)[0].format == TQFormat.preset("k4v4")


def test_a_cache_in_use_survives_disable():
    """Caches made before stay usable and right, and an append brings the hook back."""
    model = tiny_model()
    ids = prompt(60)
    caches = mlx_tq.make_prompt_cache(model, "k4v4")
    twin = mlx_tq.make_prompt_cache(model, "k4v4")
    first = logits(model, ids[:50], caches)
    np.testing.assert_array_equal(to64(first), to64(logits(model, ids[:50], twin)))
    remove_hook()
    got, want = logits(model, ids[50:], caches), logits(model, ids[50:], twin)
    assert cosine(got, want).min() > 0.9999


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda m: mlx_tq.enable(m, "q4"), "format must"),
        (lambda m: mlx_tq.enable(m, 4), "format must"),
        (lambda m: mlx_tq.enable(m, fused="maybe"), "fused must"),
        (lambda m: mlx_tq.make_prompt_cache(m, "q4"), "format must"),
        (lambda m: mlx_tq.enable(object()), "model must"),
        (lambda m: mlx_tq.enable(None), "model must"),
        (lambda m: mlx_tq.make_prompt_cache("a path"), "model must"),
    ],
)
def test_what_is_refused_changes_nothing(call, word):
    model = tiny_model()
    with pytest.raises(ValueError, match=word):
        call(model)
    assert "make_cache" not in model.__dict__ and not hook_installed()


# ------------------------------------------------------------------ plans


@pytest.mark.parametrize("name", CONFIGS)
def test_plans(name):
    model = tiny_model(name)
    stock = [type(c).__name__ for c in make_prompt_cache(model)]
    with mlx_tq.enable(model, "k4v4") as plan:
        caches = make_prompt_cache(model)
        assert ["TQ" if isinstance(c, TQKVCache) else type(c).__name__ for c in caches] == EXPECTED[name]
        assert [c.layer_index for c in caches if isinstance(c, TQKVCache)] == [
            i for i, kind in enumerate(EXPECTED[name]) if kind == "TQ"
        ]
        assert [entry.cache for entry in plan] == stock
        for i, (entry, kind) in enumerate(zip(plan, EXPECTED[name], strict=True)):
            assert entry.index == i and (entry.format is not None) == (kind == "TQ")
            assert (entry.reason == "") == (kind == "TQ")
    assert [type(c).__name__ for c in make_prompt_cache(model)] == stock


def test_a_plan_reads_well(capsys):
    plan = mlx_tq.enable(tiny_model("gpt_oss"), verbose=True)
    assert capsys.readouterr().out.strip() == str(plan)
    lines = str(plan).splitlines()
    assert len(lines) == 4 and "RotatingKVCache, left as it is" in lines[0] and "compressed: K4/V4" in lines[1]
    assert str(mlx_tq.enable(tiny_model())).startswith("layers 0-2: KVCache, compressed")


# ------------------------------------------------------------------ latent attention and lists of caches


@pytest.fixture(scope="module")
def build():
    """Models of `configs`, each built once."""
    return functools.cache(configs.build)


@pytest.mark.parametrize(
    ("format", "bits"), [("default", 4), ("tq3", 3), (TQFormat(2, 4, qjl=True), 4), (TQFormat(4, 4, qjl=True), 4)]
)
def test_a_latent_is_stored_once(build, format, bits):
    model = build("deepseek_v3")
    with mlx_tq.enable(model, format) as plan:
        (cache, *_) = caches = make_prompt_cache(model)
    assert all(entry.latent and entry.format == c.format for entry, c in zip(plan, caches, strict=True))
    assert (cache.format.key_bits, cache.format.value_bits) == (bits, 16)
    assert not cache.format.qjl and not cache.format.centered_keys
    assert "latent compressed once as key and value" in str(plan) and "rope key not quantised" in str(plan)


@pytest.mark.parametrize("format", [TQFormat(16, 4), TQFormat(4, 16)])
def test_a_latent_half_of_which_is_to_stay_exact_is_left_alone(build, format):
    (entry, *_) = mlx_tq.enable(build("deepseek_v3"), format)
    mlx_tq.disable(build("deepseek_v3"))
    assert entry.format is None and "keeps one of them exact" in entry.reason


def test_attention_to_a_latent_against_the_oracle(build, monkeypatch):
    """Decode attends to the packed latent as key and value, with the rope key's scores as its mask."""
    model, calls = build("deepseek_v3"), []
    attend = mlx_tq.view.attention

    def recorded(q, keys, values, **options):
        calls.append(((q, keys, values), options, attend(q, keys, values, **options)))
        return calls[-1][-1]

    monkeypatch.setattr(mlx_tq.view, "attention", recorded)
    caches = mlx_tq.make_prompt_cache(model, TQFormat(centered_keys=True, window=0, sinks=2, page=32))
    ids = np.random.default_rng(3).integers(1, 60, 80)
    logits(model, ids, caches, [77, 1, 1, 1])
    assert len(calls) == 3 * len(caches) and max(caches[0].rows[0].layout.packed) > 60
    for (q, keys, values), options, got in calls:
        assert keys.regions is values.regions and options["mask"].shape[-1] == keys.shape[2]
        latent = decode64(keys)
        want = attention64(q, latent, latent, **options)
        np.testing.assert_allclose(to64(got), want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_a_rope_key_is_not_quantised(build, dtype):
    (cache, *_) = mlx_tq.make_prompt_cache(build("deepseek_v3"), "k4v4")
    rope = normal(1, 1, 1, 70, 16, dtype=dtype)
    _, got = cache.update_and_fetch(normal(2, 1, 1, 70, 64, dtype=dtype), rope)
    assert got.dtype == dtype
    np.testing.assert_allclose(to64(got), to64(rope), rtol=0, atol=8 * mx.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("options", "heads", "rope", "fused", "path"),
    [
        ({}, 1, 24, "auto", "kernels ({}), prompts over decoded rows"),
        ({}, 1, 24, "never", 'MLX ops: fused="never", prompts over decoded rows'),
        # No latents: two heads, other formats, values as wide as keys.
        ({}, 2, 24, "auto", "MLX ops: value head_dim 24 is not a multiple of 16"),
        ({"qjl": True}, 1, 24, "auto", "MLX ops: value head_dim 24 is not a multiple of 16"),
        ({"centered_keys": True}, 1, 24, "auto", "MLX ops: value head_dim 24 is not a multiple of 16"),
        ({"value_bits": 4}, 1, 24, "auto", "MLX ops: value head_dim 24 is not a multiple of 16"),
        ({}, 1, 64, "auto", "kernels ({})"),
    ],
)
def test_explain_of_a_latent(fused_kernels, options, heads, rope, fused, path):
    """A token attends to the latent as key and value: the kernels need not take the width of the rope key."""
    cache = TQKVCache(TQFormat(**{"value_bits": 16, "window": 0, "sinks": 0} | options), fused=fused)
    cache.update_and_fetch(normal(1, 1, heads, 200, 64), normal(2, 1, heads, 200, rope))
    said = mlx_tq.explain(cache)
    assert said == path.format(kernels.backend())
    both = CacheList(cache, KVCache())
    assert mlx_tq.explain(both) == f"{said} + KVCache, not compressed"
    assert mlx_tq.explain([KVCache(), both]) == (
        f"layer 0: KVCache, not compressed\nlayer 1: {said} + KVCache, not compressed"
    )


def test_a_model_with_a_cache_more_than_layers(build):
    """Its latents are those of any layer."""
    model = build("longcat_flash_ngram")
    with mlx_tq.enable(model) as plan:
        assert len(make_prompt_cache(model)) == len(model.layers) + 1
    assert [entry.latent for entry in plan] == [False] + [True] * 2 * len(model.layers)


@pytest.mark.parametrize(("name", "second"), [("longcat_flash", TQKVCache), ("deepseek_v32", KVCache)])
def test_the_life_of_a_list_of_caches(build, name, second, tmp_path):
    model, path = build(name), str(tmp_path / "prompt.safetensors")
    ids = [np.random.default_rng(seed).integers(1, 60, 50 + 9 * seed) for seed in range(3)]
    with mlx_tq.enable(model, "k4v4") as plan:
        alone = [make_prompt_cache(model) for _ in ids]
    reasons = {entry.reason for entry in plan if entry.format is None}
    assert reasons == (set() if second is TQKVCache else {"keys of an indexer, no values"})
    for tokens, caches in zip(ids, alone, strict=True):
        assert all(type(c) is CacheList and [type(x) for x in c.caches] == [TQKVCache, second] for c in caches)
        assert sum(c.nbytes for c in caches) == 0
        logits(model, tokens, caches)
        assert all(c.nbytes == sum(inner.nbytes for inner in c.caches) > 0 for c in caches)
    batch = [CacheList.merge(list(pair)) for pair in zip(*alone[:2], strict=True)]
    for cache, third in zip(batch, alone[2], strict=True):
        cache.extend(CacheList.merge([third]))
        cache.filter(mx.array([2, 0]))
    token = mx.array([[7], [7]])
    got = model(token, cache=batch)
    for row, sequence in enumerate((2, 0)):
        extracted = [cache.extract(row) for cache in batch]
        save_prompt_cache(path, alone[sequence])
        for caches in (alone[sequence], load_prompt_cache(path)):
            want = model(token[:1], cache=caches)
            assert cosine(got[row], want[0]).min() > 0.999
            assert all(cache.trim(1) == 1 for cache in caches)
        assert all(cache.trim(1) == 1 for cache in extracted)
        assert cosine(model(token[:1], cache=extracted)[0], want[0]).min() > 0.999


# ------------------------------------------------------------------ the hook


def test_other_calls_reach_the_stock_function():
    mlx_tq.view.install_hook()
    q, k, v = normal(0, 1, 4, 3, 64), normal(1, 1, 2, 9, 64), normal(2, 1, 2, 9, 64)
    got = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal")
    np.testing.assert_array_equal(to64(got), to64(STOCK(q, k, v, scale=0.125, mask="causal")))
    assert mx.fast.scaled_dot_product_attention.__doc__ == STOCK.__doc__


@pytest.mark.parametrize("format", ("k4v4", "default", "tq3"))
def test_views_through_the_hook_and_without_it(format):
    q = normal(0, 1, 4, 3, 64)
    cache = TQKVCache(format)
    keys, values = cache.update_and_fetch(normal(1, 1, 2, 90, 64), normal(2, 1, 2, 90, 64))
    want = attention64(q, decode64(keys.rows), decode64(values.rows), 0.125, "causal")
    assert max_error(mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125, mask="causal"), want) < 2e-6
    assert max_error(STOCK(q, keys, values, scale=0.125, mask="causal"), want) < 3e-6
    sliced = mx.fast.scaled_dot_product_attention(q, keys[:, :, :50], values[:, :, :50], scale=0.125)
    k64, v64 = (decode64(x.rows)[:, :, :50] for x in (keys, values))
    assert max_error(sliced, attention64(q, k64, v64, 0.125)) < 3e-6
    swapped = mx.fast.scaled_dot_product_attention(q, values, keys, scale=0.125)
    assert max_error(swapped, attention64(q, decode64(values.rows), decode64(keys.rows), 0.125)) < 3e-6
    twice = mx.fast.scaled_dot_product_attention(q, keys, keys, scale=0.125)
    assert max_error(twice, attention64(q, decode64(keys.rows), decode64(keys.rows), 0.125)) < 3e-6
    other = TQKVCache(TQFormat(window=40, page=32))
    _, unlike = other.update_and_fetch(normal(1, 1, 2, 90, 64), normal(2, 1, 2, 90, 64))
    mixed = mx.fast.scaled_dot_product_attention(q, keys, unlike, scale=0.125)
    assert max_error(mixed, attention64(q, decode64(keys.rows), decode64(unlike.rows), 0.125)) < 3e-6
    stream = mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.125, mask="causal", stream=mx.cpu)
    assert max_error(stream, want) < 2e-6


def test_an_unused_view_is_never_decoded():
    k = normal(1, 1, 2, 20_000, 128, dtype=mx.float16)
    cache = TQKVCache("k4v4")
    cache.update_and_fetch(k, k)
    mx.eval(cache.keys, cache.values)
    q, step = normal(0, 1, 4, 1, 128, dtype=mx.float16), k[:, :, :1] + 0
    mx.eval(q, step)
    del k
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    views = cache.update_and_fetch(step, step)
    out = mx.fast.scaled_dot_product_attention(q, *views, scale=0.1)
    mx.eval(out, cache.keys, cache.values)
    decoded = 20_000 * 2 * 128 * 2
    assert mx.get_peak_memory() - held < decoded + cache.nbytes  # float16 rows of both sides would take twice that


# ------------------------------------------------------------------ models


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_a_high_bit_format(name):
    """Prefill in pieces, then single steps: close to the logits of the stock cache."""
    model = tiny_model(name)
    ids = prompt(100, seed=3)
    split = [60, 17, *[1] * 23]
    stock = logits(model, ids, make_prompt_cache(model), split)
    for format in (TQFormat(4, 16, qjl=True, **PACKED), TQFormat(window=32, page=32)):
        got = logits(model, ids, mlx_tq.make_prompt_cache(model, format), split)
        assert cosine(got, stock).mean() > 0.99, format
    exact = logits(model, ids, mlx_tq.make_prompt_cache(model), split)
    assert cosine(exact, stock).min() > 0.99999  # all 100 tokens are in the window


def test_bits_order_the_logits():
    model = tiny_model()
    ids = prompt(100, seed=4)
    stock = to64(logits(model, ids, make_prompt_cache(model)))
    error = []
    for bits in (2, 3, 4):
        got = logits(model, ids, mlx_tq.make_prompt_cache(model, TQFormat(bits, bits, **PACKED)))
        error.append(np.mean((to64(got) - stock) ** 2))
    assert error[0] > 2 * error[1] > 4 * error[2]


GENERATE = {
    **TQFormat.presets(),
    "k3v2 window": TQFormat(3, 2, window=32, sinks=2, page=32),
    "centered": TQFormat(3, 3, centered_keys=True, window=0, page=32),
    "lloyd qjl": TQFormat(2, 4, codebook="lloyd", qjl=True, kappa="unbiased", **PACKED),
    "raw keys": TQFormat(16, 2, **PACKED),
    "raw values": TQFormat(3, 16, window=33, sinks=1, page=64),
}


@pytest.mark.parametrize("format", GENERATE)
def test_generate(format, tokenizer):
    model = tiny_model()
    ids = prompt(150).tolist()
    stock_type = type(make_prompt_cache(model)[0])
    with mlx_tq.enable(model, GENERATE[format]):
        text = generate(model, tokenizer, ids, max_tokens=8)
        streamed = list(stream_generate(model, tokenizer, ids, max_tokens=8))
    assert text == "".join(r.text for r in streamed) and len(text.split()) >= 1
    assert streamed[-1].generation_tokens <= 8
    caches = mlx_tq.make_prompt_cache(model, GENERATE[format])
    again = [r.token for r in stream_generate(model, tokenizer, ids, max_tokens=8, prompt_cache=caches)]
    assert again == [r.token for r in streamed]
    assert caches[0].offset >= 150 and stock_type is KVCache


def test_greedy_tokens_of_a_high_bit_format_equal_stock():
    """The first 8 tokens after each prompt of 200 of which the stock model is sure (by 0.03 in its log-probability)."""
    model = tiny_model()
    formats = (TQFormat(4, 16, qjl=True, **PACKED), TQFormat(window=32, page=32))
    sure = 0
    for seed in range(12):
        ids = prompt(200, seed)
        steps = [(int(t), np.sort(to64(p))) for t, p in generate_step(mx.array(ids), model, max_tokens=8)]
        if min(p[-1] - p[-2] for _, p in steps) < 0.03:
            continue
        sure += 1
        for format in formats:
            with mlx_tq.enable(model, format):
                assert greedy(model, ids, 8) == [t for t, _ in steps]
    assert sure >= 4


@pytest.mark.parametrize("chunk", (16, 64, 2048))
def test_prefill_in_chunks(chunk):
    model = tiny_model()
    ids = prompt(150, 2)
    with mlx_tq.enable(model):
        assert greedy(model, ids, 6, prefill_step_size=chunk) == greedy(model, ids, 6, prefill_step_size=50)


def test_a_saved_prompt_goes_on_as_the_unsaved_one(tmp_path):
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    model = tiny_model("gpt_oss")
    ids = prompt(300)
    caches = mlx_tq.make_prompt_cache(model, TQFormat(window=32, page=32))
    logits(model, ids, caches)
    path = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(path, caches)
    loaded = load_prompt_cache(path)
    assert [type(c) for c in loaded] == [type(c) for c in caches]
    more = prompt(40, 1)
    np.testing.assert_array_equal(to64(logits(model, more, loaded)), to64(logits(model, more, caches)))


def test_trimmed_and_copied_prompts():
    from mlx_lm.models.cache import trim_prompt_cache

    model = tiny_model()
    ids = prompt(100)
    caches = mlx_tq.make_prompt_cache(model)
    logits(model, ids, caches)
    twin = copy.deepcopy(caches)
    assert trim_prompt_cache(caches, 10) == 10
    got = logits(model, ids[90:], caches)
    whole = logits(model, ids, mlx_tq.make_prompt_cache(model))
    assert cosine(got, whole[:, 90:]).min() > 0.99999
    assert [c.offset for c in twin] == [c.offset for c in caches] == [100] * 3


def test_another_thread_may_generate():
    import threading

    model = tiny_model()
    ids = prompt(150)
    mlx_tq.enable(model, TQFormat(seed=12345))
    results = []
    thread = threading.Thread(target=lambda: results.append(greedy(model, ids, 4)))
    thread.start()
    thread.join()
    assert results == [greedy(model, ids, 4)]


# ------------------------------------------------------------------ without mlx-lm


def run(code):
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_everything_but_the_hooks_works_without_mlx_lm():
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mlx_lm", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import mlx.core as mx
import mlx_tq
x = mx.random.normal((1, 2, 300, 64))
keys, values = mlx_tq.encode_keys(x), mlx_tq.encode_values(x)
out = mlx_tq.attention(x, keys, values, scale=0.125, mask="causal")
cache = mlx_tq.TQKVCache()
views = cache.update_and_fetch(x, x)
out = out + mx.fast.scaled_dot_product_attention(x, *views, scale=0.125, mask="causal")
assert mx.isfinite(out).all().item() and cache.trim(3) == 3
mlx_tq.TQKVCache.from_state(cache.state)
for call in (mlx_tq.enable, mlx_tq.make_prompt_cache):
    try:
        call(None)
    except ImportError as error:
        assert "mlx-tq[lm]" in str(error)
    else:
        raise AssertionError(call)
assert "mlx_lm" not in sys.modules
"""
    run(code)


def test_a_broken_mlx_lm_is_not_taken_for_an_absent_one():
    code = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name="transformers")
sys.meta_path.insert(0, Broken())
try:
    import mlx_tq
except ModuleNotFoundError as error:
    print(error.name)
"""
    assert run(code).strip() == "transformers"


def test_import_installs_no_hook_and_registers_the_cache():
    code = """
import mlx.core as mx
stock = mx.fast.scaled_dot_product_attention
import mlx_tq
assert mx.fast.scaled_dot_product_attention is stock
from mlx_lm.models import cache
assert cache.TQKVCache is mlx_tq.TQKVCache
"""
    run(code)
