import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from conftest import fused, ops
from oracle import (
    TIGHT,
    attention64,
    bits_of,
    build_rows,
    decode64,
    live_parts,
    max_error,
    normal,
    poison_rows,
    same_bits,
    tight,
    to64,
)

from mlx_tq import TQFormat, TQKVCache, attention, decode_keys, decode_values, encode_keys, encode_values, kernels
from mlx_tq.codec import Layout, PackedRows
from mlx_tq.packing import Regions, region_shapes

DTYPES = (mx.float16, mx.bfloat16, mx.float32)
FORMATS = {
    "k4v4": TQFormat.preset("k4v4"),
    "tq3": TQFormat.preset("tq3"),
    "k3v2": TQFormat(3, 2, codebook="lloyd"),
    "centered": TQFormat(3, 4, qjl=True, kappa="unbiased", centered_keys=True, page=32, scale_dtype="float16"),
    "raw keys": TQFormat(16, 3),
    "raw values": TQFormat(2, 16, qjl=True),
}


def encode(k, v, format="k4v4", layer_index=0):
    format = FORMATS.get(format, format)
    return encode_keys(k, format, layer_index=layer_index), encode_values(v, format, layer_index=layer_index)


def inputs(b=1, n_heads=4, n_kv=2, length=1, total=300, dim=64, value_dim=None, dtype=mx.float32, seed=0):
    """Random q, k and v."""
    q = normal(seed, b, n_heads, length, dim, dtype=dtype)
    k = normal(seed + 1, b, n_kv, total, dim, dtype=dtype)
    return q, k, normal(seed + 2, b, n_kv, total, value_dim or dim, dtype=dtype)


