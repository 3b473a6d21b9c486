"""Cases that a review of the whole package found: odd shapes, views that change, mixed formats, Metal's conversions."""

import copy
import gc
import pickle
import re
import threading
from dataclasses import replace
from math import prod

import mlx.core as mx
import msl
import numpy as np
import pytest
from oracle import TIGHT, attention64, decode64, max_error, normal

import mlx_tq
from mlx_tq import TQFormat, TQKVCache, kernels
from mlx_tq.codec import Layout, PackedRows
from mlx_tq.packing import Regions, region_shapes
from mlx_tq.view import TQView, views

runner_only = pytest.mark.skipif(kernels.backend() is not None, reason="about the runner, not a GPU")


def packed(length=40, format="k4v4", heads=2, dim=64):
    """Packed keys and values of one sequence."""
    return (
        mlx_tq.encode_keys(normal(1, 1, heads, length, dim), format),
        mlx_tq.encode_values(normal(2, 1, heads, length, dim), format),
    )


# ------------------------------------------------------------------ what Metal converts


@runner_only
@pytest.mark.parametrize("name", list(kernels._INPUTS))
def test_constants_become_bfloat_explicitly(fused_kernels, monkeypatch, name):
    """Metal refuses float to bfloat even for 0.0f; clang sees that only where the number is not a constant."""
    original = kernels.text

    def text(file):
        found = original(file)
        return re.sub(r"= -?\d[\d.]*f;", "= float(params[0]);", found) if file.endswith(".metal") else found

    monkeypatch.setattr(kernels, "text", text)
    kernels._kernel.cache_clear()
    format = TQFormat(16, 4) if name == "encode" else TQFormat()
    k, v = (normal(i, 1, 2, 32, 64, dtype=mx.bfloat16) for i in (1, 2))
    with msl.options(execute=False):
        if name in ("attend", "merge"):
            keys, values = packed()
            kernels.attend(normal(3, 1, 2, 1, 64, dtype=mx.bfloat16), keys, values, 1.0, None, None, None)
        elif name == "decode":
            kernels.decode(*packed())
        else:
            kernels.encode(k, v, None, format, 0)


def test_the_first_packed_page_compiles_nothing(fused_kernels, monkeypatch):
    """Place-holders have the dtypes of what they stand for, so that the kernels' signatures stay as they are."""
    seen, launch = {}, kernels._launch

    def recorded(what, inputs):
        seen.setdefault(what.name, set()).add((*(x.dtype for x in inputs), *map(str, what.template)))
        return launch(what, inputs)

    monkeypatch.setattr(kernels, "_launch", recorded)
    kernels.forget_launches()
    cache = TQKVCache(TQFormat(3, 4, window=32, page=32, sinks=0, centered_keys=True))
    for length in (20, 60):  # nothing packed, then two pages
        k, v = cache.update_and_fetch(normal(1, 1, 1, length, 64), normal(2, 1, 1, length, 64))
        kernels.attend(normal(3, 1, 2, 1, 64), k.rows, v.rows, 1.0, None, None, None)
    k, v = cache.keys_and_values()
    kernels.attend(normal(3, 1, 2, 1, 64), k.rows, v.rows, 1.0, None, None, None)
    assert cache.rows[0].layout.packed[0] > 0
    assert {name: len(variants) for name, variants in seen.items() if name in ("attend", "decode")} == {
        "attend": 1,
        "decode": 1,
    }


# ------------------------------------------------------------------ odd shapes


@pytest.mark.parametrize("format", ["default", "k4v4"])
@pytest.mark.parametrize("before", [0, 5])
def test_appending_no_tokens_changes_nothing(fused_kernels, format, before):
    cache = TQKVCache(format)
    if before:
        cache.update_and_fetch(normal(1, 1, 2, before, 64), normal(2, 1, 2, before, 64))
    k, v = cache.update_and_fetch(mx.zeros((1, 2, 0, 64)), mx.zeros((1, 2, 0, 64)))
    assert k.shape == v.shape == (1, 2, before, 64)
    assert cache.offset == before
    k, v = cache.update_and_fetch(normal(3, 1, 2, 4, 64), normal(4, 1, 2, 4, 64))
    q = normal(5, 1, 4, 1, 64)
    want = attention64(q, decode64(k.rows), decode64(v.rows), 0.125)
    assert max_error(mlx_tq.attention(q, k.rows, v.rows, scale=0.125), want) < TIGHT


