import copy
import hashlib
import json
import subprocess
import sys
from itertools import product

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import TIGHT, attention64, bits_of, decode64, max_error, normal, poison_cache, same_bits, to64

from mlx_tq import TQFormat, TQKVCache, encode_keys, encode_values, kernels

DTYPES = (mx.float16, mx.bfloat16, mx.float32)
SMALL = {"window": 40, "sinks": 3, "page": 32}
FORMATS = {
    "default": TQFormat.preset("default"),
    "k4v4": TQFormat.preset("k4v4"),
    "tq3": TQFormat.preset("tq3"),
    "window": TQFormat(**SMALL),
    "sinks only": TQFormat(3, 2, window=0, sinks=4),
    "window only": TQFormat(2, 3, window=33, sinks=0, page=32),
    "centered": TQFormat(4, 3, centered_keys=True, window=0, sinks=0, page=32),
    "centered window": TQFormat(3, 4, qjl=True, centered_keys=True, codebook="lloyd", **SMALL),
    "raw keys": TQFormat(16, 3, **SMALL),
    "raw values": TQFormat(2, 16, qjl=True, window=0, sinks=2),
}
# Bounds on the relative squared error of a single row of 64, by bits; a row in the wrong place has one near 2.
WORST = {2: 0.4, 3: 0.16, 4: 0.08, 16: 1e-5}


def tokens(n, b=1, h=2, dim=64, value_dim=None, dtype=mx.float32, seed=0):
    """Random keys and values of n tokens."""
    value_dim = dim if value_dim is None else value_dim
    return normal(seed, b, h, n, dim, dtype=dtype), normal(seed + 1, b, h, n, value_dim, dtype=dtype)


def fill(cache, k, v, split=None):
    """Appends keys and values in pieces; returns the last views."""
    start, out = 0, None
    for n in [k.shape[2]] if split is None else split:
        out = cache.update_and_fetch(k[:, :, start : start + n], v[:, :, start : start + n])
        start += n
    assert start == k.shape[2]
    return out


def filled(name, n, split=None, **shape):
    cache = TQKVCache(FORMATS.get(name, name), layer_index=1)
    if n:
        fill(cache, *tokens(n, **shape), split)
    return cache


def contents(cache):
    """Everything a cache holds, as bytes that can be compared."""
    header, *arrays = cache.state
    return [header, *(bits_of(a).tobytes() for a in arrays), *(str((a.dtype, a.shape)) for a in arrays)]


def decoded(cache):
    return tuple(decode64(rows) for rows in cache.rows)


def check_close(cache, k, v):
    """Every decoded token is near the one that was put in."""
    assert cache.offset == k.shape[2]
    if not cache.offset:
        return
    for got, want, bits in zip(decoded(cache), (k, v), (cache.format.key_bits, cache.format.value_bits), strict=True):
        want = to64(want)
        error = np.sum((got - want) ** 2, axis=-1) / np.sum(want**2, axis=-1)
        assert error.max() < WORST[bits], error.max()
        first, recent = cache.rows[0].layout.first[0], cache.rows[0].layout.recent[0]
        assert error[:, :, :first].max(initial=0) < 1e-5
        assert error[:, :, cache.offset - recent :].max(initial=0) < 1e-5


# ------------------------------------------------------------------ appending


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("split", ([17], [16, 1], [1] * 17, [5, 7, 5]), ids=str)
def test_chunkings_of_17_tokens(name, split):
    assert contents(filled(name, 17, split)) == contents(filled(name, 17))


SPLITS = [[300], [299, 1], [100, 128, 72], [72, 32, 196], [200, 64, 36], [104, 96, 100], [1] * 140, [43, 32] * 4]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("split", SPLITS, ids=lambda s: "-".join(map(str, s[:4])))
def test_chunkings_across_pages(name, split):
    n = sum(split)
    cache = filled(name, n, split, dtype=mx.float16)
    assert contents(cache) == contents(filled(name, n, dtype=mx.float16))
    check_close(cache, *tokens(n, dtype=mx.float16))


def test_a_page_appended_behind_a_partly_filled_window():
    """128 new tokens move 128 older ones out of the window, not themselves."""
    k, v = tokens(332)
    cache = TQKVCache()
    keys, _ = fill(cache, k, v, [204, 128])
    assert contents(cache) == contents(filled_with(TQFormat.preset("default"), k, v))
    assert max_error(keys, to64(k)) < 2e-6  # the rows being packed are still seen exactly


def filled_with(format, k, v, layer_index=0):
    cache = TQKVCache(format, layer_index)
    cache.update_and_fetch(k, v)
    return cache


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", (1, 2, 3, 4, 31, 43, 44, 71, 72, 74, 75, 76, 107, 108, 133, 260, 300))
def test_what_is_exact_and_what_is_packed(name, n):
    k, v = tokens(n)
    cache = filled(name, n)
    format = cache.format
    layout = cache.rows[0].layout
    first, packed, recent = layout.first[0], layout.packed[0], layout.recent[0]
    assert first == min(format.sinks, n) and first + packed + recent == n == cache.size()
    if format.paged:
        assert packed % format.page == 0 and recent < format.window + format.page
        assert packed == 0 or recent >= format.window
    else:
        assert recent == 0
    for rows, x, encode in zip(cache.rows, (k, v), (encode_keys, encode_values), strict=True):
        if packed:
            want = encode(x[:, :, first : first + packed], format, layer_index=1).regions
            for field, array in want._asdict().items():
                if array is not None:
                    live = getattr(rows.regions, field)[:, :, : array.shape[2]]
                    assert same_bits(live, array), field
    check_close(cache, k, v)