def check(path, q, keys, values, bound=TIGHT, scale=None, **options):
    """Runs a path against float64 attention over the decoded rows; returns the result."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = path(q, keys, values, scale=scale, **options)
    assert out.dtype == q.dtype
    want = attention64(q, decode64(keys), decode64(values), scale, pad=keys.layout.pad, **options)
    assert max_error(out, want) < bound
    return out


def causal(length, total):
    """The causal mask as a bool array: the last query sees all columns."""
    return mx.array(np.tril(np.ones((length, total), bool), k=total - length))


def plain(q, keys, values, scale, mask=None, softcap=None, dtype=mx.float32):
    """Attention over the decoded rows, written in MLX operations of `dtype`."""
    k, v = (mx.array(decode64(r).astype(np.float32)).astype(dtype) for r in (keys, values))
    groups = q.shape[1] // k.shape[1]
    scores = (q.astype(dtype) * scale) @ mx.repeat(k, groups, axis=1).swapaxes(-1, -2)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    if mask is not None:
        scores = mx.where(mask, scores, mx.finfo(dtype).min) if mask.dtype == mx.bool_ else scores + mask.astype(dtype)
    return mx.softmax(scores, axis=-1, precise=True) @ mx.repeat(v, groups, axis=1)


# ------------------------------------------------------------------ lengths and shapes


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("total", (1, 7, 255, 256, 257, 600))
@pytest.mark.parametrize(("n_heads", "n_kv"), [(2, 2), (8, 2), (5, 1)])
def test_against_dense_attention(path, total, n_heads, n_kv, format):
    q, k, v = inputs(1, n_heads, n_kv, min(total, 3), total)
    keys, values = encode(k, v, format)
    for mask in (None, "causal"):
        check(path, q, keys, values, mask=mask)


@pytest.mark.parametrize("total", (31, 32, 33, 255, 256, 257, 511, 512, 513, *range(1023, 1029), 2047, 2048, 2049))
def test_lengths_around_blocks(path, total):
    q, k, v = inputs(1, 4, 1, 8, total, seed=total)
    keys, values = encode(k, v)
    for length in range(1, 9):
        check(path, q[:, :, :length], keys, values, mask="causal")


@pytest.mark.parametrize("dim", (64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576))
def test_widths(path, dim):
    q, k, v = inputs(2, 2, 1, 2, 70, dim, seed=dim)
    check(path, q, *encode(k, v, layer_index=4), bound=tight(dim), mask="causal")


@pytest.mark.parametrize(("dim", "value_dim"), [(192, 128), (64, 512), (96, 64), (64, 80)])
def test_values_of_another_width(path, dim, value_dim):
    q, k, v = inputs(2, 4, 2, 3, 130, dim, value_dim)
    assert check(path, q, *encode(k, v), tight(max(dim, value_dim)), mask="causal").shape == (2, 4, 3, value_dim)


@pytest.mark.parametrize(
    ("n_heads", "n_kv"), [(9, 3), (28, 4), (12, 1), (14, 2), (71, 1), *((8, n) for n in (1, 2, 4, 8))]
)
def test_groups(path, n_heads, n_kv):
    q, k, v = inputs(2, n_heads, n_kv, 2, 60)
    v = v + 10 * mx.arange(n_kv)[None, :, None, None]  # values tell their heads apart
    check(path, q, *encode(k, v), bound=TIGHT * 10 * n_kv, mask="causal")


@pytest.mark.parametrize("n_kv", (3, 5, 6, 7))
def test_odd_numbers_of_heads(path, n_kv):
    q, k, v = inputs(1, 2 * n_kv, n_kv, 1, 40)
    check(path, q, *encode(k, v))


@pytest.mark.parametrize("total", (100, 8192))
def test_a_batch_equals_its_rows(path, total):
    q, k, v = inputs(2, 2, 1, 1, total)
    both = path(q, *encode(k, v), scale=0.125)
    for i in (0, 1):
        alone = path(q[i : i + 1], *encode(k[i : i + 1], v[i : i + 1]), scale=0.125)
        assert max_error(both[i : i + 1], to64(alone)) < TIGHT


def test_chained_layers_equal_evaluated_ones(path):
    q, k, v = inputs(1, 6, 3, 4, 50)
    results = []
    for evaluate in (True, False):
        x = q
        for layer in range(3):
            keys, values = encode(k + 0.1 * layer, v, layer_index=layer)
            x = x + path(x, keys, values, scale=0.125, mask="causal")
            if evaluate:
                mx.eval(x)
        results.append(x)
    assert same_bits(*results)


@pytest.mark.parametrize(("length", "total"), [(1, 16), (3, 10), (16, 16), (5, 2)])
def test_causal_is_aligned_at_the_bottom_right(path, length, total):
    q, k, v = inputs(2, 4, 2, length, total)
    keys, values = encode(k, v)
    explicit = causal(length, total)
    out = check(path, q, keys, values, mask="causal")
    assert max_error(out, to64(check(path, q, keys, values, mask=explicit))) < TIGHT
    hidden = max(0, length - total)
    size = np.linalg.norm(to64(out), axis=-1)
    assert (size[:, :, :hidden] == 0).all() and (size[:, :, hidden:] > 1).all()


@pytest.mark.parametrize("mask", (None, "causal", "bool", "row"))
def test_more_queries_than_one_part(path, mask):
    q, k, v = inputs(1, 2, 1, 700, 900)
    if mask == "bool":
        mask = mx.array(np.random.default_rng(0).random((700, 900)) < 0.7)
    elif mask == "row":
        mask = mx.array(np.random.default_rng(0).random((1, 900)) < 0.7)
    check(path, q, *encode(k, v), mask=mask)


def test_nothing_to_see_and_nothing_to_ask(path):
    q, k, v = inputs(2, 4, 2, 3, 0)
    keys, values = encode(k, v)
    assert (to64(path(q, keys, values, scale=1.0)) == 0).all()
    assert path(q, keys, values, scale=1.0, sinks=mx.zeros(4), mask="causal").shape == (2, 4, 3, 64)
    q, k, v = inputs(2, 4, 2, 0, 30)
    assert path(q, *encode(k, v), scale=1.0, mask="causal").shape == (2, 4, 0, 64)
    q, k, v = inputs(2, 4, 2, 100, 0, dtype=mx.float16)  # enough queries for rows that are decoded first
    assert (to64(path(q, *encode(k, v), scale=1.0)) == 0).all()


def test_one_of_everything(path):
    q, k, v = inputs(1, 1, 1, 1, 1, 64)
    for options in ({}, {"mask": mx.ones((1, 1), mx.bool_)}, {"mask": mx.zeros((1,))}, {"sinks": mx.zeros((1,))}):
        check(path, q, *encode(k, v), **options)


@pytest.fixture
def small_blocks(monkeypatch):
    """MLX ops in blocks of one page, so that short rows take many of them."""
    monkeypatch.setattr(sys.modules["mlx_tq.attention"], "_BLOCK_TOKENS", 32)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("total", (31, 32, 33, 64, 255, 257, 600))
def test_many_blocks(format, total):
    q, k, v = inputs(2, 4, 2, 5, total)
    keys, values = encode(k, v, replace(FORMATS[format], page=32))
    ordered = mx.sort(normal(7, total))  # the largest score comes last, or first
    for options in (
        {},
        {"mask": "causal"},
        {"mask": ordered},
        {"mask": -ordered},
        {"softcap": 2.0},
        {"sinks": mx.ones(4)},
    ):
        check(ops, q, keys, values, **options)


# ------------------------------------------------------------------ masks


B, H, L, S = 2, 4, 5, 300


def random_mask(*shape, seed=0):
    mask = np.random.default_rng(seed).random(shape) < 0.6
    mask[..., : min(2, shape[-1])] = True  # no query is left with nothing
    return mask


BOOL_MASKS = {
    "L S": random_mask(L, S),
    "S": random_mask(S),
    "1 S": random_mask(1, S),
    "B 1 L S": random_mask(B, 1, L, S),
    "B H L S": random_mask(B, H, L, S),
    "1 H 1 S": random_mask(1, H, 1, S),
    "H L S": random_mask(H, L, S),
    "B 1 1 S": random_mask(B, 1, 1, S),
    "all": np.ones((1, 1), bool),
    "first 256 hidden": np.broadcast_to(np.arange(S) >= 256, (L, S)),
    "last 256 hidden": np.broadcast_to(np.arange(S) < S - 256, (L, S)),
    "only one": np.broadcast_to(np.arange(S) == 150, (L, S)),
    "window": np.tril(np.ones((L, S), bool), S - L) & ~np.tril(np.ones((L, S), bool), S - L - 8),
}


@pytest.mark.parametrize("format", ("k4v4", "tq3"))
@pytest.mark.parametrize("name", BOOL_MASKS)
def test_bool_masks(path, name, format):
    q, k, v = inputs(B, H, 2, L, S)
    check(path, q, *encode(k, v, format), mask=mx.array(BOOL_MASKS[name]))


@pytest.mark.parametrize(
    ("lowest", "dtype"),
    [("-inf", mx.float32), ("-inf", mx.float16), ("min", mx.bfloat16), ("min", mx.float32), ("-1e4", mx.float16)],
)
@pytest.mark.parametrize("name", BOOL_MASKS)
def test_additive_masks(path, name, lowest, dtype):
    q, k, v = inputs(B, H, 2, L, S)
    keys, values = encode(k, v)
    value = {"-inf": -np.inf, "min": float(mx.finfo(dtype).min), "-1e4": -1e4}[lowest]
    visible = BOOL_MASKS[name]
    mask = mx.where(mx.array(visible), 0.0, value).astype(dtype)
    out = check(path, q, keys, values, mask=mask)
    assert max_error(out, to64(path(q, keys, values, scale=0.125, mask=mx.array(visible)))) < TIGHT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(L, S), (B, H, L, S), (1, H, 1, S), (L, 1)])
def test_additive_biases(path, shape, dtype):
    q, k, v = inputs(B, H, 2, L, S)
    check(path, q, *encode(k, v), mask=normal(5, *shape, dtype=dtype))


def test_a_constant_bias_changes_nothing_and_all_scores_may_be_far_below_zero(path):
    q, k, v = inputs(B, H, 2, L, S)
    keys, values = encode(k, v)
    want = to64(path(q, keys, values, scale=0.125))
    for far in (-64.0, -1024.0):
        # A bias of this size costs the scores the bits below its own last one.
        bound = max(TIGHT, 2 * -far * 2**-23)
        assert max_error(path(q, keys, values, scale=0.125, mask=mx.full((1, S), far)), want) < bound


@pytest.mark.parametrize("kind", ("bool", "-inf", "min"))
@pytest.mark.parametrize("sinks", (None, 0.0))
def test_fully_masked_rows_are_finite(path, kind, sinks):
    q, k, v = inputs(B, H, 2, L, S)
    keys, values = encode(k, v)
    visible = np.array(BOOL_MASKS["B H L S"])
    visible[0, :, 2] = False
    visible[1, 3] = False
    mask = mx.array(visible)
    if kind != "bool":
        mask = mx.where(mask, 0.0, -mx.inf if kind == "-inf" else mx.finfo(mx.float32).min)
    options = {} if sinks is None else {"sinks": mx.full((H,), sinks)}
    out = to64(path(q, keys, values, scale=0.125, mask=mask, **options))
    assert np.isfinite(out).all()
    masked = ~visible.any(axis=-1)
    if kind != "min" or sinks is not None:
        assert (out[masked] == 0).all()
    want = attention64(q, decode64(keys), decode64(values), 0.125, mx.array(visible), **options)
    assert np.abs(out - want)[~masked].max() < TIGHT


def test_everything_masked(path):
    q, k, v = inputs(B, H, 2, L, S)
    for mask in (mx.zeros((L, S), mx.bool_), mx.full((L, S), -mx.inf), mx.zeros((1, 1), mx.bool_)):
        assert (to64(path(q, *encode(k, v), scale=0.125, mask=mask)) == 0).all()


# ------------------------------------------------------------------ sinks, soft-cap and wide scores


@pytest.mark.parametrize("sinks", (-np.inf, -1e9, -30.0, 0.0, 8.0, 88.0, "mixed"))
@pytest.mark.parametrize("mask", (None, "causal", "first 256 hidden", "nothing"))
def test_sinks(path, sinks, mask):
    q, k, v = inputs(B, H, 2, L, S)
    keys, values = encode(k, v)
    logits = mx.array([-1e9, 0.0, 8.0, -3.0] if sinks == "mixed" else [sinks] * H)
    if mask not in (None, "causal"):
        mask = mx.zeros((L, S), mx.bool_) if mask == "nothing" else mx.array(BOOL_MASKS[mask])
    check(path, q, keys, values, mask=mask, sinks=logits)
    if sinks in (-np.inf, -1e9):
        want = to64(path(q, keys, values, scale=0.125, mask=mask))
        assert max_error(path(q, keys, values, scale=0.125, mask=mask, sinks=logits), want) < TIGHT


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_of_any_dtype(path, dtype):
    q, k, v = inputs(B, H, 2, L, S)
    check(path, q, *encode(k, v), sinks=mx.array([0.5, -1, 2, 3.25]).astype(dtype))


def test_a_bad_sink_shows(path):
    q, k, v = inputs(B, H, 2, L, S)
    out = to64(path(q, *encode(k, v), scale=0.125, sinks=mx.array([0.0, np.nan, 0.0, 0.0])))
    assert np.isnan(out).all(axis=(0, 2, 3)).tolist() == [False, True, False, False]


@pytest.mark.parametrize("softcap", (1.0, 20.0, 50.0))
@pytest.mark.parametrize("mask", (None, "causal"))
def test_softcap(path, softcap, mask):
    q, k, v = inputs(B, H, 2, L, S)
    keys, values = encode(k, v)
    check(path, q, keys, values, mask=mask, softcap=softcap)


def no_worse_than_plain(path, cases, scale, **options):
    """Over all cases, our error is at most twice that of plain float32 attention over the same rows."""
    ours, plains = [], []
    for q, keys, values in cases:
        want = attention64(q, decode64(keys), decode64(values), scale, **options)
        ours.append(to64(path(q, keys, values, scale=scale, **options)) - want)
        plains.append(to64(plain(q, keys, values, scale, **options)) - want)
    assert np.isfinite(ours).all()
    # One close call between two keys can make up most of an error, so they are pooled.
    assert np.sqrt(np.mean(np.square(ours))) <= 2 * np.sqrt(np.mean(np.square(plains))) + 1e-7


@pytest.mark.parametrize("spread", (10, 40, 200, 1000))
@pytest.mark.parametrize("mask", (None, "first 256 hidden", "L S"))
@pytest.mark.parametrize("softcap", (None, 50.0))
def test_scores_of_wide_range(path, spread, mask, softcap):
    cases = []
    for seed in range(0, 600 if spread == 1000 else 40, 10):  # close calls are fewer and worse there: pool more
        q, k, v = inputs(B, H, 2, L, S, seed=seed)
        cases.append((q * spread, *encode(k, v)))
    mask = None if mask is None else mx.array(BOOL_MASKS[mask])
    no_worse_than_plain(path, cases, 0.125, mask=mask, softcap=softcap)


def test_all_scores_far_below_zero(path):
    cases = []
    for seed in range(0, 40, 10):
        q, k, v = inputs(B, H, 2, L, S, seed=seed)
        u = normal(seed + 5, 64)
        keys, values = encode(k - 4 * u, v)
        cases.append((q + 4 * u, keys, values))
        assert (to64(q + 4 * u) @ np.repeat(decode64(keys), 2, axis=1).swapaxes(-1, -2)).max() < -100
    no_worse_than_plain(path, cases, 1.0)


@pytest.mark.parametrize("shape", ("rising", "falling", "valley", "hill"))
def test_scores_that_change_along_the_sequence(path, shape):
    """The running maximum changes in every block, or only in the first."""
    slope = mx.linspace(-40, 40, 600)
    mask = {"rising": slope, "falling": -slope, "valley": mx.abs(slope), "hill": -mx.abs(slope)}[shape][None]
    cases = []
    for seed in range(0, 40, 10):
        q, k, v = inputs(1, 2, 1, 3, 600, seed=seed)
        cases.append((q, *encode(k, v)))
    no_worse_than_plain(path, cases, 0.125, mask=mask)


@pytest.mark.parametrize("spread", (1, 100))
@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16))
@pytest.mark.parametrize("format", ("k4v4", "tq3"))
def test_half_precision_queries(path, monkeypatch, dtype, spread, format):
    """Our error is at most twice that of half-precision attention over the same decoded rows."""
    monkeypatch.setattr(kernels, "_has_mma", lambda device: False)  # whose bounds are in test_mma.py
    kernels.forget_launches()
    q, k, v = inputs(B, H, 2, L, S, dtype=dtype)
    q = q * spread
    keys, values = encode(k, v, format)
    want = attention64(q, decode64(keys), decode64(values), 0.125)
    out = path(q, keys, values, scale=0.125)
    assert out.dtype == dtype
    half = max_error(plain(q, keys, values, 0.125, dtype=dtype), want)
    assert max_error(out, want) <= 2 * half
    assert max_error(out, want) <= float(mx.finfo(dtype).eps) / 2 * np.abs(want).max() + 2 * spread * TIGHT


@pytest.mark.parametrize("scale_dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("rows", DTYPES)
@pytest.mark.parametrize("query", DTYPES)
def test_the_result_has_the_dtype_of_the_query(path, query, rows, scale_dtype):
    q, k, v = inputs(dtype=rows)
    out = path(q.astype(query), *encode(k, v, TQFormat(scale_dtype=scale_dtype)), scale=0.125)
    assert out.dtype == query and out.shape == q.shape


def test_scale(path):
    q, k, v = inputs(B, H, 2, L, S)
    keys, values = encode(k, v)
    for scale in (0.01, 0.2, -0.125, 0.0):
        check(path, q, keys, values, scale=scale)


# ------------------------------------------------------------------ memory that is not ours to read


LAYOUTS = {
    "packed only": Layout.uniform(2, 0, 96, 0),
    "exact only": Layout.uniform(2, 4, 0, 30),
    "first and packed": Layout.uniform(2, 4, 64, 0),
    "all three": Layout.uniform(2, 4, 64, 40),
    "padded alike": Layout((3, 3), (4, 4), (64, 64), (40, 40)),
    "padded": Layout((0, 3), (4, 4), (64, 64), (43, 40)),
    "unlike pages": Layout((0, 32), (4, 4), (96, 64), (40, 40)),
    "same columns": Layout((0, 0), (4, 4), (32, 96), (104, 40)),
    "one packed": Layout((66, 0), (4, 4), (0, 64), (30, 32)),
    "short and long": Layout((128, 0, 69), (1, 4, 4), (0, 96, 0), (1, 30, 57)),
    "far apart": Layout((0, 300, 200), (4, 4, 2), (288, 0, 64), (40, 28, 66)),
    "no first": Layout((0, 5), (0, 0), (64, 32), (7, 34)),
    "empty row": Layout((40, 0), (0, 4), (0, 32), (0, 4)),
}
RAGGED = {
    "k4v4": TQFormat(page=32),
    "tq3": TQFormat.preset("tq3", page=32),
    "centered": FORMATS["centered"],
    "raw values": TQFormat(3, 16, page=32),
    "raw keys": TQFormat(16, 2, page=32),
}


def ragged(name, format, dim=64, n_kv=2):
    """(per row keys, per row values, packed keys, packed values) of a layout."""
    layout, format = LAYOUTS[name], RAGGED[format]
    k, v = [], []
    for b in range(len(layout.pad)):
        tokens = layout.length - layout.pad[b]
        k.append(normal(10 + b, 1, n_kv, tokens, dim))
        v.append(normal(20 + b, 1, n_kv, tokens, dim))
    return k, v, build_rows("keys", k, format, layout), build_rows("values", v, format, layout)


@pytest.mark.parametrize("format", RAGGED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(path, name, format):
    _, _, keys, values = ragged(name, format)
    b, total = len(keys.layout.pad), keys.layout.length
    q = normal(1, b, 4, 3, 64)
    masks = [
        None,
        "causal",
        mx.array(random_mask(3, total)),
        mx.array(random_mask(b, 4, 3, total)),
        normal(2, b, 1, 1, total),
    ]
    for mask in masks:
        check(path, q, keys, values, mask=mask)
    check(path, q, keys, values, mask="causal", sinks=mx.array([-1.0, 0.0, 8.0, 2.0]))


@pytest.mark.parametrize("format", RAGGED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_decoding_of_a_layout(name, format):
    _, _, keys, values = ragged(name, format)
    for rows, decode in ((keys, decode_keys), (values, decode_values)):
        got = decode(poison_rows(rows, 1))
        assert max_error(got, decode64(rows)) < 3e-6
        assert all((to64(got)[b, :, :pad] == 0).all() for b, pad in enumerate(rows.layout.pad))


@pytest.mark.parametrize("format", RAGGED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_a_layout_equal_solo_rows(path, name, format):
    k, v, keys, values = ragged(name, format)
    layout = keys.layout
    q = normal(1, len(layout.pad), 4, 3, 64)
    both = path(q, keys, values, scale=0.125, mask="causal")
    for b, (own_k, own_v) in enumerate(zip(k, v, strict=True)):
        solo = Layout((0,), (layout.first[b],), (layout.packed[b],), (layout.recent[b],))
        rows = (build_rows(n, [x], keys.format, solo) for n, x in (("keys", own_k), ("values", own_v)))
        assert max_error(both[b : b + 1], to64(path(q[b : b + 1], *rows, scale=0.125, mask="causal"))) < TIGHT


@pytest.mark.parametrize("name", LAYOUTS)
def test_masks_of_a_layout_are_read_within_their_columns(name, monkeypatch):
    """Spare slots of a short row may lie past the last column."""
    _, _, keys, values = ragged(name, "k4v4")
    b, total = len(keys.layout.pad), keys.layout.length
    original, widest = mx.take_along_axis, []

    def checked(array, index, axis):
        widest.append(mx.max(index).item() - array.shape[axis])
        return original(array, index, axis)

    monkeypatch.setattr(mx, "take_along_axis", checked)
    mask = mx.array(random_mask(b, 1, 2, total))
    attention(normal(0, b, 2, 2, 64), *(replace(rows, fused="never") for rows in (keys, values)), scale=1.0, mask=mask)
    assert all(excess < 0 for excess in widest)


@pytest.mark.parametrize("extra", (0, 3))
@pytest.mark.parametrize("format", RAGGED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_unused_slots_are_never_read(path, name, format, extra):
    _, _, keys, values = ragged(name, format)
    b = len(keys.layout.pad)
    q = normal(1, b, 4, 3, 64)
    full = mx.array(random_mask(b, 4, 3, keys.layout.length))
    for options in ({}, {"mask": "causal"}, {"mask": full}, {"softcap": 5.0, "sinks": mx.zeros(4)}):
        want = path(q, keys, values, scale=0.125, **options)
        got = path(q, poison_rows(keys, extra), poison_rows(values, extra), scale=0.125, **options)
        assert same_bits(got, want)


@pytest.mark.parametrize("poison", (np.nan, np.inf, 3e38))
@pytest.mark.parametrize("which", ("keys", "values", "q"))
def test_a_bad_row_touches_no_other_head_or_batch_row(path, which, poison):
    parts = dict(zip(("q", "keys", "values"), inputs(2, 4, 2, 3, 70), strict=True))
    layout = Layout.uniform(2, 4, 32, 34)

    def run():
        k, v = ([mx.array(parts[n][b : b + 1]) for b in (0, 1)] for n in ("keys", "values"))
        rows = (build_rows(n, x, TQFormat(page=32), layout) for n, x in (("keys", k), ("values", v)))
        return bits_of(path(mx.array(parts["q"]), *rows, scale=0.125, mask="causal"))

    clean = run()
    spoiled = np.array(parts[which])
    spoiled[0, 1, 1:] = poison
    parts[which] = mx.array(spoiled)
    got = run()
    heads = [0, 2, 3] if which == "q" else [0, 1]  # query heads 2 and 3 read KV head 1
    np.testing.assert_array_equal(got[0, heads], clean[0, heads])
    np.testing.assert_array_equal(got[1], clean[1])
    assert not np.array_equal(got, clean)


# ------------------------------------------------------------------ memory


def random_rows(kind, format, n_kv, total, dim):
    """Packed rows with random codes, made without ever holding the rows they stand for."""
    parts, rng = {}, np.random.default_rng(0)
    for name, (row, dtype, span) in region_shapes(format, kind, dim, mx.float16).items():
        shape = (1, n_kv, -(-total // span), *row)
        if dtype == mx.uint32:
            parts[name] = mx.array(rng.integers(0, 1 << 32, shape, dtype=np.uint32))
        else:
            parts[name] = mx.array(rng.random(shape, np.float32)).astype(dtype)
    layout = Layout.uniform(1, 0, total, 0)
    return PackedRows(kind, format, dim, 0, mx.float16, Regions(**parts), None, layout, n_kv)


def peak_of(path, n_heads, n_kv, length, total, dim, format="k4v4"):
    """Bytes that one call holds at most beyond its inputs."""
    q = normal(0, 1, n_heads, length, dim, dtype=mx.float16)
    keys, values = (random_rows(kind, FORMATS[format], n_kv, total, dim) for kind in ("keys", "values"))
    mx.eval(q, [a for rows in (keys, values) for a in rows.regions if a is not None])
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(path(q, keys, values, scale=dim**-0.5, mask="causal"))
    return mx.get_peak_memory() - held


# Lengths that only MLX ops, or a real GPU, get through in time.
long_only = pytest.mark.parametrize("path", [ops], ids=["ops"])


@long_only
def test_memory_of_a_long_prefill_does_not_grow_with_the_cache(path):
    """256 queries over 16384 tokens: no array of [H, L, S] or of all decoded rows exists."""
    short, long = peak_of(path, 8, 8, 256, 4096, 64), peak_of(path, 8, 8, 256, 16384, 64)
    assert long < 8 * 256 * 16384 * 4 / 2
    decoded = 8 * 16384 * 64 * 2
    assert long - short < decoded / 8


@long_only
@pytest.mark.parametrize("format", ("k4v4", "tq3", "centered"))
def test_memory_of_one_query_over_a_long_cache(path, format):
    decoded = 2 * 100_000 * 128 * 2  # one side, in float16
    assert peak_of(path, 8, 2, 1, 100_000, 128, format) < decoded / 2


@long_only
def test_a_million_tokens(path):
    """All but the last 300 of 2**20 tokens are hidden: the result is that of these 300 alone."""
    total, seen = 1 << 20, 300
    q = normal(0, 1, 2, 1, 64)
    rows = [random_rows(kind, FORMATS["k4v4"], 1, total, 64) for kind in ("keys", "values")]
    last = [
        replace(
            r,
            regions=Regions(**{n: a[:, :, -seen:] for n, a in live_parts(r).items()}),
            layout=Layout.uniform(1, 0, seen, 0),
        )
        for r in rows
    ]
    got = path(q, *rows, scale=0.125, mask=mx.arange(total)[None] >= total - seen)
    assert max_error(got, to64(path(q, *last, scale=0.125))) < TIGHT * 10  # scales up to 1: values up to 60


# ------------------------------------------------------------------ refusals


def refusals():
    q, k, v = inputs(2, 4, 2, 3, 40)
    keys, values = encode(k, v)
    ok = {"q": q, "keys": keys, "values": values}
    other = encode(k[:, :, :39], v[:, :, :39])
    return [
        (ok | {"q": q[0]}, "q must"),
        (ok | {"q": np.array(q)}, "q must"),
        (ok | {"q": q.astype(mx.int32)}, "q must"),
        (ok | {"q": q[..., :32]}, "head_dim"),
        (ok | {"q": q[:1]}, "batch"),
        (ok | {"q": q[:, :3]}, "n_heads"),
        (ok | {"keys": values}, "keys must"),
        (ok | {"values": keys}, "values must"),
        (ok | {"keys": k}, "keys must"),
        (ok | {"values": other[1]}, "same tokens"),
        (ok | {"values": encode(k[:, :1], v[:, :1])[1]}, "same tokens"),
        (ok | {"mask": "full"}, "mask must"),
        (ok | {"mask": mx.zeros((3, 40), mx.int32)}, "mask must"),
        (ok | {"mask": mx.zeros((3, 39))}, "mask must"),
        (ok | {"mask": mx.zeros((4, 40))}, "mask must"),
        (ok | {"mask": mx.zeros((3, 2, 3, 40))}, "mask must"),
        (ok | {"mask": mx.zeros((1, 2, 4, 3, 40))}, "mask must"),
        (ok | {"mask": np.zeros((3, 40), np.float32)}, "mask must"),
        (ok | {"sinks": mx.zeros((2,))}, "sinks must"),
        (ok | {"sinks": mx.zeros((1, 4))}, "sinks must"),
        (ok | {"sinks": 0.0}, "sinks must"),
        (ok | {"softcap": 0.0}, "softcap must"),
        (ok | {"softcap": -1.0}, "softcap must"),
        (ok | {"softcap": float("nan")}, "softcap must"),
    ]


@pytest.mark.parametrize(("options", "word"), refusals(), ids=lambda v: v if isinstance(v, str) else "")
def test_attention_refuses(options, word):
    options = dict(options)
    q, keys, values = (options.pop(n) for n in ("q", "keys", "values"))
    with pytest.raises(ValueError, match=word):
        attention(q, keys, values, scale=0.125, **options)


def test_fused_require_names_the_reason_on_the_cpu():
    q, k, v = inputs()
    keys, values = (replace(rows, fused="require") for rows in encode(k, v))
    if mx.default_device().type == mx.cpu:
        with pytest.raises(ValueError, match="fused"):
            attention(q, keys, values, scale=0.125)


def test_the_function_is_public():
    assert attention is sys.modules["mlx_tq"].attention


# ------------------------------------------------------------------ rows decoded first


def limit_decoding(monkeypatch, bytes_at_a_time, queries):
    monkeypatch.setattr(kernels, "_DENSE_BYTES", bytes_at_a_time)
    monkeypatch.setattr(kernels, "_DENSE_QUERIES", dict.fromkeys(kernels._DENSE_QUERIES, queries))


@pytest.mark.parametrize("bytes_at_a_time", ((1, 1), (1, 1 << 30)))
@pytest.mark.parametrize("mask", (None, "causal"))
@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16))
def test_many_queries_are_answered_over_decoded_rows(fused_kernels, monkeypatch, dtype, mask, bytes_at_a_time):
    """Heads one by one and all at once; some rows are exact, some packed, in two unlike batch rows."""
    limit_decoding(monkeypatch, bytes_at_a_time, (1, 1 << 20))
    monkeypatch.setattr(kernels, "_attend_part", None)  # which would launch attend
    layout = Layout((0, 0), (4, 2), (64, 96), (72, 42))
    format = TQFormat(3, 2, centered_keys=True, page=32)
    make = lambda kind, s: poison_rows(  # noqa: E731
        build_rows(kind, [normal(s + b, 1, 3, 140, 64, dtype=dtype) for b in range(2)], format, layout)
    )
    keys, values = make("keys", 1), make("values", 5)
    q = normal(9, 2, 6, 100, 64, dtype=dtype)
    want = attention64(q, decode64(keys), decode64(values), 0.125, mask)
    half = max_error(plain(q, keys, values, 0.125, causal(100, 140) if mask else None, dtype=dtype), want)
    assert max_error(attention(q, keys, values, scale=0.125, mask=mask), want) <= 2 * half


@pytest.mark.parametrize("device", ("metal", "cuda"))
def test_heads_decoded_at_a_time_keep_a_device_busy_in_little_memory(monkeypatch, device):
    monkeypatch.setattr(kernels, "backend", lambda: device)
    (_, wanted), (few, many) = kernels._DENSE_QUERIES[device], kernels._DENSE_BYTES
    tokens = lambda limit: int(limit) // (2 * 64 * 2)  # noqa: E731 - whose decoded rows take that

    def heads(query_rows, length, n_kv_heads=8):
        rows = PackedRows(
            "keys", TQFormat(4, 4), 64, 0, mx.float16, None, None, Layout.uniform(1, 0, length, 0), n_kv_heads
        )
        return kernels._heads_at_a_time(mx.zeros((1, n_kv_heads, query_rows, 64), mx.float16), rows)

    assert heads(wanted, tokens(few)) == 1  # enough rows of queries for one head
    assert heads(wanted // 2, tokens(few)) == 2
    assert heads(wanted // 3, tokens(few)) == 4  # two parts of four, not 3 + 3 + 2
    assert heads(wanted // 8, tokens(many / 2)) == 2  # or as many as fit
    assert heads(wanted // 8, tokens(2 * many)) == 1
    assert heads(wanted, tokens(few / 4)) == 4 and heads(wanted, 1) == 8  # heads of few bytes
    assert heads(1, 1, n_kv_heads=1) == heads(1, tokens(2 * many), n_kv_heads=1) == 1


def test_rows_are_decoded_first_where_a_part_has_enough_queries(fused_kernels, monkeypatch):
    limit_decoding(monkeypatch, kernels._DENSE_BYTES, (1, 1))
    q, k, v = inputs(1, 4, 2, 100, 140, dtype=mx.float16)
    keys, values = encode(k, v)
    decodes = lambda: kernels._decodes_first(q, keys, values, "causal", None, None)  # noqa: E731
    assert decodes()
    limit_decoding(monkeypatch, kernels._DENSE_BYTES, (400, 400))
    assert decodes()  # 200 for each of two heads
    limit_decoding(monkeypatch, (1, 1), (400, 400))
    assert not decodes()  # one head after the other


def test_no_more_than_two_parts_of_decoded_rows_exist(fused_kernels, monkeypatch):
    limit_decoding(monkeypatch, (1, 1), (1, 1 << 20))
    q, k, v = inputs(2, 6, 3, 100, 140, dtype=mx.float16)
    keys, values = encode(k, v)
    running, most, start, wait = [], [], kernels._start, mx.eval

    def started(part):
        running.append(part)
        most.append(len(running))
        return start(part)

    def waited(*arrays):
        running[:] = [part for part in running if all(part is not a for a in arrays)]
        return wait(*arrays)

    monkeypatch.setattr(kernels, "_start", started)
    monkeypatch.setattr(mx, "eval", waited)
    eager = attention(q, keys, values, scale=0.125, mask="causal")
    assert most == [1] + [2] * 5  # heads of two batch rows
    monkeypatch.setattr(kernels, "_start", lambda part: False)  # as where a function is transformed
    assert same_bits(eager, attention(q, keys, values, scale=0.125, mask="causal"))


def test_nothing_is_started_inside_a_transformed_function():
    seen = []

    def function(x):
        seen.append(kernels._start(x + 1))
        return x * 2

    x = mx.ones(3)
    assert mx.array_equal(mx.compile(function)(x), x * 2) and mx.array_equal(mx.vmap(function)(x), x * 2)
    assert mx.array_equal(mx.grad(lambda x: function(x).sum())(x), mx.full((3,), 2.0))
    function(x)
    assert seen == [False, False, False, True]


def test_a_call_like_one_before_is_checked_as_well(fused_kernels):
    """A decode step that was checked is found again; what differs in anything but its numbers is not taken for it."""
    cache = TQKVCache(TQFormat(4, 4, window=32, page=32))
    k, v = (normal(i, 1, 2, 100, 64) for i in (1, 2))
    cache.update_and_fetch(k, v)
    rows = cache.rows
    q = normal(3, 1, 4, 1, 64)
    for _ in range(3):
        check(fused, q, *rows)
        assert kernels.attend_again(q, *rows, scale=0.125) is not None
    check(fused, q, *rows, scale=0.5)
    check(fused, q, *rows, scale=np.array(0.125))
    check(fused, normal(4, 1, 8, 1, 64), *rows)
    check(fused, normal(5, 1, 4, 3, 64), *rows)
    check(fused, q, *rows, mask=mx.arange(100)[None] > 50)
    check(fused, q, *rows, softcap=2.0)
    check(fused, q, *rows, sinks=mx.zeros(4))
    assert fused(q.astype(mx.float16), *rows, scale=0.125).dtype == mx.float16
    for bad in (q[:, :, :, :32], q[:, :3], mx.zeros((2, 4, 1, 64)), q[0], q.astype(mx.int32)):
        with pytest.raises(ValueError, match=r"q must|n_heads must"):
            attention(bad, *rows, scale=0.125)
    with pytest.raises(ValueError, match="scale must"):
        attention(q, *rows, scale=float("nan"))
    with pytest.raises(ValueError, match="same tokens"):
        attention(q, rows[0], replace(rows[1], layout=Layout.uniform(1, 4, 32, 64)), scale=0.125)
    with pytest.raises(ValueError, match="values must"):
        attention(q, rows[0], rows[0], scale=0.125)
    cache.update_and_fetch(k[:, :, :1], v[:, :, :1])
    check(fused, q, *rows)  # the rows of before
    check(fused, q, *cache.rows)
    with mx.stream(mx.new_stream(mx.default_device())):
        assert kernels.attend_again(q, *rows, scale=0.125) is None


def test_results_beyond_float16_are_its_largest_numbers(path):
    """Codes may stand for a little more than the rows they are of, which mlx-lm's cache would give back."""
    keys = encode_keys(normal(1, 1, 1, 32, 64, dtype=mx.float16))
    values = encode_values(mx.full((1, 1, 32, 64), 65504.0, mx.float16) * mx.sign(normal(2, 64)).astype(mx.float16))
    want = decode64(values)
    assert np.abs(want).max() > 65504
    got = to64(path(normal(3, 1, 1, 1, 64, dtype=mx.float16), keys, values, scale=0.125))
    np.testing.assert_allclose(got, np.clip(want.mean(axis=2, keepdims=True), -65504, 65504), rtol=2e-3)


def test_keys_and_values_may_be_of_different_layers(path):
    keys = encode_keys(normal(1, 1, 2, 64, 64), TQFormat(page=32), layer_index=0)
    q = normal(3, 1, 4, 1, 64)
    for layer in (0, 1, 2, 0):
        values = encode_values(normal(2, 1, 2, 64, 64), TQFormat(page=32), layer_index=layer)
        got = path(q, keys, values, scale=0.125)
        assert max_error(got, attention64(q, decode64(keys), decode64(values), 0.125)) < TIGHT
