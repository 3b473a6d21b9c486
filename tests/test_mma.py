"""attend_mma.metal, the kernel for NVIDIA's matrix units: on such a GPU, else by the runner, which has their tiles."""

from dataclasses import replace

import mlx.core as mx
import msl
import numpy as np
import pytest
from conftest import fused
from oracle import attention64, build_rows, decode64, max_error, normal, poison_rows, to64
from test_attention import plain
from test_kernels import runner_only

from mlx_tq import TQFormat, doctor, kernels
from mlx_tq.codec import Layout

FORMATS = {
    "default": TQFormat(centered_keys=True, page=32),
    "k4v2": TQFormat(4, 2, page=32),
    "k3v2": TQFormat(3, 2, centered_keys=True, page=32),
    "k2v3": TQFormat(2, 3, scale_dtype="float16", page=32),
}
# Padding, first, packed and recent tokens of three batch rows.
RAGGED = Layout((0, 5, 40), (2, 2, 1), (96, 64, 32), (31, 58, 56))
LAYOUTS = {
    "ragged": RAGGED,
    "nothing packed": Layout((0, 5), (4, 4), (0, 0), (33, 28)),
    "a row with nothing packed": Layout((0, 0), (4, 4), (0, 32), (40, 8)),
    "all packed": Layout.uniform(1, 0, 288, 0),
    "long": Layout.uniform(1, 4, 544, 140),
}


@pytest.fixture(autouse=True)
def mma(fused_kernels, monkeypatch):
    kernels.self_test(kernels.backend())
    monkeypatch.setattr(kernels, "_has_mma", lambda device: True)
    launched, launch = [], kernels._launch

    def recorded(what, inputs):
        launched.append(what.name)
        return launch(what, inputs)

    monkeypatch.setattr(kernels, "_launch", recorded)
    kernels.forget_launches()
    with msl.options(threadgroup_limit=48 << 10):  # NVIDIA's, larger than Metal's
        yield
    kernels.forget_launches()
    assert "attend_mma" in launched


def rows(format, layout, dim, value_dim, dtype, factor=1.0, n_kv=2):
    counts = [f + p + r for f, p, r in zip(layout.first, layout.packed, layout.recent, strict=True)]
    return [
        poison_rows(
            build_rows(
                kind,
                [normal(s + b, 1, n_kv, n, d, factor=factor, dtype=dtype) for b, n in enumerate(counts)],
                format,
                layout,
            )
        )
        for kind, s, d in (("keys", 10, dim), ("values", 20, value_dim))
    ]


def check(q, keys, values, **options):
    """Our error is at most twice the rounding of the result, that is of its largest value, to q's dtype."""
    scale = q.shape[-1] ** -0.5
    out = fused(q, keys, values, scale=scale, **options)
    assert out.dtype == q.dtype
    want = attention64(q, decode64(keys), decode64(values), scale, pad=keys.layout.pad, **options)
    error = max_error(out, want)
    eps = float(mx.finfo(q.dtype).eps)
    assert error <= 2 * eps * max(1.0, np.abs(want).max())
    return out, want, error


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16))
@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize("format", FORMATS)
def test_formats_and_widths(format, dim, dtype):
    q = normal(1, 3, 4, 1, dim, dtype=dtype)
    check(q, *rows(FORMATS[format], RAGGED, dim, dim, dtype))