@pytest.mark.parametrize("held", (5, 300))
def test_dtypes_mean_the_same_before_rows_are_packed_and_after(held):
    cache, x = TQKVCache("balanced"), normal(1, 1, 2, held, 64, dtype=mx.bfloat16)
    cache.update_and_fetch(x, x)
    k, v = cache.update_and_fetch(x[:, :, :1], x[:, :, :1])
    assert bool(cache.rows[0].layout.packed[0]) is (held == 300)
    for dtype in DTYPES:
        q = normal(2, 1, 4, 1, 64, dtype=dtype)
        for options in ({}, {"sinks": mx.zeros(4)}, {"mask": mx.zeros((1, held + 1))}):
            out = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, **options)
            assert out.dtype == dtype
    hidden = mx.zeros((1, held + 1), mx.bool_)
    assert not np.array(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=hidden)).any()


def test_require_is_asked_at_each_step():
    cache, (k, v) = TQKVCache(FORMATS["default"]), tokens(1)
    for _ in range(2):
        cache.update_and_fetch(k, v)
    cache.fused = "require"
    if kernels.backend() is None:
        with pytest.raises(ValueError, match="fused"):
            cache.update_and_fetch(k, v)


@pytest.mark.parametrize("split", [(70, 1, 32, 5, 128, 64), (64, 32, 32, 128, 44)], ids=("pieces", "whole pages"))
@pytest.mark.parametrize("name", FORMATS)
def test_views_are_the_decoded_rows_and_attention_over_them(name, split):
    """The chunk that is appended sees itself and the exact rows as they were, also as it is packed."""
    k, v = tokens(300, b=2)
    q = normal(9, 2, 4, 300, 64)
    cache, start = TQKVCache(FORMATS[name], 1), 0
    for n in split:
        part = slice(start, start + n)
        mask = cache.make_mask(n)
        keys, values = cache.update_and_fetch(k[:, :, part], v[:, :, part])
        start += n
        assert keys.shape == (2, 2, start, 64) and keys.dtype == k.dtype
        k64, v64 = decode64(keys.rows), decode64(values.rows)
        if cache.format.paged:
            assert np.abs(k64[:, :, start - n :] - to64(k[:, :, part])).max() < 2e-6
        assert max_error(keys, k64) < 3e-6 and max_error(values, v64) < 3e-6
        out = mx.fast.scaled_dot_product_attention(q[:, :, part], keys, values, scale=0.125, mask=mask)
        assert max_error(out, attention64(q[:, :, part], k64, v64, 0.125, mask)) < TIGHT


