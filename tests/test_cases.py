"""Inputs that broke other people's caches and kernels, where no other file has them."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from conftest import ops
from oracle import attention64, decode64, max_error, normal, same_bits, to64
from test_cache import FORMATS, fill, tokens

from mlx_tq import TQFormat, TQKVCache, kernels
from mlx_tq.packing import pack_codes, unpack_codes

DIMS = (64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576)
WINDOW = FORMATS["window"]


@pytest.mark.parametrize("bits", (2, 3, 4))
@pytest.mark.parametrize("dim", DIMS)
def test_codes_of_every_head_dim_come_back(bits, dim):
    codes = np.random.default_rng(dim).integers(0, 1 << bits, (2, 3, dim)).astype(np.uint32)
    np.testing.assert_array_equal(np.array(unpack_codes(*pack_codes(mx.array(codes), bits), bits, dim)), codes)


@pytest.mark.parametrize("name", FORMATS)
def test_a_cache_of_zeros(path, name):
    """Tokens of 0 and -0 decode to exactly 0, and attention over them is 0."""
    cache = TQKVCache(FORMATS[name])
    x = mx.zeros((1, 2, 300, 64), mx.float16)
    fill(cache, x, -x)
    assert all((decode64(rows) == 0).all() for rows in cache.rows)
    assert (to64(path(normal(0, 1, 4, 2, 64), *cache.rows, scale=0.125, mask="causal")) == 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_loud_tokens_in_a_cache(path, name):
    """float16 rows whose norm is beyond float16: everything stays finite, and attention is that over the rows held."""
    k, v = (np.array(x) for x in tokens(300, dtype=mx.float16))
    k[:, :, 20:60], v[:, :, 100] = 6400, 6400
    v[:, 0, 150] = np.eye(64)[3] * 60000
    cache = TQKVCache(FORMATS[name])
    fill(cache, mx.array(k), mx.array(v), [250, 50])
    held = [decode64(rows) for rows in cache.rows]
    assert all(np.isfinite(x).all() for x in held)
    q = normal(9, 1, 4, 2, 64)
    want = attention64(q, *held, 1e-3, "causal")
    assert max_error(path(q, *cache.rows, scale=1e-3, mask="causal"), want) < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize(("dim", "value_dim"), [*((d, d) for d in DIMS), (192, 128), (64, 512), (512, 64)])
def test_a_cache_of_every_width(dim, value_dim):
    k, v = tokens(120, b=2, dim=dim, value_dim=value_dim)
    cache = TQKVCache(WINDOW, fused="never")
    fill(cache, k, v, [90, 1, 29])
    q = normal(9, 2, 4, 3, dim)
    out = ops(q, *cache.rows, scale=dim**-0.5, mask="causal")
    want = attention64(q, *map(decode64, cache.rows), dim**-0.5, "causal")
    assert out.shape == (2, 4, 3, value_dim) and max_error(out, want) < 2e-6 * max(1, max(dim, value_dim) / 128)
    cache.trim(40)
    assert [rows.shape for rows in cache.rows] == [(2, 2, 80, dim), (2, 2, 80, value_dim)]


@pytest.mark.parametrize("n_kv", range(1, 9))
def test_caches_of_chained_layers_need_no_evaluation(n_kv):
    """Three layers and six steps in one graph give the bits of evaluating after every layer."""
    results = []
    for evaluate in (True, False):
        caches, outs = [TQKVCache(WINDOW, layer) for layer in range(3)], []
        for step, n in enumerate((75, 1, 1, 33, 1, 8)):
            x = normal(step, 1, n_kv, n, 64)
            for cache in caches:
                mask = cache.make_mask(n)
                views = cache.update_and_fetch(x, 0.5 * x)
                x = x + mx.fast.scaled_dot_product_attention(x, *views, scale=0.125, mask=mask)
                if evaluate:
                    mx.eval(x, cache.keys, cache.values)
            outs.append(x)
        results.append([*outs, *(array for cache in caches for array in cache.state[1:])])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("length", range(1, 9))
def test_steps_that_end_around_blocks(length):
    """The default format, by steps of 1 to 8 tokens that end just before, at and behind the edges of blocks."""
    ends = (31, 32, 33, 255, 256, 257, 511, 512, 513, *range(1023, 1029), 2047, 2048, 2049)
    starts = sorted({max(0, end - length) for end in ends} | {*ends, 0})
    k, v = tokens(2049, h=1)
    q, cache = normal(9, 1, 2, 2049, 64), TQKVCache()
    for start, end in pairwise(starts):
        part, n = slice(start, end), end - start
        mask = cache.make_mask(n)
        views = cache.update_and_fetch(k[:, :, part], v[:, :, part])
        if n <= length:
            out = mx.fast.scaled_dot_product_attention(q[:, :, part], *views, scale=0.125, mask=mask)
            want = attention64(q[:, :, part], *(decode64(view.rows) for view in views), 0.125, mask)
            assert max_error(out, want) < 2e-6, end
    assert cache.offset == 2049


def test_no_launch_of_a_long_prompt_is_too_large(fused_kernels, monkeypatch):
    """2048 queries of 32 heads over 131072 tokens; nothing runs."""
    launched = []

    def attend_part(q, keys, values, scale, mask, sinks, softcap, columns):
        launched.append((q.shape[2], columns))
        return q

    monkeypatch.setattr(kernels, "_attend_part", attend_part)
    cache = TQKVCache("k4v4", fused="never")
    cache.update_and_fetch(*tokens(131_072, h=1, dim=16))
    q = mx.broadcast_to(mx.array(0.0), (1, 32, 2048, 16))
    kernels.attend(q, *cache.rows, 1.0, "causal", None, None)
    assert sum(rows for rows, _ in launched) == 2048 and launched[-1][1] == 131_072
    assert max(32 * rows * columns for rows, columns in launched) <= kernels._MAX_SCORES


def test_memory_is_flat_over_200_generations():
    mlx_lm = pytest.importorskip("mlx_lm.generate")
    from test_integrate import prompt, tiny_model

    import mlx_tq

    model, ids, sizes = tiny_model(), mx.array(prompt(44)), []
    for i in range(200):
        caches = mlx_tq.make_prompt_cache(model, TQFormat(window=8, sinks=2, page=32))  # packs a page
        for _ in mlx_lm.generate_step(ids, model, max_tokens=2, prompt_cache=caches):
            pass
        if i in (20, 199):
            del caches
            mx.clear_cache()
            sizes.append(mx.get_active_memory())
    assert sizes[1] <= sizes[0] + 4096