@pytest.mark.parametrize("value_dim", (64, 256))
def test_values_of_another_width(value_dim):
    check(normal(1, 3, 4, 2, 128, dtype=mx.float16), *rows(FORMATS["default"], RAGGED, 128, value_dim, mx.float16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    layout = LAYOUTS[layout]
    q = normal(1, len(layout.pad), 4, 1, 64, dtype=mx.float16)
    check(q, *rows(FORMATS["default"], layout, 64, 64, mx.float16))


@pytest.mark.parametrize("dim", (64, 128, 256))
@pytest.mark.parametrize(("n_heads", "length"), [(2, 1), (8, 1), (16, 1), (6, 3), (18, 2), (2, 40)])
def test_tiles_of_query_rows(n_heads, length, dim):
    """Fewer rows than a tile, whole tiles of 4 and of 8, and some with spare rows."""
    q = normal(1, 3, n_heads, length, dim, dtype=mx.float16)
    check(q, *rows(FORMATS["default"], RAGGED, dim, dim, mx.float16), mask="causal")


@pytest.mark.parametrize("format", FORMATS)
def test_formats_of_tiles_of_eight(format):
    q = normal(1, 3, 16, 1, 128, dtype=mx.bfloat16)
    check(q, *rows(FORMATS[format], RAGGED, 128, 64, mx.bfloat16))


@pytest.mark.parametrize("sinks", (False, True))
@pytest.mark.parametrize("softcap", (None, 3.0))
@pytest.mark.parametrize("kind", ("none", "causal", "bool", "row", "additive"))
def test_masks(kind, softcap, sinks):
    layout, length = RAGGED, 3
    columns = layout.length
    random = np.random.default_rng(5)
    mask = {
        "none": None,
        "causal": "causal",
        "bool": mx.array(random.random((3, 4, length, columns)) < 0.6),
        "row": mx.array(random.random((3, 1, 1, columns)) < 0.6),
        "additive": normal(6, length, columns, factor=2),
    }[kind]
    q = normal(1, 3, 4, length, 64, dtype=mx.float16)
    sinks = normal(7, 4) if sinks else None
    check(q, *rows(FORMATS["k3v2"], layout, 64, 64, mx.float16), mask=mask, softcap=softcap, sinks=sinks)


def test_rows_that_see_nothing_are_zero():
    q = normal(1, 3, 4, 2, 64, dtype=mx.float16)
    hidden = mx.zeros((RAGGED.length,), mx.bool_)
    out, _, _ = check(q, *rows(FORMATS["default"], RAGGED, 64, 64, mx.float16), mask=hidden)
    assert not np.array(out).any()


@pytest.mark.parametrize("wanted", (0, 6, 9, 10_000))
def test_any_number_of_splits(monkeypatch, wanted):
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", wanted)
    layout = LAYOUTS["long"]
    q = normal(1, 1, 4, 2, 64, dtype=mx.float16)
    check(q, *rows(FORMATS["default"], layout, 64, 64, mx.float16), mask="causal")


def test_more_pages_than_are_scored_at_a_time(monkeypatch):
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", 0)
    layout = Layout.uniform(1, 0, 18 * 4 * 32, 0)
    check(normal(1, 1, 4, 1, 64, dtype=mx.float16), *rows(FORMATS["default"], layout, 64, 64, mx.float16, n_kv=1))


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16))
@pytest.mark.parametrize("spread", (1e-4, 1.0, 30.0, 1000.0))
def test_scores_of_any_range(spread, dtype):
    """Never more than twice the error of half-precision attention, whatever the queries."""
    q = (normal(1, 1, 4, 2, 64) * spread).astype(dtype)
    keys, values = rows(FORMATS["default"], LAYOUTS["long"], 64, 64, dtype)
    want = attention64(q, decode64(keys), decode64(values), 0.125)
    half = max_error(plain(q, keys, values, 0.125, dtype=dtype), want)
    assert max_error(fused(q, keys, values, scale=0.125), want) <= 2 * half


@pytest.mark.parametrize("loud", (1e-30, 1e-3, 1e4, 1e30))
def test_values_of_any_size(loud):
    """Scales of values leave the range of float16 by far; so do those of neighbours from each other."""
    keys, values = rows(FORMATS["default"], LAYOUTS["all packed"], 64, 64, mx.bfloat16)
    step = mx.where(mx.arange(values.regions.scale.shape[2]) % 3 == 0, loud, 1.0)
    scale = (values.regions.scale.astype(mx.float32) * step).astype(mx.bfloat16)
    values = replace(values, regions=values.regions._replace(scale=scale))
    q = normal(1, 1, 4, 1, 64, dtype=mx.bfloat16)
    want = attention64(q, decode64(keys), decode64(values), 0.125)
    assert max_error(fused(q, keys, values, scale=0.125), want) <= 2**-7 * np.abs(want).max()


def test_faint_values_while_scores_rise(monkeypatch):
    """The factor of the weights can grow no more when their maximum rises."""
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", 0)
    layout = LAYOUTS["all packed"]
    rising = mx.arange(layout.length)[:, None] / layout.length
    key = (normal(1, 1, 2, layout.length, 64) * 0.1 + 4 * rising).astype(mx.bfloat16)
    keys = build_rows("keys", [key], FORMATS["k4v2"], layout)
    values = rows(FORMATS["k4v2"], layout, 64, 64, mx.bfloat16)[1]
    values = replace(values, regions=values.regions._replace(scale=values.regions.scale * mx.array(1e-33, mx.bfloat16)))
    q = mx.ones((1, 4, 1, 64), mx.bfloat16)
    want = attention64(q, decode64(keys), decode64(values), 0.125)
    assert max_error(fused(q, keys, values, scale=0.125), want) <= 2**-7 * np.abs(want).max()


@pytest.mark.parametrize("bias", (-mx.inf, -40.0))
def test_a_loud_value_that_hardly_counts_leaves_the_others_their_digits(bias):
    keys, values = rows(FORMATS["default"], LAYOUTS["all packed"], 64, 64, mx.bfloat16)
    loud = mx.arange(values.regions.scale.shape[2]) == 70
    scale = values.regions.scale * mx.where(loud, 1e8, 1.0).astype(mx.bfloat16)
    values = replace(values, regions=values.regions._replace(scale=scale))
    check(normal(1, 1, 4, 1, 64, dtype=mx.bfloat16), keys, values, mask=mx.where(loud, bias, 0.0))