@pytest.mark.parametrize("shape", [(0, 2, 4, 64), (1, 0, 4, 64)])
def test_no_batch_rows_or_heads_are_refused(shape):
    x = mx.zeros(shape)
    cache = TQKVCache()
    for call in (
        lambda: mlx_tq.encode_keys(x),
        lambda: mlx_tq.encode_values(x),
        lambda: cache.update_and_fetch(x, x),
    ):
        with pytest.raises(ValueError, match=r"must have at least one batch row and one head, got \("):
            call()
    assert cache.empty()


def test_masks_of_few_elements_and_any_strides(path):
    keys, values = packed()
    q = normal(3, 1, 4, 3, 64)
    k, v = decode64(keys), decode64(values)
    additive = normal(4, 40, 3)
    for mask in (
        mx.array(True),
        mx.array(-1.0),
        mx.array([[True], [False], [True]]),
        mx.array([[[0.5]], [[-1.0]], [[2.0]], [[0.0]]], mx.float16),
        mx.array(np.random.default_rng(1).random((40, 3)) < 0.5).T,
        additive.T,
        additive.astype(mx.bfloat16).T[None, None],
        mx.broadcast_to(mx.array([[True], [False], [True]]), (3, 40)),
    ):
        assert max_error(path(q, keys, values, scale=0.125, mask=mask), attention64(q, k, v, 0.125, mask)) < TIGHT


def test_strided_queries(path):
    keys, values = packed()
    q = normal(3, 1, 3, 4, 64).swapaxes(1, 2)
    want = attention64(q, decode64(keys), decode64(values), 0.125)
    assert max_error(path(q, keys, values, scale=0.125), want) < TIGHT


def test_more_causal_queries_than_columns(path):
    keys, values = packed(5)
    q = normal(3, 1, 4, 9, 64)
    want = attention64(q, decode64(keys), decode64(values), 0.125, "causal")
    got = path(q, keys, values, scale=0.125, mask="causal")
    assert max_error(got, want) < TIGHT
    assert not np.array(got[:, :, :4]).any()


def test_masks_beyond_32_bit_strides_are_refused(fused_kernels):
    keys, values = packed()
    mask = mx.broadcast_to(mx.array(True), (1, 4, 1 << 26, 40))  # never evaluated
    q = mx.broadcast_to(mx.array(0.0), (1, 4, 1 << 26, 64))
    with pytest.raises(ValueError, match="mask must have strides below"):
        kernels._attend_part(q, keys, values, 1.0, mask, None, None, 40)


def test_views_of_more_rows_than_a_launch_decodes(fused_kernels):
    """The dense view of a huge cache is seldom read: making it must not raise."""
    tokens = 1 << 26
    place = mx.broadcast_to(mx.array(0.0), (1, 1, tokens, 16))  # never evaluated
    rows = [
        PackedRows(kind, TQFormat(), 16, 0, mx.float32, None, place, Layout.uniform(1, 0, 0, tokens), 1)
        for kind in ("keys", "values")
    ]
    assert views(*rows)[0].shape == (1, 1, tokens, 16)


