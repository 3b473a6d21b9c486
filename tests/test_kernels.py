"""The kernels beyond what every path of test_attention.py runs: encoding, launches, schedules, the self test."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import msl
import numpy as np
import pytest
from conftest import fused, kernels_missing, running_kernels
from hypothesis import given
from hypothesis import strategies as st
from oracle import TIGHT, attention64, build_rows, decode64, max_error, normal, poison_cache, poison_rows, same_bits

import mlx_tq
from mlx_tq import TQFormat, TQKVCache, codec, kernels
from mlx_tq.codec import Layout
from mlx_tq.rotation import layer_signs, supported_dim

runner_only = pytest.mark.skipif(kernels.backend() is not None, reason="about the runner, not a GPU")

ENCODE = [
    (TQFormat(), 128, 128, mx.float16),
    (TQFormat(), 64, 64, mx.bfloat16),
    (TQFormat.preset("tq3"), 64, 64, mx.float32),
    (TQFormat.preset("tq3"), 128, 128, mx.float16),
    (TQFormat(3, 2), 96, 96, mx.bfloat16),
    (TQFormat(3, 4, codebook="lloyd"), 80, 128, mx.float32),
    (TQFormat(4, 2, qjl=True), 64, 64, mx.float16),
    (TQFormat(2, 3, codebook="lloyd", centered_keys=True, page=32), 112, 192, mx.float32),
    (TQFormat(4, 3, norm_correction=False), 256, 32, mx.bfloat16),
    (TQFormat(4, 4), 512, 16, mx.float32),
    (TQFormat(4, 16), 128, 128, mx.float16),
    (TQFormat(16, 4), 64, 64, mx.float32),
]


def hard_rows(seed, b, h, length, dim, dtype):
    """Random rows of many scales with zero, constant, one-hot, subnormal and huge ones among them."""
    x = np.random.default_rng(seed).standard_normal((b, h, length, dim))
    x *= 10.0 ** np.random.default_rng(seed + 1).integers(-3, 3, (b, h, length, 1))
    x[0, 0, 0] = 0
    x[0, 0, 1] = -0.0
    x[0, 0, 2] = 3000
    x[0, 0, 3] = np.eye(dim)[3] * 60000
    x[0, 0, 4] = 6e-8
    x[0, 0, 5, 0] = np.nan
    x[0, 0, 6, 1] = np.inf
    x = x.astype(np.float32)
    x[0, 1, 0, 2] = np.uint32(0x7FFFFFFF).view(np.float32)  # a NaN that addition to its bits turns into a number
    return mx.array(x).astype(dtype)


def same_numbers(a, b):
    """Whether two arrays agree in every bit, but for the payload of a NaN."""
    if a.dtype == mx.uint32:
        return same_bits(a, b)
    return mx.array_equal(mx.isnan(a), mx.isnan(b)) and same_bits(*(mx.where(mx.isnan(x), 0, x) for x in (a, b)))


@pytest.mark.parametrize(("format", "dim", "value_dim", "dtype"), ENCODE)
def test_encode_gives_the_bits_of_the_codec(fused_kernels, format, dim, value_dim, dtype):
    k, v = hard_rows(1, 2, 2, 37, dim, dtype), hard_rows(2, 2, 2, 37, value_dim, dtype)
    k_signs, v_signs = (layer_signs(format.seed, 5, d) for d in (dim, value_dim))
    mean = codec.page_means(k, format.page) if format.centered_keys else None
    want = codec.quantise(k, format, "keys", k_signs, mean), codec.quantise(v, format, "values", v_signs)
    got = kernels.encode(k, v, mean, format, 5)
    for mine, theirs in zip(got, want, strict=True):
        for name, a, b in zip(mine._fields, mine, theirs, strict=True):
            assert (a is None) == (b is None), name
            assert a is None or same_numbers(a, b), name


@pytest.mark.parametrize("dtype", codec.FLOAT_DTYPES)
@pytest.mark.parametrize("page", (32, 128))
def test_encode_makes_the_means_of_whole_pages(fused_kernels, page, dtype):
    format = TQFormat(centered_keys=True, page=page)
    k, v = (normal(i, 2, 3, 2 * page, 80, dtype=dtype, factor=30.0) + 5 for i in (1, 2))
    mean = codec.page_means(k, page)
    for mine, theirs in zip(kernels.encode(k, v, None, format, 5), kernels.encode(k, v, mean, format, 5), strict=True):
        assert all(a is b is None or same_bits(a, b) for a, b in zip(mine, theirs, strict=True))
    with pytest.raises(ValueError, match="whole pages of"):
        kernels.encode(k[:, :, 1:], v[:, :, 1:], None, format, 5)


@pytest.mark.parametrize("format", [TQFormat(centered_keys=True, page=32), TQFormat(3, 16), TQFormat(16, 2)])
def test_encode_of_some_tokens(fused_kernels, format):
    k, v = (normal(i, 2, 3, 200, 64, dtype=mx.float16) + 2 for i in (1, 2))
    for start, stop in ((0, 64), (5, 133), (168, 200)):
        got = kernels.encode(k, v, None, format, 5, (start, stop))
        want = kernels.encode(*(mx.contiguous(x[:, :, start:stop]) for x in (k, v)), None, format, 5)
        for mine, theirs in zip(got, want, strict=True):
            assert all(a is b is None or same_bits(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("format", "dim", "value_dim", "dtype"), ENCODE[::2])
def test_decode_equals_the_codec(fused_kernels, format, dim, value_dim, dtype):
    layout = Layout((0, 3), (2, 2), (64, 32), (7, 36))
    parts = lambda d: [normal(d + b, 1, 2, n, d, dtype=dtype) for b, n in enumerate((73, 70))]  # noqa: E731
    keys = poison_rows(build_rows("keys", parts(dim), format, layout))
    values = poison_rows(build_rows("values", parts(value_dim), format, layout))
    eps = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}[dtype]
    for got, rows in zip(kernels.decode(keys, values), (keys, values), strict=True):
        assert got.dtype == rows.dtype
        assert max_error(got, decode64(rows)) < eps * 6


# ------------------------------------------------------------------ launches


def ragged(format, dim=64, seed=0):
    """Keys and values of three batch rows with different padding, packed and recent tokens."""
    layout = Layout((0, 5, 40), (2, 2, 1), (96, 64, 32), (31, 58, 56))
    counts = [f + p + r for f, p, r in zip(layout.first, layout.packed, layout.recent, strict=True)]
    make = lambda kind, s: build_rows(  # noqa: E731
        kind, [normal(s + b, 1, 2, n, dim, factor=3) for b, n in enumerate(counts)], format, layout
    )
    return poison_rows(make("keys", seed + 10)), poison_rows(make("values", seed + 20))


def check(q, keys, values, bound=TIGHT, **options):
    out = fused(q, keys, values, scale=q.shape[-1] ** -0.5, **options)
    want = attention64(q, decode64(keys), decode64(values), q.shape[-1] ** -0.5, pad=keys.layout.pad, **options)
    assert max_error(out, want) < bound * max(1, np.abs(want).max())


@pytest.mark.parametrize("wanted", (1, 16, 60, 10_000))
@pytest.mark.parametrize("length", (1, 3))
def test_any_number_of_splits(fused_kernels, monkeypatch, wanted, length):
    monkeypatch.setattr(kernels, "_WANTED_ITEMS", dict.fromkeys(kernels._WANTED_ITEMS, wanted))
    kernels.forget_launches()
    check(normal(1, 3, 4, length, 64), *ragged(TQFormat(centered_keys=True, page=32)), mask="causal")
    kernels.forget_launches()


@pytest.mark.parametrize("rows", (1, 2, 4))
@pytest.mark.parametrize("format", (TQFormat(3, 2, page=32), TQFormat.preset("tq3", page=32)))
@pytest.mark.parametrize("dim", (64, 80))
def test_any_number_of_rows_to_a_simdgroup(fused_kernels, monkeypatch, format, rows, dim):
    monkeypatch.setattr(kernels, "_rows_per_simdgroup", lambda *_: rows)
    kernels.forget_launches()
    check(normal(1, 3, 6, 2, dim), *ragged(format, dim), mask="causal")
    kernels.forget_launches()


@pytest.mark.parametrize("format", (TQFormat(page=32), TQFormat(3, 3, page=32), TQFormat.preset("tq3", page=32)))
def test_codes_read_as_integers(fused_kernels, monkeypatch, format):
    device = kernels.backend()
    monkeypatch.setitem(kernels._tests, device, kernels.SelfTest(None, False, None))
    check(normal(1, 3, 4, 1, 64), *ragged(format))


@runner_only
@pytest.mark.parametrize("seed", (1, 2, 3))
def test_schedules_of_threads(fused_kernels, seed):
    with msl.options(seed=seed):
        check(normal(1, 3, 4, 2, 64), *ragged(TQFormat.preset("tq3", page=32)), mask="causal")
        test_encode_gives_the_bits_of_the_codec(None, *ENCODE[5])


@runner_only
def test_slices_that_start_anywhere(fused_kernels):
    with msl.options(misalign=True):
        check(normal(1, 3, 4, 2, 64), *ragged(TQFormat(3, 2, page=32)), mask="causal")


def test_rows_of_a_loaded_cache_serve_several_threads(fused_kernels):
    """Their capacity is no multiple of a block: what one thread pads, and has not evaluated, is not for another."""
    cache = TQKVCache(TQFormat(window=0, sinks=0))
    cache.update_and_fetch(normal(1, 1, 2, 45, 64), normal(2, 1, 2, 45, 64))
    loaded = TQKVCache.from_state(cache.state)
    mx.eval(loaded.keys, loaded.values)
    rows, seen = loaded.rows, []
    for use in (lambda arrays: None, lambda arrays: seen.append(mx.eval(arrays))):
        thread = threading.Thread(target=lambda use=use: use(kernels.prepare(*rows)[1]))
        thread.start()
        thread.join()
    assert seen == [None]


def test_softcap_may_be_an_array_that_changes(fused_kernels):
    keys, values = ragged(TQFormat(page=32))
    q, cap = normal(9, 3, 4, 1, 64, factor=20.0), mx.array(5.0)
    for factor in (1, 4):
        cap *= factor
        got = mlx_tq.attention(q, keys, values, scale=0.125, softcap=cap)
        want = attention64(q, decode64(keys), decode64(values), 0.125, pad=keys.layout.pad, softcap=cap.item())
        assert max_error(got, want) < 2e-5


def test_lengths_compile_nothing_new(fused_kernels, monkeypatch):
    """100 steps of a cache build each kernel once, whatever its length."""
    assert kernels.reason(16, 16) is None  # the self test makes kernels too, and only once
    made = []
    make = "metal_kernel" if kernels.backend() == "metal" else "cuda_kernel"
    real = getattr(mx.fast, make)
    monkeypatch.setattr(mx.fast, make, lambda **kw: made.append(kw["name"]) or real(**kw))
    kernels._kernel.cache_clear()
    cache = TQKVCache(TQFormat(window=32, page=32, sinks=2))
    texts = set()
    q = normal(3, 1, 2, 1, 16)
    for i in range(100):
        step = normal(i, 1, 1, 1, 16)
        k, v = cache.update_and_fetch(step, step)
        mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25))
        if msl.last_run():
            texts.add((msl.last_run().name, msl.last_run().text))
    assert sorted(made) == ["tq_attend", "tq_decode", "tq_encode", "tq_merge"]
    assert all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in made)
    assert len(texts) == len({name for name, _ in texts})


def test_a_cache_on_kernels_holds_the_same_bits_as_on_ops(fused_kernels):
    format = TQFormat(3, 4, centered_keys=True, window=32, page=32)
    caches = [TQKVCache(format, fused=fused) for fused in ("require", "never")]
    for i, n in enumerate((50, 1, 1, 90, 3)):
        k, v = (normal(10 * i + j, 1, 2, n, 64, dtype=mx.float16) for j in (0, 1))
        outs = []
        for cache in caches:
            keys, values = cache.update_and_fetch(k, v)
            outs.append(mlx_tq.attention(normal(i, 1, 4, n, 64), keys.rows, values.rows, scale=0.1, mask="causal"))
        assert max_error(outs[0], np.array(outs[1]).astype(np.float64)) < 2e-6
    for a, b in zip(*(cache.state[1:] for cache in caches), strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("centered_keys", (False, True))
@pytest.mark.parametrize("preset", ("default", "tq3"))
def test_threadgroup_memory_stays_within_the_limit(preset, centered_keys):
    format = TQFormat.preset(preset, centered_keys=centered_keys)
    for dim in filter(supported_dim, range(16, 513)):
        if kernels.dim_reason(dim):
            continue
        for device in ("metal", "cuda"):
            rows = kernels._rows_per_simdgroup(64, dim, dim, format, device)
            assert rows >= 1
            assert kernels._threadgroup_bytes(rows, dim, format) <= 32768


@runner_only
@pytest.mark.parametrize("centered_keys", (False, True))
@pytest.mark.parametrize("dim", (512, 256, 128))
def test_threadgroup_memory_of_wide_rows(fused_kernels, monkeypatch, dim, centered_keys):
    """The kernel takes as much as its launch counts on."""
    taken, launch = {}, kernels._launch

    def record(made, inputs):
        out = launch(made, inputs)
        taken[made.name] = msl.last_run().threadgroup_bytes
        return out

    monkeypatch.setattr(kernels, "_launch", record)
    format = TQFormat.preset("tq3", page=32, scale_dtype="bfloat16", centered_keys=centered_keys)
    keys, values = ragged(format, dim=dim)
    check(normal(1, 3, 8, 2, dim), keys, values, bound=6e-6)
    rows = kernels._rows_per_simdgroup(8, dim, dim, format, "metal")
    assert taken["attend"] == kernels._threadgroup_bytes(rows, dim, format) <= 32768


# ------------------------------------------------------------------ which path, and why


def test_explain_names_the_path(fused_kernels):
    keys, values = ragged(TQFormat(page=32))
    assert mlx_tq.explain(keys, values) == f"kernels ({kernels.backend()})"
    assert 'fused="never"' in mlx_tq.explain(replace(keys, fused="never"), values)
    narrow = [make(normal(1, 1, 1, 8, 72)) for make in (mlx_tq.encode_keys, mlx_tq.encode_values)]
    assert "72 is not a multiple of 16" in mlx_tq.explain(*narrow)
    cache = TQKVCache()
    cache.update_and_fetch(normal(1, 1, 1, 8, 64), normal(1, 1, 1, 8, 64))
    assert "kernels" in mlx_tq.explain([cache, object()])
    later = f"MLX's own attention until tokens are packed, then kernels ({kernels.backend()})"
    assert mlx_tq.explain(cache) == later
    # A batch has masks that are arrays, which only the kernels take as they are meant here.
    assert mlx_tq.explain(TQKVCache.merge([cache, cache])) == f"kernels ({kernels.backend()})"


def test_require_raises_before_anything_is_stored(fused_kernels):
    cache = TQKVCache(fused="require")
    with pytest.raises(ValueError, match=r'fused="require".*72'):
        cache.update_and_fetch(normal(1, 1, 1, 8, 72), normal(1, 1, 1, 8, 72))
    assert cache.empty()
    with pytest.raises(ValueError, match="fused must be one of"):
        TQKVCache(fused="yes")


@pytest.mark.skipif(kernels.backend() is not None, reason="needs a machine without a GPU")
def test_without_a_gpu_ops_run_and_say_why():
    keys, values = ragged(TQFormat(page=32))
    assert mlx_tq.explain(keys, values).startswith("MLX ops: the default device is cpu")
    with pytest.raises(ValueError, match='fused="require"'):
        mlx_tq.attention(normal(1, 3, 2, 1, 64), replace(keys, fused="require"), values, scale=1)


@runner_only
def test_self_test_passes_and_is_kept(fused_kernels):
    kernels._tests.clear()
    test = kernels.self_test("metal")
    assert test.problem is None and test.denormal and test.error < 1e-5
    assert kernels.self_test("metal") is test


@runner_only
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("attend.metal", "% J == 0 ? total", "% J == 0 ? 2.0f * total"),
        ("attend.metal", "score[i], mean_score)", "score[i], 0.0f)"),
        ("attend.metal", "rotate_row_back<DV>(y, v_signs, v_mix, consts[3] * v_code.step, lane);", ""),
        ("encode.metal", "- (CENTERED ? float(k_mean[page * D + i]) : 0.0f)", "- 0.0f"),
    ],
    ids=["exact scores", "scores of means", "rotation", "encoded means"],
)
def test_self_test_notices(fused_kernels, monkeypatch, file, old, new):
    """Packed and exact tokens, and means, are all part of it."""
    real = kernels.text
    assert old in real(file)
    monkeypatch.setattr(kernels, "text", lambda name: real(name).replace(old, new) if name == file else real(name))
    kernels.forget_launches()
    kernels._tests.clear()
    with pytest.warns(RuntimeWarning, match="the self test is off by"):
        assert kernels.self_test("metal").problem is not None
    kernels.forget_launches()


@runner_only
def test_self_test_turns_to_integers_where_denormals_are_flushed(fused_kernels, monkeypatch):
    honest = kernels._self_test_error
    monkeypatch.setattr(
        kernels, "_self_test_error", lambda device: 1.0 if kernels._tests["metal"].denormal else honest(device)
    )
    kernels._tests.clear()
    test = kernels.self_test("metal")
    assert test.problem is None and not test.denormal


@runner_only
@pytest.mark.parametrize("breakage", ("wrong numbers", "not a number", "wrong codes", "does not compile"))
def test_self_test_that_fails_warns_once_and_leaves_ops(fused_kernels, monkeypatch, breakage):
    old, new = {
        "wrong numbers": ("exp2(score[i] - top)", "exp2(score[i])"),
        "not a number": ("exp2(score[i] - top)", "NAN"),
        "wrong codes": ("(1 << (B - 1)), 0,", "(1 << (B - 1)) + 1, 0,"),
        "does not compile": ("float sum", "flaot sum"),
    }[breakage]
    real = kernels.text
    monkeypatch.setattr(kernels, "text", lambda name: real(name).replace(old, new))
    kernels._kernel.cache_clear()
    kernels._tests.clear()
    keys, values = ragged(TQFormat(page=32))
    q = normal(1, 3, 4, 1, 64)
    with pytest.warns(RuntimeWarning, match="uses MLX ops") as caught:
        check(q, keys, values)
        check(q, keys, values)
    assert len(caught) == 1
    assert "self test" in mlx_tq.explain(keys, values)


# ------------------------------------------------------------------ what a launch takes for granted


@pytest.mark.parametrize("damage", ("layout", "means", "values", "heads"))
def test_arrays_that_do_not_fit_are_refused(fused_kernels, damage):
    keys, values = ragged(TQFormat(centered_keys=True, page=32))
    if damage == "layout":
        layout = keys.layout._replace(packed=(160, 128, 96))
        keys, values = replace(keys, layout=layout), replace(values, layout=layout)
    elif damage == "means":
        keys = replace(keys, regions=keys.regions._replace(mean=keys.regions.mean[:, :, :1]))
    elif damage == "values":
        values = replace(values, exact=values.exact[:, :, :59])
    else:
        keys = replace(keys, regions=keys.regions._replace(scale=keys.regions.scale[:, :1]))
    with pytest.raises(ValueError, match="must"):
        fused(normal(1, 3, 4, 1, 64), keys, values, scale=1.0)


def test_keys_are_used_with_several_values(fused_kernels):
    """What keys remember of a launch is good for the same values only."""
    keys, values = ragged(TQFormat(page=32))
    others = replace(values, exact=values.exact * 2)
    q = normal(1, 3, 4, 1, 64)
    for pair in ((keys, values), (keys, others), (keys, values)):
        check(q, *pair)


def test_poisoned_spare_rows_of_a_cache(fused_kernels):
    cache = TQKVCache(TQFormat(16, 3, window=32, page=32))
    cache.update_and_fetch(normal(1, 1, 2, 150, 64), normal(2, 1, 2, 150, 64))
    poison_cache(cache)
    check(normal(3, 1, 4, 2, 64), *cache.rows, mask="causal")


def test_threadgroup_arrays_are_declared_for_cuda_too():
    for file in kernels.path("cuda.h").parent.glob("*.*"):
        for line in () if file.suffix == ".md" else file.read_text().splitlines():
            assert not re.match(r" *threadgroup \w+ \w+\[", line), f"{file.name}: {line}"


def test_cuda_gets_the_files_by_name(monkeypatch):
    got = {}
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **given: got.update(given))
    kernels._kernel.__wrapped__("attend_mma", "cuda")
    included = re.findall('#include "(.*)"\n', got["header"] + got["source"])
    names = [*("cuda.h", *kernels._HEADERS["attend_mma"].split()), "attend_mma.metal"]
    assert included == [str(kernels.path(name)) for name in names]


@pytest.mark.parametrize(
    ("tokens", "batch", "splits"), [(1024, 1, 11), (4096, 1, 17), (131072, 1, 17), (16384, 6, 3), (32768, 16, 3)]
)
def test_threadgroups_on_a_large_gpu(tokens, batch, splits):
    """One a multiprocessor, but where there is much to read what the registers of all carry."""
    pair = SimpleNamespace(dim=128, value_dim=128, n_kv_heads=8, batch=batch)
    assert kernels._launch_shape(pair, Layout.uniform(batch, 4, tokens, 380), 4, True) == (4, 1, splits)


def test_the_kernels_are_skipped_only_for_a_reason():
    assert kernels_missing() is None or "ziglang" in kernels_missing() or "x86-64" in kernels_missing()
    if kernels_missing() is None:
        with running_kernels():
            assert kernels.reason(64, 64) is None


# ------------------------------------------------------------------ who reads what


@given(st.integers(0, 3000), st.integers(0, 900), st.integers(2, 300), st.sampled_from(sorted(kernels._EXACT_COST)))
def test_every_block_is_dealt_out_once(packed, exact, workers, kernel):
    coders, packed_share, exact_share = kernels._deal(packed, exact, workers, kernels._EXACT_COST[kernel], 1 << 31)
    assert 0 <= coders <= workers
    for tokens, share, readers in ((packed, packed_share, coders), (exact, exact_share, workers - coders)):
        blocks = -(-tokens // 32)
        ranges = [range(min(i * share, blocks), min((i + 1) * share, blocks)) for i in range(readers)]
        assert [block for part in ranges for block in part] == list(range(blocks))


@given(st.integers(1, 1 << 24), st.integers(0, 100_000), st.integers(1, 4096), st.sampled_from((64, 128, 256)))
def test_sums_of_whole_numbers_fit(packed, exact, heads, dim):
    """A simdgroup of attend_mma.metal reads no more packed blocks than its sums have room for."""
    layout = Layout.uniform(1, 0, packed, exact)
    pair = SimpleNamespace(device="cuda", batch=1, n_kv_heads=heads, dim=dim, value_dim=64)
    _, _, splits = kernels._launch_shape(pair, layout, 4, True)
    most, cost = kernels._MMA_SHARE, kernels._EXACT_COST["attend_mma"]
    assert kernels._deal(packed, exact, splits * kernels.NSG, cost, most)[1] <= most
    assert 255 * 255 * 32 * most < 1 << 31


@pytest.mark.parametrize("workers", (2, 7, 264))
def test_blocks_are_dealt_out_evenly(workers):
    """The worker with the most to do has little more than its share, or a block."""
    for packed, exact in ((8192, 380), (131072, 260), (700, 380), (32, 388)):
        _, packed_share, exact_share = kernels._deal(packed, exact, workers, 2, 1 << 31)
        fair = (packed + 2 * exact) / 32 / workers
        # One worker of two kinds is the least there can be, so two workers are as uneven as the tokens.
        most = max(-(-packed // 32), 2 * -(-exact // 32)) if workers == 2 else 1.5 * fair + 2
        assert max(packed_share, 2 * exact_share) <= most


# ------------------------------------------------------------------ every instance


def instances():
    """Formats and widths that between them compile every branch of the templates for every supported width."""
    kinds = (
        TQFormat(),
        TQFormat(3, 2, centered_keys=True),
        TQFormat(2, 3, codebook="lloyd", qjl=True, scale_dtype="float16"),
        TQFormat(16, 4, codebook="lloyd"),
        TQFormat(4, 16),
    )
    widths = [d for d in range(16, 513) if supported_dim(d) and kernels.dim_reason(d) is None]
    return [(f, d, v) for f in kinds for d in widths for v in sorted({d, 64})]


@runner_only
@pytest.mark.slow
@pytest.mark.parametrize(("format", "dim", "value_dim"), instances())
def test_every_instance_is_well_formed(fused_kernels, monkeypatch, format, dim, value_dim):
    """Types and address spaces of the text that MLX would compile, for all masks, dtypes and options; nothing runs."""
    layout = Layout.uniform(1, 2, 64, 7)
    with msl.options(execute=False):
        for dtype in codec.FLOAT_DTYPES:
            keys, values = (
                build_rows(kind, [normal(1, 1, 1, 73, d, dtype=dtype)], format, layout)
                for kind, d in (("keys", dim), ("values", value_dim))
            )
            q, k, v = (normal(1, 1, h, 8, d, dtype=dtype) for h, d in ((2, dim), (1, dim), (1, value_dim)))
            for i, mask in enumerate((None, "causal", mx.ones((8, 73), mx.bool_), mx.ones((8, 73), dtype))):
                monkeypatch.setitem(kernels._tests, "metal", kernels.SelfTest(None, i % 2 == 0, None))
                kernels.attend(q, keys, values, 1.0, mask, mx.zeros((2,)) if i else None, 20.0 if i == 3 else None)
            kernels.decode(keys, values)
            kernels.encode(k, v, codec.page_means(k, format.page) if format.centered_keys else None, format, 0)


# ------------------------------------------------------------------ graphs


def test_each_stream_has_a_name_of_its_own():
    """A graph runs on the stream it was built on, so another stream must not find it."""
    names = [kernels._stream(), kernels._stream()]
    with mx.stream(mx.new_stream(mx.default_device())):
        names.append(kernels._stream())
    thread = threading.Thread(target=lambda: names.append(kernels._stream()))
    thread.start()
    thread.join()
    names.append(kernels._stream())
    assert names[0] == names[1] == names[4] and len(set(names)) == 3


def test_a_graph_is_not_taken_for_a_dead_one():
    """MLX finds compiled functions by their addresses, in each thread, and addresses are used again."""
    x = mx.array([1.0])
    mx.eval(x)
    with ThreadPoolExecutor(1) as other:
        for i in range(50):
            graph = kernels._graph(lambda x, i=i: x + i)
            # Of the threads that ran it, only the last forgets a function when it is gone.
            got = other.submit(lambda graph=graph: graph(x).item()).result(), graph(x).item()
            assert got == (i + 1, i + 1)