@pytest.mark.parametrize("loud", (1e-3, 1.0, 1e3))
def test_many_small_weights_beside_a_large_one(monkeypatch, loud):
    """One token has nearly all the weight, and thousands share the rest; their values have a mean.

    Rounded to whole numbers each for itself, all the small weights would be too large, or too small, or vanish.
    """
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", 0)
    n, sink = 8192, 5
    layout = Layout.uniform(1, 0, n, 0)
    k, v = np.zeros((2, 1, 1, n, 64), np.float32)
    k[..., sink, 0] = 64
    k[..., 1] = np.random.default_rng(3).standard_normal(n) * 1e-3
    v[:] = np.random.default_rng(4).standard_normal(64) + 0.1 * np.random.default_rng(5).standard_normal((n, 64))
    v[..., sink, :] *= -0.01
    make = lambda kind, x: build_rows(kind, [mx.array(x, mx.bfloat16)], FORMATS["k4v2"], layout)  # noqa: E731
    keys, values = make("keys", k), make("values", v)
    scale = values.regions.scale * mx.where(mx.arange(n) == sink, loud, 1.0).astype(mx.bfloat16)
    values = replace(values, regions=values.regions._replace(scale=scale))
    dense = decode64(keys), decode64(values)
    for share in (0.3, 3.0, 30.0):  # of the sink, in units of all the others together
        q = np.zeros((1, 4, 1, 64), np.float32)
        q[..., 0] = np.log(share * n) / 8  # times 64, times the scale of scores
        q = mx.array(q, mx.bfloat16)
        want = attention64(q, *dense, 0.125)
        assert max_error(fused(q, keys, values, scale=0.125), want) <= 2**-8 * np.abs(want).max()


def test_loud_queries_of_bfloat16():
    """Rotated queries beyond the range of float16."""
    q = (normal(1, 1, 4, 1, 64) * 1e20).astype(mx.bfloat16)
    keys, values = rows(FORMATS["default"], LAYOUTS["all packed"], 64, 64, mx.bfloat16)
    want = attention64(q, decode64(keys), decode64(values), 1e-20)
    assert max_error(fused(q, keys, values, scale=1e-20), want) <= 2**-7 * np.abs(want).max()


@pytest.mark.parametrize("kind", ("keys", "values"))
def test_a_bad_row_shows_where_it_is_seen_and_only_there(kind):
    keys, values = rows(FORMATS["default"], LAYOUTS["all packed"], 64, 64, mx.float16)
    bad = keys if kind == "keys" else values
    scale = np.array(bad.regions.scale.astype(mx.float32))
    scale[0, 1, 70] = np.nan
    bad = replace(bad, regions=bad.regions._replace(scale=mx.array(scale).astype(mx.bfloat16)))
    keys, values = (bad, values) if kind == "keys" else (keys, bad)
    q = normal(1, 1, 4, 1, 64, dtype=mx.float16)
    seen = np.isnan(np.array(fused(q, keys, values, scale=0.125))).any(axis=(2, 3))[0]
    assert seen.tolist() == [False, False, True, True]
    hidden = mx.array(np.arange(288) != 70)
    assert not np.isnan(np.array(fused(q, keys, values, scale=0.125, mask=hidden))).any()


@runner_only
@pytest.mark.parametrize("seed", (1, 2))
def test_schedules_of_threads(seed):
    with msl.options(seed=seed):
        q = normal(1, 3, 4, 2, 64, dtype=mx.float16)
        check(q, *rows(FORMATS["k3v2"], RAGGED, 64, 64, mx.float16), mask="causal")


@pytest.mark.parametrize("share", (0.2271, 0.2288, 0.25, 0.2504))
def test_equal_weights_are_not_rounded_up_at_the_same_tokens(monkeypatch, share):
    """8,192 weights of a part of a unit beside a large one, and values that repeat every four tokens."""
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", 0)  # one threadgroup reads all
    n, large = 8192, 5
    k, v = np.zeros((1, 1, n, 64), np.float32), np.resize(to64(normal(4, 4, 64)), (1, 1, n, 64))
    k[..., large, 0], v[..., large, :] = 64, to64(normal(5, 64))
    format, layout = TQFormat(page=32), Layout.uniform(1, 0, n, 0)
    keys, values = (
        build_rows(kind, [mx.array(x.astype(np.float16))], format, layout) for kind, x in (("keys", k), ("values", v))
    )
    q = mx.zeros((1, 8, 1, 64), mx.float16) + mx.array(np.eye(64, dtype=np.float16)[0])
    scale = float(np.log(32500 / share) / decode64(keys)[0, 0, large, 0])
    want = attention64(q, decode64(keys), decode64(values), scale)
    assert max_error(fused(q, keys, values, scale=scale), want) < 2e-3


@pytest.mark.parametrize("broken", (False, True))
def test_the_self_test_runs_it(monkeypatch, tmp_path, capsys, broken):
    if broken:
        path, wrong = kernels.path, tmp_path / "attend_mma.metal"
        wrong.write_text(kernels.text(wrong.name).replace("offset = float", "offset = 1.1f * float"))
        monkeypatch.setattr(kernels, "path", lambda name: wrong if name == wrong.name else path(name))
        kernels._kernel.cache_clear()
    monkeypatch.setattr(kernels, "_tests", {})
    found = kernels.self_test(kernels.backend())
    kernels._kernel.cache_clear()
    assert found.problem is None and found.denormal and found.mma is not broken
    assert doctor.main(["--no-timings"]) == 0
    assert ("without matrix units" in capsys.readouterr().out) is broken