@pytest.mark.parametrize("mask", [None, "causal", "rows", "columns"])
@pytest.mark.parametrize("length", [1, 7])
def test_long_prompts_take_several_launches(fused_kernels, monkeypatch, mask, length):
    """No launch runs for seconds: a prompt is cut where it has too many scores, here to 1 or 3 rows at a time."""
    keys, values = packed(5)
    q = normal(3, 1, 4, length, 64)
    mask = {"rows": normal(4, length, 1), "columns": normal(4, 1, 4, 1, 5)}.get(mask, mask)
    want = attention64(q, decode64(keys), decode64(values), 0.125, mask)
    launches, launch = [], kernels._launch
    monkeypatch.setattr(kernels, "_launch", lambda what, inputs: launches.append(what.name) or launch(what, inputs))
    monkeypatch.setattr(kernels.mx, "compile", lambda function: function)  # else a graph is launched unseen
    kernels.forget_launches()
    for rows in (1, 3):
        monkeypatch.setattr(kernels, "_MAX_SCORES", 4 * 5 * rows)
        launches.clear()
        assert max_error(mlx_tq.attention(q, keys, values, scale=0.125, mask=mask), want) < 2 * TIGHT
        assert launches.count("attend") == -(-length // rows)


def test_partial_results_of_more_elements_than_a_dimension_takes(monkeypatch):
    """Nothing is evaluated: arrays of these shapes would take gigabytes."""
    zeros = lambda shape, dtype=mx.float32: mx.broadcast_to(mx.zeros((), dtype), shape)  # noqa: E731
    shapes = {}

    def launched(what, inputs):
        shapes[what.name] = what.shapes
        return [zeros(shape, dtype) for shape, dtype in zip(what.shapes, what.dtypes, strict=True)]

    monkeypatch.setattr(kernels, "_launch", launched)
    monkeypatch.setattr(kernels.mx, "compile", lambda function: function)
    monkeypatch.setattr(kernels, "backend", lambda: "metal")
    monkeypatch.setattr(kernels, "self_test", lambda device: kernels.SelfTest(None, True, None))
    kernels.forget_launches()
    format, layout = TQFormat.preset("k4v4"), Layout.uniform(4096, 0, 128, 4)
    rows = []
    for kind in ("keys", "values"):
        parts = region_shapes(format, kind, 128, mx.float32).items()
        regions = Regions(**{name: zeros((4096, 8, 128 // span, *row), dtype) for name, (row, dtype, span) in parts})
        exact = zeros((4096, 8, 32, 128))
        rows.append(PackedRows(kind, format, 128, 0, mx.float32, regions, exact, layout, 8))
    q = zeros((4096, 32, 64, 128))
    assert kernels.attend(q, *rows, 0.1, None, None, None).shape == q.shape
    assert prod(shapes["attend"][0]) >= 1 << 31
    kernels.forget_launches()


# ------------------------------------------------------------------ options


@pytest.mark.parametrize("scale", [None, "1", float("nan"), float("inf")])
def test_a_bad_scale_is_named(scale):
    with pytest.raises(ValueError, match="scale must be a finite number, got"):
        mlx_tq.attention(normal(3, 1, 2, 1, 64), *packed(), scale=scale)


@pytest.mark.parametrize("softcap", [0, -1.0, "1", float("nan"), float("inf")])
def test_a_bad_softcap_is_named(softcap):
    with pytest.raises(ValueError, match="softcap must be a positive, finite number or None, got"):
        mlx_tq.attention(normal(3, 1, 2, 1, 64), *packed(), scale=1.0, softcap=softcap)


def test_keys_and_values_of_different_formats(path):
    """Kernels read both with one set of parameters, so these take MLX ops."""
    keys, _ = packed(format="tq3")
    _, values = packed(format="k4v4")
    q = normal(3, 1, 4, 3, 64)
    want = attention64(q, decode64(keys), decode64(values), 0.125)
    assert max_error(path(q, keys, values, scale=0.125), want) < TIGHT


def test_different_formats_are_explained_and_cannot_be_required(fused_kernels):
    keys, _ = packed(format="tq3")
    _, values = packed(format="k4v4")
    assert mlx_tq.explain(keys, values) == "MLX ops: keys and values are in different formats"
    with pytest.raises(ValueError, match='fused="require", but keys and values are in different formats'):
        mlx_tq.attention(normal(3, 1, 4, 3, 64), replace(keys, fused="require"), values, scale=1.0)


def test_explain_takes_caches_without_tokens():
    used = TQKVCache()
    used.update_and_fetch(normal(1, 1, 2, 3, 64), normal(2, 1, 2, 3, 64))
    assert mlx_tq.explain(TQKVCache()) == "no tokens yet"
    lines = mlx_tq.explain([TQKVCache(), used, object()]).splitlines()
    assert lines[0] == "layer 0: no tokens yet"
    assert lines[1] == "layer 1: " + mlx_tq.explain(used)
    assert lines[2] == "layer 2: object, not compressed"
    assert mlx_tq.explain([used] * 3 + [TQKVCache()] * 2).splitlines() == [
        "layers 0-2: " + mlx_tq.explain(used),
        "layers 3-4: no tokens yet",
    ]
    assert mlx_tq.explain([]) == ""


@pytest.mark.parametrize("what", [None, "x", "packed keys", "rows"])
def test_explain_refuses_anything_else(what):
    keys, values = packed()
    what = {"packed keys": keys, "rows": (keys, values)}.get(what, what)
    with pytest.raises(ValueError, match="keys and values must be PackedRows, or keys a cache or a list of caches"):
        mlx_tq.explain(what)


# ------------------------------------------------------------------ views


def scaled_dot_product(q, k, v):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125)


def multiply(x):
    x *= 3


def clear(x):
    x[:, :, 0] = 0


@pytest.mark.parametrize("change", [multiply, clear])
@pytest.mark.parametrize("which", [0, 1])
def test_a_view_changed_in_place_counts_as_changed(change, which):
    cache = TQKVCache("k4v4")
    pair = cache.update_and_fetch(normal(1, 1, 2, 5, 64), normal(2, 1, 2, 5, 64))
    plain = [mx.array(x) for x in pair]
    assert isinstance(pair[which], TQView)
    change(pair[which])
    change(plain[which])
    q = normal(3, 1, 4, 1, 64)
    assert mx.allclose(scaled_dot_product(q, *pair), scaled_dot_product(q, *plain), atol=1e-5)
    assert cache.keys_and_values()[which].rows is not None


def test_copies_of_views_are_plain_numbers():
    cache = TQKVCache()
    pair = cache.update_and_fetch(normal(1, 1, 2, 5, 64), normal(2, 1, 2, 5, 64))
    q = normal(3, 1, 4, 1, 64)
    want = scaled_dot_product(q, *pair)
    for twin in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert mx.allclose(scaled_dot_product(q, *map(twin, pair)), want, atol=1e-5)


# ------------------------------------------------------------------ threads


def test_a_thread_with_a_stream_of_its_own_uses_what_another_made():
    cache, failures = TQKVCache(), []
    cache.update_and_fetch(normal(1, 1, 2, 150, 64), normal(2, 1, 2, 150, 64))
    mx.eval(cache.state[1:])

    def generate():
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                for step in range(3):
                    k, v = cache.update_and_fetch(normal(step, 1, 2, 150, 64), normal(step, 1, 2, 150, 64))
                    mx.eval(scaled_dot_product(normal(3, 1, 4, 1, 64), k, v), cache.state[1:])
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    thread.join()
    assert not failures
    assert cache.offset == 600


# ------------------------------------------------------------------ mlx-lm


def test_a_copied_model_outlives_the_one_it_was_copied_from():
    module = pytest.importorskip("mlx_lm.models.cache")
    model = ModelOfItsOwn()
    mlx_tq.enable(model)
    twin = copy.deepcopy(model)
    mlx_tq.disable(model)
    del model
    gc.collect()
    assert type(module.make_prompt_cache(twin)[0]) is TQKVCache
    mlx_tq.disable(twin)
    assert type(module.make_prompt_cache(twin)[0]) is module.KVCache


def test_disable_ignores_what_was_never_enabled():
    for other in (None, 5, object()):
        mlx_tq.disable(other)


class Model:
    """As much of a model as `enable` looks at."""

    def __init__(self, make_cache=None):
        self.layers = [None] * 2
        if make_cache is not None:
            self.make_cache = make_cache


class ModelOfItsOwn(Model):
    def make_cache(self):
        from mlx_lm.models.cache import KVCache, RotatingKVCache

        return [KVCache(), RotatingKVCache(max_size=8)]


@pytest.mark.parametrize("kind", ["plain", "class", "instance"])
def test_making_caches_leaves_the_model_alone(kind):
    """Two threads may ask for caches at once, so `make_cache` stays where it is while it is called."""
    module = pytest.importorskip("mlx_lm.models.cache")
    own = (lambda: [module.KVCache()]) if kind == "instance" else None
    model = ModelOfItsOwn() if kind == "class" else Model(own)
    names = {
        "plain": ["TQKVCache", "TQKVCache"],
        "class": ["TQKVCache", "RotatingKVCache"],
        "instance": ["TQKVCache"],
    }[kind]
    before, made, changes = dict(model.__dict__), [], []
    with mlx_tq.enable(model):
        mlx_tq.enable(model, "k4v4")  # twice
        enabled = model.make_cache
        type(model).__delattr__ = lambda self, name: changes.append(name)
        try:
            made = module.make_prompt_cache(model)
        finally:
            del type(model).__delattr__
        assert model.make_cache is enabled
    assert [type(c).__name__ for c in made] == names
    assert made[0].format == TQFormat.preset("k4v4")
    assert not changes
    assert model.__dict__ == before