@pytest.mark.parametrize("name", ("default", "k4v4", "window", "centered"))
def test_nothing_is_appended(name):
    k, v = tokens(0)
    cache = TQKVCache(FORMATS[name])
    keys, values = cache.update_and_fetch(k, v)
    assert keys.shape == values.shape == (1, 2, 0, 64) and cache.offset == 0
    k, v = tokens(50)
    cache.update_and_fetch(k, v)
    before = contents(cache)
    keys, _ = cache.update_and_fetch(k[:, :, :0], v[:, :, :0])
    assert keys.shape[2] == 50 and contents(cache) == before
    check_close(cache, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_dim", (64, 128, 80))
def test_widths_and_dtypes(dtype, value_dim):
    k, v = tokens(120, b=2, h=3, dim=128, value_dim=value_dim, dtype=dtype)
    cache = TQKVCache(FORMATS["window"])
    keys, values = fill(cache, k, v, [60, 60])
    assert keys.dtype == values.dtype == dtype and values.shape == (2, 3, 120, value_dim)
    for got, want in zip(decoded(cache), (k, v), strict=True):
        assert np.sum((got - to64(want)) ** 2) < WORST[4] * np.sum(to64(want) ** 2)


def test_keys_and_values_of_unlike_dtype():
    k, v = tokens(100)
    cache = TQKVCache(FORMATS["window"])
    keys, values = fill(cache, k.astype(mx.float16), v, [90, 10])
    assert (keys.dtype, values.dtype) == (mx.float16, mx.float32)


@pytest.mark.parametrize("name", FORMATS)
def test_spare_capacity_is_never_read(name):
    k, v = tokens(400)
    q = normal(9, 1, 4, 3, 64)
    clean, spoiled = TQKVCache(FORMATS[name]), TQKVCache(FORMATS[name])
    start = 0
    for n in (60, 40, 1, 32, 67):
        part = slice(start, start + n)
        outs = []
        for cache in (clean, spoiled):
            views = cache.update_and_fetch(k[:, :, part], v[:, :, part])
            outs.append([mx.fast.scaled_dot_product_attention(q, *views, scale=0.125, mask="causal"), *views])
        assert all(same_bits(*pair) for pair in zip(*outs, strict=True))
        start += n
        poison_cache(spoiled)
    for n in (1, 30, 100):
        for cache in (clean, spoiled):
            cache.trim(n)
        poison_cache(spoiled)
        assert contents(clean) == contents(spoiled)


def test_growth_copies_little():
    """Capacity grows by at least a quarter, so the regions are replaced a few times and not at every page."""
    cache = TQKVCache("k4v4")
    k, v = tokens(64)
    capacities = []
    for _ in range(128):
        cache.update_and_fetch(k, v)
        capacities.append(cache.keys[0].shape[2])
        assert capacities[-1] >= cache.offset
    steps = sorted(set(capacities))
    assert len(steps) <= 14
    assert capacities[-1] <= 1.25 * cache.offset + 256


def test_an_append_reuses_the_buffers():
    k, v = tokens(8000, h=4, dim=128, dtype=mx.float16)
    cache = filled_with(TQFormat.preset("k4v4"), k, v)
    mx.eval(cache.keys, cache.values)
    for _ in range(2):
        k1, v1 = k[:, :, :1] + 0, v[:, :, :1] + 0
        mx.eval(k1, v1)
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        cache.update_and_fetch(k1, v1)
        mx.eval(cache.keys, cache.values)
        assert mx.get_peak_memory() - held < cache.nbytes / 20


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize("name", FORMATS)
def test_nbytes_is_the_sum_of_the_arrays(name):
    cache = TQKVCache(FORMATS[name])
    assert cache.nbytes == 0 and isinstance(cache.nbytes, int) and cache.empty()
    k, v = tokens(500, b=2, dtype=mx.float16)
    for n in (1, 3, 100, 396):
        cache.update_and_fetch(k[:, :, :n], v[:, :, :n])
        assert cache.nbytes == sum(a.nbytes for a in (*cache.keys, *cache.values)) > 0
        held = {id(a) for rows in cache.rows for a in (*(rows.regions or ()), rows.exact) if a is not None}
        assert len(held) == len(cache.keys) + len(cache.values)
        assert cache.nbytes == sum(rows.nbytes for rows in cache.rows)
    cache.trim(500)
    assert not cache.empty() and cache.offset == 0


@pytest.mark.parametrize("name", ("k4v4", "tq3", "default", "centered"))
def test_nbytes_of_a_long_cache_are_those_of_the_format(name):
    n = 4096
    k, v = tokens(n, h=1, dim=128, dtype=mx.float16)
    cache = filled_with(FORMATS[name], k, v)
    packed = cache.rows[0].layout.packed[0]
    capacity = cache.keys[0].shape[2]
    assert packed <= capacity < packed + 256
    exact = sum(rows.exact.nbytes for rows in cache.rows if rows.exact is not None)
    assert cache.nbytes - exact == capacity * cache.format.bits_per_element(128) * 256 / 8
    assert exact <= (cache.format.sinks + cache.format.window + cache.format.page) * 256 * 2


def test_memory_is_flat_over_many_caches():
    k, v = tokens(150, dtype=mx.float16)
    mx.eval(k, v)
    sizes = []
    for i in range(200):
        cache = TQKVCache(FORMATS["window"], layer_index=i % 3)
        fill(cache, k, v, [100, 49, 1])
        mx.eval(cache.keys, cache.values)
        cache.trim(30)
        if i in (20, 199):
            del cache
            mx.clear_cache()
            sizes.append(mx.get_active_memory())
    assert sizes[1] <= sizes[0]


# ------------------------------------------------------------------ trimming


@pytest.mark.parametrize("name", FORMATS)
def test_append_trim_append(name):
    k, v = tokens(13)
    cache = filled(name, 0)
    fill(cache, k[:, :, :10], v[:, :, :10])
    assert cache.trim(4) == 4
    fill(cache, k[:, :, 10:], v[:, :, 10:])
    other = filled(name, 0)
    pick = [0, 1, 2, 3, 4, 5, 10, 11, 12]
    fill(other, k[:, :, pick], v[:, :, pick], [6, 3])
    assert contents(cache) == contents(other)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", (0, 1, 5, 39, 40, 41, 60, 96, 130, 196, 197, 198, 199, 200))
def test_trim_keeps_what_is_left_as_it_was(name, n):
    cache = filled(name, 200)
    before = decoded(cache)
    kept = cache.rows[0].layout
    assert cache.trim(n) == n and cache.offset == 200 - n
    for rows, was in zip(cache.rows, before, strict=True):
        got = decode64(rows)
        # A page cut in two goes back to the exact rows and is rounded to their dtype.
        assert got.shape[2] == 200 - n
        assert np.abs(got - was[:, :, : 200 - n]).max(initial=0) < 2e-6
    layout = cache.rows[0].layout
    assert layout.first[0] == min(kept.first[0], 200 - n) and layout.packed[0] <= kept.packed[0]
    k, v = tokens(90, seed=5)
    keys, _ = cache.update_and_fetch(k, v)
    assert cache.offset == 290 - n and keys.shape[2] == 290 - n
    got = decoded(cache)
    for side, fresh, was, bits in zip(
        got, (k, v), before, (cache.format.key_bits, cache.format.value_bits), strict=True
    ):
        fresh = to64(fresh)
        error = np.sum((side[:, :, 200 - n :] - fresh) ** 2, axis=-1) / np.sum(fresh**2, axis=-1)
        assert error.max(initial=0) < WORST[bits]
        old = was[:, :, : 200 - n]
        change = np.sum((side[:, :, : 200 - n] - old) ** 2, axis=-1) / np.sum(old**2, axis=-1)
        assert change.max(initial=0) < WORST[bits]


@pytest.mark.parametrize("name", FORMATS)
def test_trim_more_than_held(name):
    cache = filled(name, 150)
    assert cache.trim(10**9) == 150 and cache.offset == cache.size() == 0
    assert cache.trim(1) == 0
    k, v = tokens(60, seed=3)
    fill(cache, k, v)
    check_close(cache, k, v)
    assert contents(cache) == contents(filled_with(FORMATS[name], k, v, layer_index=1))
    assert TQKVCache().trim(5) == 0
    with pytest.raises(ValueError, match="n must be"):
        cache.trim(-1)


def test_memory_of_a_trim_into_the_packed_rows():
    """Only the page that is cut in two is decoded."""
    n = 20_000
    k, v = tokens(n, h=2, dim=128, dtype=mx.float16)
    cache = filled_with(TQFormat(), k, v)
    mx.eval(cache.keys, cache.values)
    del k, v
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    cache.trim(1000)
    mx.eval(cache.keys, cache.values)
    assert mx.get_peak_memory() - held < 2 * n * 128 * 2 / 2


@pytest.mark.parametrize("name", FORMATS)
def test_verify_steps_equal_single_steps(name):
    """Speculative decoding: L tokens over 50 cached ones as one step and one by one; then some are dropped."""
    k, v = tokens(58)
    q = normal(9, 1, 4, 58, 64)
    attend = mx.fast.scaled_dot_product_attention
    for length in range(2, 9):
        step, single = (filled_with(FORMATS[name], k[:, :, :50], v[:, :, :50]) for _ in range(2))
        new = slice(50, 50 + length)
        mask = step.make_mask(length)
        got = attend(q[:, :, new], *step.update_and_fetch(k[:, :, new], v[:, :, new]), scale=0.125, mask=mask)
        for i in range(length):
            one = slice(50 + i, 51 + i)
            views = single.update_and_fetch(k[:, :, one], v[:, :, one])
            want = attend(q[:, :, one], *views, scale=0.125, mask=single.make_mask(1))
            assert max_error(got[:, :, i : i + 1], to64(want)) < 2e-6
        assert contents(step) == contents(single)
        for j in range(length):
            assert step.trim(j) == single.trim(j) == j
            assert contents(step) == contents(single)
            fill(step, k[:, :, :j], v[:, :, :j])
            fill(single, k[:, :, :j], v[:, :, :j])


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_life(data):
    """Appends, trims, copies, round trips and garbage in spare slots, against a plain list of tokens."""
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    cache = TQKVCache(FORMATS[name], layer_index=2)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    held_k = held_v = np.zeros((1, 1, 0, 64), np.float32)
    kept = []
    for _ in range(data.draw(st.integers(1, 10))):
        what = data.draw(st.sampled_from(("append", "append", "append", "trim", "copy", "state", "poison", "keep")))
        if what == "append":
            n = data.draw(st.sampled_from((1, 2, 5, 31, 32, 33, 64, 100, 128)))
            k, v = rng.standard_normal((2, 1, 1, n, 64)).astype(np.float32)
            cache.update_and_fetch(mx.array(k), mx.array(v))
            held_k, held_v = np.concatenate([held_k, k], axis=2), np.concatenate([held_v, v], axis=2)
        elif what == "trim":
            n = data.draw(st.sampled_from((0, 1, 3, 32, 50, 90, 500)))
            assert cache.trim(n) == min(n, held_k.shape[2])
            keep = max(0, held_k.shape[2] - n)
            held_k, held_v = held_k[:, :, :keep], held_v[:, :, :keep]
        elif what == "copy":
            cache = copy.deepcopy(cache)
        elif what == "state":
            cache = TQKVCache.from_state(cache.state)
        elif cache.empty():
            continue
        elif what == "poison":
            poison_cache(cache)
        else:
            kept.append((cache.keys_and_values(), decoded(cache)))
        assert cache.offset == held_k.shape[2]
        if not cache.empty() and cache.offset:
            for got, want, bits in zip(
                decoded(cache), (held_k, held_v), (cache.format.key_bits, cache.format.value_bits), strict=True
            ):
                error = np.sum((got - want) ** 2, axis=-1) / np.sum(want**2, axis=-1)
                assert error.max() < 2 * WORST[bits]  # a row may be coded twice after a trim
    for views, was in kept:
        for view, want in zip(views, was, strict=True):
            assert max_error(view, want) < 3e-6 if want.size else view.shape[2] == 0


@pytest.mark.parametrize("name", FORMATS)
def test_views_outlive_appends_and_trims(name):
    k, v = tokens(400)
    cache = TQKVCache(FORMATS[name])
    kept = []
    for start, n in ((0, 70), (70, 32), (102, 1), (103, 97), (200, 200)):
        views = cache.update_and_fetch(k[:, :, start : start + n], v[:, :, start : start + n])
        kept += [(view, decode64(view.rows)) for view in (*views, *cache.keys_and_values())]
    for n in (1, 60, 150):
        cache.trim(n)
        cache.update_and_fetch(k[:, :, :20], v[:, :, :20])
    poison_cache(cache)
    mx.eval(cache.keys, cache.values)
    for view, was in kept:
        assert max_error(view, was) < 3e-6
        np.testing.assert_array_equal(decode64(view.rows), was)


# ------------------------------------------------------------------ copies and files


@pytest.mark.parametrize("name", FORMATS)
def test_deepcopy_is_independent(name):
    cache = filled(name, 100)
    before = contents(cache)
    twin = copy.deepcopy(cache)
    assert contents(twin) == before and twin.nbytes == cache.nbytes
    k, v = tokens(40, seed=7)
    twin.update_and_fetch(k, v)
    twin.trim(80)
    poison_cache(twin)
    mx.eval(twin.keys, twin.values)
    assert contents(cache) == before
    after = contents(twin)
    cache.update_and_fetch(k, v)
    cache.trim(3)
    assert contents(twin) == after
    assert contents(copy.deepcopy(TQKVCache("tq3"))) == contents(TQKVCache("tq3"))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("n", (0, 1, 50, 300))
def test_twenty_round_trips_through_state(name, n):
    cache = filled(name, n, dtype=mx.bfloat16)
    before = contents(cache)
    for _ in range(20):
        cache = TQKVCache.from_state(cache.state)
        assert contents(cache) == before
    original = filled(name, n, dtype=mx.bfloat16)
    k, v = tokens(70, dtype=mx.bfloat16, seed=8)
    for c in (cache, original):
        fill(c, k, v, [1, 69])
        c.trim(20)
    assert contents(cache) == contents(original)
    assert cache.format == FORMATS[name] and cache.layer_index == 1


def test_state_holds_live_rows_only():
    cache = filled("k4v4", 10)
    assert cache.keys[0].shape[2] >= 256
    assert all(a.shape[2] == 10 for a in cache.state[1:])


def test_state_can_be_evaluated():
    cache = filled("default", 300)
    mx.eval([c.state for c in (cache, TQKVCache())])


def test_save_and_load_in_a_fresh_process(tmp_path):
    cache_module = pytest.importorskip("mlx_lm.models.cache")
    stock, rotating, arrays = cache_module.KVCache(), cache_module.RotatingKVCache(8), cache_module.ArraysCache(2)
    k, v = tokens(300, dtype=mx.float16)
    stock.update_and_fetch(k, v)
    rotating.update_and_fetch(k[:, :, :5], v[:, :, :5])
    arrays[0] = normal(1, 1, 4)
    caches = [*(filled(name, 300, dtype=mx.float16) for name in FORMATS), stock, TQKVCache("tq3"), rotating, arrays]
    path = str(tmp_path / "prompt.safetensors")
    cache_module.save_prompt_cache(path, caches, {"model": "tiny"})
    code = """
import hashlib, sys
import mlx_tq, mlx_lm
from mlx_lm.models.cache import load_prompt_cache
import numpy as np, mlx.core as mx
caches, metadata = load_prompt_cache(sys.argv[1], return_metadata=True)
assert metadata == {"model": "tiny"}
for c in caches:
    digest = hashlib.sha256()
    if isinstance(c, mlx_tq.TQKVCache):
        digest.update(c.state[0].encode())
        for a in c.state[1:]:
            digest.update(np.array(a.view(mx.uint8)).tobytes())
        if c.offset:
            x = mx.ones((1, 2, 3, 64), mx.float16)
            out = mx.fast.scaled_dot_product_attention(x, *c.update_and_fetch(x, x), scale=1.0)
            assert c.offset == 303 and mx.isfinite(out).all().item()
    print(type(c).__name__, digest.hexdigest())
"""
    result = subprocess.run([sys.executable, "-c", code, path], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    want = []
    for c in caches:
        digest = state_digest(c.state) if isinstance(c, TQKVCache) else state_digest([""])
        want.append(f"{type(c).__name__} {digest}")
    assert result.stdout.split("\n")[:-1] == want


def state_digest(state):
    digest = hashlib.sha256(state[0].encode())
    for array in state[1:]:
        digest.update(np.array(array.view(mx.uint8)).tobytes())
    return digest.hexdigest()


def damaged_states():
    """Name and state of caches that are damaged, or not ours."""
    state = filled("centered window", 150).state
    header = json.loads(state[0])
    arrays = state[1:]

    def changed(**fields):
        return [json.dumps(header | fields), *arrays]

    def without(field):
        return [json.dumps({k: v for k, v in header.items() if k != field}), *arrays]

    rows = header["rows"]
    first, packed, recent = header["tokens"]
    cases = {f"no {field}": without(field) for field in header}
    cases |= {
        "none": None,
        "empty": [],
        "a number": 3,
        "stock cache": [*tokens(4), 4],
        "no header": arrays,
        "not json": ["{", *arrays],
        "json list": ["[]", *arrays],
        "json number": ["5", *arrays],
        "json null": ["null", *arrays],
        "header cut": [state[0][:-9], *arrays],
        "header is bytes": [state[0].encode() + b"\xff", *arrays],
        "next version": changed(version=header["version"] + 1),
        "version text": changed(version="1"),
        "other bits": changed(format=header["format"] | {"key_bits": 2}),
        "unknown bits": changed(format=header["format"] | {"key_bits": 7}),
        "unknown field": changed(format=header["format"] | {"rank": 7}),
        "format null": changed(format=None),
        "format list": changed(format=[4, 4]),
        "no qjl": changed(format=header["format"] | {"qjl": False}),
        "other page": changed(format=header["format"] | {"page": 128}),
        "other window": changed(format=header["format"] | {"window": 0}),
        "negative layer": changed(layer_index=-1),
        "layer text": changed(layer_index="one"),
        "layer null": changed(layer_index=None),
        "layer float": changed(layer_index=1.5),
        "rows null": changed(rows=None),
        "tokens of nothing": [json.dumps(header | {"rows": None})],
        "rows empty": changed(rows=[]),
        "rows one": changed(rows=rows[:1]),
        "rows three": changed(rows=[*rows, rows[0]]),
        "rows short": changed(rows=[r[:3] for r in rows]),
        "rows number": changed(rows=4),
        "batch 2": changed(rows=[[2, *r[1:]] for r in rows]),
        "batch 0": changed(rows=[[0, *r[1:]] for r in rows]),
        "batches differ": changed(rows=[rows[0], [2, *rows[1][1:]]]),
        "heads differ": changed(rows=[rows[0], [1, 4, *rows[1][2:]]]),
        "heads text": changed(rows=[["a", *r[1:]] for r in rows]),
        "other head_dim": changed(rows=[[*r[:2], 128, r[3]] for r in rows]),
        "bad head_dim": changed(rows=[[*r[:2], 60, r[3]] for r in rows]),
        "negative head_dim": changed(rows=[[*r[:2], -64, r[3]] for r in rows]),
        "head_dim text": changed(rows=[[*r[:2], "64", r[3]] for r in rows]),
        "other dtype": changed(rows=[[*r[:3], "float16"] for r in rows]),
        "int dtype": changed(rows=[[*r[:3], "int32"] for r in rows]),
        "no dtype": changed(rows=[[*r[:3], "load"] for r in rows]),
        "unknown dtype": changed(rows=[[*r[:3], "float7"] for r in rows]),
        "dtype number": changed(rows=[[*r[:3], 16] for r in rows]),
        "more tokens": changed(tokens=[first, packed + 32, recent]),
        "fewer tokens": changed(tokens=[first, packed - 32, recent]),
        "one more recent": changed(tokens=[first, packed, recent + 1]),
        "half a page": changed(tokens=[first, packed - 16, recent]),
        "negative": changed(tokens=[first, packed, -recent]),
        "negative packed": changed(tokens=[first, -packed, recent]),
        "too many first": changed(tokens=[first + 1, packed, recent - 1]),
        "float tokens": changed(tokens=[first, float(packed), recent]),
        "token text": changed(tokens=["3", packed, recent]),
        "two tokens": changed(tokens=[first, packed]),
        "tokens null": changed(tokens=None),
        "huge": changed(tokens=[first, 1 << 62, recent]),
        "last array lost": state[:-1],
        "one array lost": [*state[:2], *state[3:]],
        "array added": [*state, arrays[0]],
        "arrays swapped": [state[0], arrays[1], arrays[0], *arrays[2:]],
        "array is none": [state[0], None, *arrays[1:]],
        "array is a number": [state[0], 3, *arrays[1:]],
        "array is text": [state[0], "codes", *arrays[1:]],
        "array is a list": [state[0], [arrays[0]], *arrays[1:]],
        "array cut": [state[0], arrays[0][:, :, :-1], *arrays[1:]],
        "array of another type": [state[0], arrays[0].view(mx.int32), *arrays[1:]],
        "means cut": [*(a[:, :, :1] if a.shape[-1] == 64 and a.shape[2] == packed // 32 else a for a in state[1:])],
    }
    return cases


DAMAGED = damaged_states()


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_states_are_refused_and_change_nothing(name):
    with pytest.raises(ValueError, match="state"):
        TQKVCache.from_state(DAMAGED[name])
    for n in (0, 60):
        cache = filled("tq3", n)
        before = contents(cache)
        with pytest.raises(ValueError, match="state"):
            cache.state = DAMAGED[name]
        assert contents(cache) == before and cache.format == FORMATS["tq3"]


def test_a_truncated_or_foreign_file_is_refused(tmp_path):
    cache_module = pytest.importorskip("mlx_lm.models.cache")
    path = tmp_path / "prompt.safetensors"
    cache_module.save_prompt_cache(str(path), [filled("default", 300)])
    data = path.read_bytes()
    for n in (len(data) // 2, len(data) - 7):
        (tmp_path / "cut.safetensors").write_bytes(data[:n])
        with pytest.raises((ValueError, RuntimeError)):
            cache_module.load_prompt_cache(str(tmp_path / "cut.safetensors"))
    stock = cache_module.KVCache()
    stock.update_and_fetch(*tokens(4))
    for foreign in (stock.state, cache_module.RotatingKVCache(8).state):
        with pytest.raises(ValueError, match="state must come from"):
            TQKVCache.from_state(foreign)


def test_a_cache_of_another_model_is_refused_at_its_first_use():
    cache = TQKVCache.from_state(filled("default", 200).state)
    before = contents(cache)
    for shape in ({"dim": 128}, {"h": 4}, {"b": 2}, {"dtype": mx.float16}, {"value_dim": 128}):
        with pytest.raises(ValueError, match="like the rows held"):
            cache.update_and_fetch(*tokens(1, **shape))
    assert contents(cache) == before


# ------------------------------------------------------------------ refusals


def bad_updates():
    k, v = tokens(5)
    return {
        "rank": (k[0], v[0], "shape"),
        "numpy": (np.array(k), v, "mlx array"),
        "ints": (k.astype(mx.int32), v.astype(mx.int32), "float"),
        "width": (k[..., :60], v, "head_dim"),
        "value width": (k, v[..., :60], "head_dim"),
        "lengths": (k, v[:, :, :4], "agree"),
        "batches": (k, mx.concatenate([v, v]), "agree"),
        "heads": (k[:, :1], v, "agree"),
        "none": (None, None, "mlx array"),
    }


BAD = bad_updates()
BAD_LATER = {
    "another width": (*tokens(5, dim=128), "like the rows held"),
    "another value width": (*tokens(5, value_dim=80), "like the rows held"),
    "another batch": (*tokens(5, b=2), "like the rows held"),
    "other heads": (*tokens(5, h=4), "like the rows held"),
    "another dtype": (*tokens(5, dtype=mx.bfloat16), "like the rows held"),
}


@pytest.mark.parametrize("name", ("default", "tq3", "centered window"))
@pytest.mark.parametrize("n", (0, 150))
@pytest.mark.parametrize("bad", (*BAD, *BAD_LATER))
def test_a_refused_update_changes_nothing(name, n, bad):
    if bad in BAD_LATER and not n:
        return
    cache = filled(name, n)
    before, size = contents(cache), cache.nbytes
    k, v, word = (BAD | BAD_LATER)[bad]
    with pytest.raises(ValueError, match=word):
        cache.update_and_fetch(k, v)
    assert contents(cache) == before and cache.nbytes == size and cache.empty() == (n == 0)
    fill(cache, *tokens(5))
    assert cache.offset == n + 5


def test_an_empty_cache_has_no_rows():
    for read in (lambda c: c.rows, lambda c: c.keys_and_values()):
        with pytest.raises(ValueError, match="cache must hold tokens"):
            read(TQKVCache())


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16, mx.float32))
def test_until_tokens_are_packed_all_is_as_with_the_usual_cache(fused_kernels, monkeypatch, dtype):
    """Rows come back bit by bit and MLX's own attention gets them, whatever the chunks: no kernel runs."""
    monkeypatch.setattr(kernels, "_launch", lambda *_: pytest.fail("a kernel was launched"))
    k, v = tokens(387, b=2, dtype=dtype)
    cache, options = TQKVCache("default"), {"scale": 0.125}
    for start, stop in ((0, 200), (200, 201), (201, 387)):
        q = normal(5, 2, 6, stop - start, 64, dtype=dtype)
        mask = "causal" if stop - start > 1 else None
        keys, values = cache.update_and_fetch(k[:, :, start:stop], v[:, :, start:stop])
        assert same_bits(mx.array(keys), k[:, :, :stop]) and same_bits(mx.array(values), v[:, :, :stop])
        got = mx.fast.scaled_dot_product_attention(q, keys, values, mask=mask, **options)
        want = mx.fast.scaled_dot_product_attention(q, k[:, :, :stop], v[:, :, :stop], mask=mask, **options)
        assert same_bits(got, want)


def test_exact_rows_stay_as_they_came():
    """Also when tokens are packed: the first ones and the window have the bits of the model's rows."""
    k, v = tokens(900, b=2, dtype=mx.bfloat16)
    for rows, x in zip(filled_with(FORMATS["default"], k, v).rows, (k, v), strict=True):
        first, packed = rows.layout.first[0], rows.layout.packed[0]
        assert packed
        held = mx.concatenate([x[:, :, :first], x[:, :, first + packed :]], axis=2)
        assert same_bits(rows.exact[:, :, : held.shape[2]], held)


@pytest.mark.parametrize(("options", "word"), [({"format": "q4"}, "format"), ({"fused": "yes"}, "fused")], ids=str)
def test_the_constructor_refuses(options, word):
    with pytest.raises(ValueError, match=word):
        TQKVCache(**options)


# ------------------------------------------------------------------ what mlx-lm expects of a cache


def test_names_that_mlx_lm_reads_otherwise_are_absent():
    for cache in (TQKVCache(), filled("default", 10)):
        for name in ("bits", "group_size", "to_quantized", "__len__", "__bool__"):
            assert not hasattr(cache, name)
        assert cache and cache.is_trimmable() is True and isinstance(cache.offset, int)


@pytest.mark.parametrize("held", (0, 1, 17))
@pytest.mark.parametrize("new", (1, 2, 9))
@pytest.mark.parametrize(
    "options", [{"return_array": r, "window_size": w} for r, w in product((False, True), (None, 4))]
)
def test_masks_are_those_of_the_stock_cache(held, new, options):
    stock = pytest.importorskip("mlx_lm.models.cache").KVCache()
    cache = TQKVCache()
    if held:
        k, v = tokens(held)
        stock.update_and_fetch(k, v)
        cache.update_and_fetch(k, v)
    want, got = stock.make_mask(new, **options), cache.make_mask(new, **options)
    if isinstance(want, mx.array):
        assert got.dtype == want.dtype and np.array_equal(np.array(got), np.array(want))
    else:
        assert got == want


@pytest.mark.parametrize("name", ("default", "centered window", "k4v4"))
def test_keys_and_values_can_be_tied_into_a_graph(name):
    cache = filled(name, 150)
    before = contents(cache)
    cache.keys = mx.depends(cache.keys, mx.ones(3))
    cache.values = mx.depends(cache.values, mx.ones(3))
    assert contents(cache) == before
    for bad in (cache.keys[:-1], [*cache.keys, mx.ones(3)], [a[:, :, :1] for a in cache.keys]):
        with pytest.raises(ValueError, match="keys must be arrays"):
            cache.keys = bad
    assert contents(cache) == before
    empty = TQKVCache()
    empty.keys = empty.keys
    assert empty.empty()


def test_lru_prompt_cache():
    cache_module = pytest.importorskip("mlx_lm.models.cache")
    lru = cache_module.LRUPromptCache(max_size=4)
    stored = [filled("window", 120), filled("window", 120)]
    before = contents(stored[0])
    lru.insert_cache("model", list(range(120)), stored)
    assert lru.nbytes == sum(c.nbytes for c in stored)
    for ask, rest, offset in ((120, 0, 120), (100, 1, 99), (130, 10, 120)):
        caches, left = lru.fetch_nearest_cache("model", list(range(ask)))
        assert len(left) == rest and [c.offset for c in caches] == [offset] * 2
        caches[0].update_and_fetch(*tokens(7))
        assert contents(stored[0]) == before
    assert lru.fetch_nearest_cache("other", [1])[0] is None


def test_trim_prompt_cache_of_a_mixed_list():
    cache_module = pytest.importorskip("mlx_lm.models.cache")
    stock = cache_module.KVCache()
    stock.update_and_fetch(*tokens(60))
    caches = [filled("window", 60), filled("tq3", 60), stock]
    assert cache_module.can_trim_prompt_cache(caches)
    assert cache_module.trim_prompt_cache(caches, 25) == 25
    assert [c.offset for c in caches] == [35] * 3


# ------------------------------------------------------------------ quality


def softmax_kl(format, offset):
    """Mean KL divergence of attention weights over compressed keys that share an offset along one direction."""
    k = normal(0, 1, 2, 512, 128)
    u = normal(1, 128)
    k = k + offset * u / mx.linalg.norm(u)
    q = normal(2, 1, 2, 64, 128)
    cache = filled_with(format, k, k)
    true, got = (to64(q) @ x.swapaxes(-1, -2) * 128**-0.5 for x in (to64(k), decode64(cache.rows[0])))
    log_p, log_q = (
        s - np.log(np.exp(s - s.max(-1, keepdims=True)).sum(-1, keepdims=True)) - s.max(-1, keepdims=True)
        for s in (true, got)
    )
    return np.mean(np.sum(np.exp(log_p) * (log_p - log_q), axis=-1))


@pytest.mark.parametrize("bits", (3, 4))
@pytest.mark.parametrize("offset", (22, 605, 921))
def test_biased_keys_cost_nothing_when_centered(bits, offset):
    format = TQFormat(bits, centered_keys=True)
    assert softmax_kl(format, offset) < 2 * softmax_kl(format, 0)


@pytest.mark.parametrize("offset", (22, 605, 921))
def test_biased_keys_cost_nothing_by_default(offset):
    default = TQFormat.preset("default")
    assert softmax_kl(default, offset) < 2 * softmax_kl(default, 0)
    if offset > 600:  # without centered keys the levels are spent on the offset
        assert softmax_kl(TQFormat(), offset) > 2 * softmax_kl(TQFormat(), 0)


@pytest.mark.parametrize("bad", (np.nan, np.inf))
@pytest.mark.parametrize("name", ("default", "k4v4", "tq3", "centered"))
def test_a_bad_row_does_not_touch_its_neighbours(name, bad):
    """A NaN or inf makes its own head's packed row NaN; every other row, head and batch row is as without it."""
    k, v = tokens(300, b=2)
    clean = decoded(filled_with(FORMATS[name], k, v))
    x = np.array(k)
    x[1, 0, 50, 3] = bad
    cache = filled_with(FORMATS[name], mx.array(x), v)
    got, _ = decoded(cache)
    first, packed = cache.rows[0].layout.first[0], cache.rows[0].layout.packed[0]
    page = slice(50, 51)
    if 50 - first < packed:
        assert not np.isfinite(got[1, 0, 50]).any()
    else:
        np.testing.assert_array_equal(got[1, 0, 50], x[1, 0, 50])
    if cache.format.centered_keys and packed > 50 - first:  # rows of a page share its mean
        start = first + (50 - first) // cache.format.page * cache.format.page
        page = slice(start, start + cache.format.page)
    others = np.ones((2, 2, 300), bool)
    others[1, 0, page] = False
    np.testing.assert_array_equal(got[others], clean[0][others])
