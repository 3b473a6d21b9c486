import copy
import json
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from oracle import attention64, decode64, max_error, normal, poison_cache, same_bits, to64
from test_cache import FORMATS, contents, fill, filled, state_digest, tokens

import mlx_tq
from mlx_tq import TQKVCache
from mlx_tq.batch import TQBatchKVCache
from mlx_tq.store import STATE_VERSION

cache_module = pytest.importorskip("mlx_lm.models.cache")
BatchKVCache = cache_module.BatchKVCache

SOME = ("default", "window", "centered window", "k4v4", "tq3", "raw keys", "raw values")


def merged(name, lengths, **shape):
    """A batch of random sequences of the given lengths, and the sequences alone."""
    solos = [filled(name, n, seed=10 * i, **shape) for i, n in enumerate(lengths)]
    return TQKVCache.merge(solos), solos


def joined(caches):
    """Random new tokens of every row, as the batch takes them."""
    return tuple(mx.concatenate(side, axis=0) for side in zip(*caches, strict=True))


def attend(q, views, mask):
    return mx.fast.scaled_dot_product_attention(q, *views, scale=0.125, mask=mask)


def check_rows_equal_solo(batch, solos):
    """Every row of the batch holds the bits of the sequence alone."""
    assert np.array_equal(np.array(batch.offset), [solo.offset for solo in solos])
    for i, solo in enumerate(solos):
        if solo.offset:
            assert contents(batch.extract(i)) == contents(solo)
        else:
            assert batch.extract(i).empty()


def decoded(batch):
    return tuple(decode64(rows) for rows in batch.rows)


# ------------------------------------------------------------------ rows equal solo


@pytest.mark.parametrize("name", FORMATS)
def test_merged_rows_decode_and_attend_as_alone(name):
    lengths = [3, 150, 0, 77, 300]
    batch, solos = merged(name, lengths, h=1)
    assert isinstance(batch, TQBatchKVCache) and batch.size() == 300
    assert batch.left_padding.tolist() == [297, 150, 300, 223, 0]
    check_rows_equal_solo(batch, solos)
    for start, n in ((0, 1), (1, 5), (6, 130), (136, 1)):
        new = [tokens(n, h=1, seed=100 * start + i) for i in range(5)]
        mask, masks = batch.make_mask(n), [solo.make_mask(n) for solo in solos]
        q = normal(start, 5, 2, n, 64)
        views = batch.update_and_fetch(*joined(new))
        out = attend(q, views, mask)
        k64, v64 = (decode64(view.rows) for view in views)
        assert max_error(out, attention64(q, k64, v64, 0.125, mask)) < 2e-6
        for i, (solo, rows) in enumerate(zip(solos, new, strict=True)):
            alone = solo.update_and_fetch(*rows)
            assert max_error(out[i : i + 1], to64(attend(q[i : i + 1], alone, masks[i]))) < 2e-6
            for view, want in zip(views, alone, strict=True):
                assert same_bits(view[i : i + 1, :, view.shape[2] - solo.offset :], mx.array(want))
        check_rows_equal_solo(batch, solos)
    for rows, views in zip(batch.rows, batch.keys_and_values(), strict=True):
        assert max_error(views, decode64(rows)) < 3e-6


def test_lengths_3_7_12_drop_the_12_decode_5_more():
    for name in FORMATS:
        batch, solos = merged(name, [0, 0, 0])
        lengths = [3, 7, 12]
        new = [tokens(n, seed=n) for n in lengths]
        pad = lambda x: mx.pad(x, [(0, 0), (0, 0), (0, 12 - x.shape[2]), (0, 0)], constant_values=9)  # noqa: E731
        batch.prepare(lengths=lengths, right_padding=[9, 5, 0])
        batch.update_and_fetch(*joined([tuple(map(pad, rows)) for rows in new]))
        batch.finalize()
        for solo, rows in zip(solos, new, strict=True):
            solo.update_and_fetch(*rows)
        check_rows_equal_solo(batch, solos)
        batch.filter([0, 1])
        del solos[2]
        assert batch.size() == 7 and batch.left_padding.tolist() == [4, 0]
        for step in range(5):
            new = [tokens(1, seed=20 + step + i) for i in range(2)]
            mask, q = batch.make_mask(1), normal(step, 2, 4, 1, 64)
            out = attend(q, batch.update_and_fetch(*joined(new)), mask)
            for i, (solo, rows) in enumerate(zip(solos, new, strict=True)):
                assert max_error(out[i : i + 1], to64(attend(q[i : i + 1], solo.update_and_fetch(*rows), None))) < 2e-6
        check_rows_equal_solo(batch, solos)


@pytest.mark.parametrize("name", FORMATS)
def test_left_padding_is_never_stored(name):
    """A batch built with left padding [0, 3], in chunks smaller than the padding."""
    batch, stock = TQBatchKVCache([0, 0], FORMATS[name], 1), BatchKVCache([0, 0])
    solos = [TQKVCache(FORMATS[name], 1) for _ in range(2)]
    for cache in (batch, stock):
        cache.prepare(left_padding=[0, 3])
    k, v = tokens(90, b=2)
    start = 0
    for n in (2, 2, 60, 1, 25):
        part = slice(start, start + n)
        assert batch.offset.tolist() == stock.offset.tolist()
        mask = batch.make_mask(n)
        assert same_mask(mask, stock.make_mask(n))
        out = attend(normal(5, 2, 4, n, 64), batch.update_and_fetch(k[:, :, part], v[:, :, part]), mask)
        assert mx.isfinite(out).all().item()
        stock.update_and_fetch(k[:, :, part], v[:, :, part])
        start += n
    for i, (solo, pad) in enumerate(zip(solos, (0, 3), strict=True)):
        fill(solo, k[i : i + 1, :, pad:], v[i : i + 1, :, pad:])
    check_rows_equal_solo(batch, solos)
    assert batch.left_padding.tolist() == [0, 3]


def same_mask(a, b):
    return a.dtype == b.dtype == mx.bool_ and a.shape == b.shape and np.array_equal(np.array(a), np.array(b))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("lengths_known", (True, False))
@pytest.mark.parametrize("chunk", (23, 64, 1000))
def test_right_padded_prompts(name, lengths_known, chunk):
    """Prompts of three lengths behind caches of three lengths, in chunks; garbage in the padding changes nothing."""
    batch, solos = merged(name, [5, 0, 210])
    lengths = [200, 3, 61]
    new = [tokens(n, seed=n) for n in lengths]
    pad = lambda x: mx.pad(x, [(0, 0), (0, 0), (0, 200 - x.shape[2]), (0, 0)], constant_values=1e4)  # noqa: E731
    k, v = joined([tuple(map(pad, rows)) for rows in new])
    right = [0, 197, 139]
    batch.prepare(right_padding=mx.array(right), **({"lengths": lengths} if lengths_known else {}))
    for start in range(0, 200, chunk):
        part = slice(start, start + chunk)
        n = k[:, :, part].shape[2]
        mask, q = batch.make_mask(n), normal(3, 3, 4, n, 64)
        out = attend(q, batch.update_and_fetch(k[:, :, part], v[:, :, part]), mask)
        for i, (solo, rows) in enumerate(zip(solos, new, strict=True)):
            rows = [x[:, :, part] for x in rows]
            live = rows[0].shape[2]
            if live and lengths_known:
                want = attend(q[i : i + 1, :, :live], solo.update_and_fetch(*rows), solo_mask(solo, live))
                assert max_error(out[i : i + 1, :, :live], to64(want)) < 2e-6
            elif live:
                solo.update_and_fetch(*rows)
        state = batch.state  # what mlx-lm evaluates between chunks
        assert contents(TQBatchKVCache.from_state(state)) == contents(batch)
    batch.finalize()
    check_rows_equal_solo(batch, solos)
    assert batch.left_padding.tolist() == [205, 407, 139] and batch.size() == 410
    exact, format = batch.rows[0].exact, solos[0].format
    assert (0 if exact is None else exact.shape[2]) <= format.sinks + format.window + format.page


def solo_mask(solo, n):
    return None if n == 1 else "causal"


@pytest.mark.parametrize("name", SOME)
def test_trim_equals_solo(name):
    for n in (0, 1, 30, 100, 149, 151, 260, 1000):
        batch, solos = merged(name, [150, 20, 260])
        before = decoded(batch)
        assert batch.trim(n) == min(n, 260)
        for solo in solos:
            solo.trim(n)
        assert batch.size() == max(0, 260 - n)
        for rows, was in zip(batch.rows, before, strict=True):
            assert np.abs(decode64(rows) - was[:, :, : batch.size()]).max(initial=0) < 2e-6
        assert np.array_equal(np.maximum(0, np.array(batch.offset)), [solo.offset for solo in solos])
        for i, solo in enumerate(solos):
            assert not solo.offset or contents(batch.extract(i)) == contents(solo)
    with pytest.raises(ValueError, match="n must be"):
        batch.trim(-1)


@pytest.mark.parametrize("name", SOME)
def test_extend_and_filter_equal_solo(name):
    a, first = merged(name, [200, 3])
    b, second = merged(name, [0, 170, 50])
    empty, third = merged(name, [0, 0])
    was = contents(b)
    a.extend(b)
    a.extend(empty)
    empty.extend(a)
    assert contents(b) == was
    check_rows_equal_solo(a, [*first, *second, *third])
    check_rows_equal_solo(empty, [*third, *first, *second, *third])
    solos = [*first, *second, *third]
    new = [tokens(1, seed=i) for i in range(7)]
    a.update_and_fetch(*joined(new))
    for solo, rows in zip(solos, new, strict=True):
        solo.update_and_fetch(*rows)
    check_rows_equal_solo(a, solos)
    size = a.nbytes
    a.filter(mx.array([4, 1, -1]))
    solos = [solos[i] for i in (4, 1, 6)]
    check_rows_equal_solo(a, solos)
    assert a.nbytes < size and a.size() == 51 and min(a.left_padding.tolist()) == 0
    before = contents(a)
    a.filter([0, 1, 2])
    assert contents(a) == before


def test_empty_caches_merge_filter_and_extend():
    batch, _ = merged("default", [0, 0, 0])
    assert batch.empty() and batch.nbytes == 0 and batch.size() == 0 and batch.trim(4) == 0
    assert batch.offset.tolist() == batch.left_padding.tolist() == [0, 0, 0]
    other, _ = merged("default", [0])
    batch.extend(other)
    batch.filter([0, 3])
    assert batch.empty() and batch.offset.tolist() == [0, 0]
    assert isinstance(batch.extract(1), TQKVCache) and batch.extract(1).empty()
    with pytest.raises(ValueError, match="2 batch rows"):
        batch.update_and_fetch(*tokens(5, b=3))
    batch.update_and_fetch(*tokens(5, b=2))
    assert batch.offset.tolist() == [5, 5] and not batch.empty()
    padded = TQBatchKVCache([2, 3])
    padded.filter([1])
    assert padded.offset.tolist() == [-3] and padded.size() == 0
    keys, values = TQBatchKVCache([2, 1], "tq3").update_and_fetch(*tokens(0, b=2))
    assert keys.shape == values.shape == (2, 2, 0, 64)


def test_extracted_caches_are_independent_and_merge_again():
    batch, solos = merged("window", [150, 90])
    alone = [batch.extract(i) for i in range(2)]
    before = contents(batch)
    for cache in alone:
        cache.update_and_fetch(*tokens(40, seed=5))
        cache.trim(60)
        poison_cache(cache)
    mx.eval([cache.keys for cache in alone])
    assert contents(batch) == before
    again = TQKVCache.merge([batch.extract(1), batch.extract(0)])
    check_rows_equal_solo(again, solos[::-1])


@pytest.mark.parametrize("name", ("default", "centered window", "k4v4", "tq3"))
@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16))
def test_dtypes_and_widths(name, dtype):
    batch, solos = merged(name, [300, 5], dtype=dtype, value_dim=96, h=1)
    new = [tokens(130, seed=i, dtype=dtype, value_dim=96, h=1) for i in range(2)]
    keys, values = batch.update_and_fetch(*joined(new))
    assert keys.dtype == values.dtype == dtype and values.shape == (2, 1, 430, 96)
    for solo, rows in zip(solos, new, strict=True):
        solo.update_and_fetch(*rows)
    check_rows_equal_solo(batch, solos)


@pytest.mark.parametrize("name", SOME)
def test_spare_slots_are_never_read(name):
    clean, _ = merged(name, [170, 3, 300])
    spoiled = copy.deepcopy(clean)
    for n in (1, 40, 1, 129):
        poison_cache(spoiled)
        mask, q = clean.make_mask(n), normal(n, 3, 4, n, 64)
        k, v = tokens(n, b=3, seed=n)
        outs = [[attend(q, views, mask), *views] for views in (c.update_and_fetch(k, v) for c in (clean, spoiled))]
        for a, b in zip(*outs, strict=True):
            assert same_bits(mx.array(a), mx.array(b))


# ------------------------------------------------------------------ masks and kernels


@pytest.mark.parametrize(
    "options", [{}, {"window_size": 4}, {"return_array": True}, {"right_padding": [1, 0, 2]}], ids=str
)
@pytest.mark.parametrize("lengths", ([0, 0, 0], [3, 0, 9]), ids=str)
def test_masks_are_those_of_the_stock_batch_cache(options, lengths):
    options = {n: mx.array(x) if isinstance(x, list) else x for n, x in options.items()}
    stocks = [cache_module.KVCache() for _ in lengths]
    for stock, n in zip(stocks, lengths, strict=True):
        if n:
            stock.update_and_fetch(*tokens(n))
    stock, (batch, _) = BatchKVCache.merge(stocks), merged("k4v4", lengths)
    for n in (1, 2, 9):
        assert same_mask(batch.make_mask(n, **options), stock.make_mask(n, **options))


@pytest.mark.parametrize("name", ("default", "window", "tq3", "raw keys"))
def test_masks_of_every_kind(name):
    """Bool and additive masks with a batch axis, per head and plain ones; rows that see nothing stay finite."""
    batch, _ = merged(name, [3, 170])
    k, v = tokens(5, b=2, seed=3)
    views = batch.update_and_fetch(k, v)
    q = normal(1, 2, 4, 5, 64)
    k64, v64 = (decode64(view.rows) for view in views)
    columns, pad = batch.size(), batch.left_padding.tolist()
    rng = np.random.default_rng(0)
    for shape in ((5, columns), (2, 1, 5, columns), (2, 4, 5, columns), (1, 4, 1, columns)):
        seen = rng.random(shape) < 0.5
        seen[..., 0, :] = False
        for mask in (mx.array(seen), mx.array(rng.standard_normal(shape).astype(np.float32))):
            out = attend(q, views, mask)
            full = mx.broadcast_to(mask, (2, 4, 5, columns))
            assert max_error(out, attention64(q, k64, v64, 0.125, full, pad=pad)) < 2e-6
    assert max_error(attend(q, views, "causal"), attention64(q, k64, v64, 0.125, "causal", pad=pad)) < 2e-6


@pytest.mark.parametrize("name", ("default", "centered window", "tq3", "raw keys"))
def test_kernels_take_a_batch(fused_kernels, name):
    """Encoding, attention and decoding by the kernels, against MLX ops on the same tokens."""
    both = []
    for fused in ("require", "never"):
        solos = [TQKVCache(FORMATS[name], 1, fused=fused) for _ in range(3)]
        for i, (solo, n) in enumerate(zip(solos, (70, 0, 380), strict=True)):
            if n:
                solo.update_and_fetch(*tokens(n, seed=i))
        batch = TQKVCache.merge(solos)
        outs = []
        for n in (1, 40):
            mask, q = batch.make_mask(n), normal(n, 3, 4, n, 64)
            views = batch.update_and_fetch(*tokens(n, b=3, seed=n))
            outs += [attend(q, views, mask), *(mx.array(view) for view in views)]
        batch.trim(20)
        batch.filter([2, 0])
        views = batch.update_and_fetch(*tokens(1, b=2, seed=7))
        outs.append(attend(normal(7, 2, 4, 1, 64), views, None))
        both.append((outs, [contents(batch.extract(i)) for i in range(2)]))
    (got, rows), (want, ops_rows) = both
    for a, b in zip(got, want, strict=True):
        assert max_error(a, to64(b)) < 5e-6
    assert rows == ops_rows


# ------------------------------------------------------------------ sizes, copies and files


@pytest.mark.parametrize("name", FORMATS)
def test_nbytes_are_exact(name):
    batch, _ = merged(name, [300, 20])
    for change in (
        lambda: batch.update_and_fetch(*tokens(200, b=2)),
        lambda: batch.trim(90),
        lambda: batch.filter([1]),
    ):
        change()
        held = {id(a): a.nbytes for rows in batch.rows for a in (*(rows.regions or ()), rows.exact) if a is not None}
        assert isinstance(batch.nbytes, int)
        assert batch.nbytes == sum(held.values()) == sum(a.nbytes for a in (*batch.keys, *batch.values))


def test_a_step_reuses_the_buffers():
    """Rows that end at different slots are written in place."""
    batch, _ = merged("k4v4", [3000, 2000, 2500], h=4, dim=128, dtype=mx.float16)
    mx.eval(batch.keys, batch.values)
    for _ in range(3):
        k, v = tokens(1, b=3, h=4, dim=128, dtype=mx.float16)
        mx.eval(k, v)
        mx.clear_cache()
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        batch.update_and_fetch(k, v)
        mx.eval(batch.keys, batch.values)
        assert mx.get_peak_memory() - held < batch.nbytes / 10  # the codes of keys or values are half of it


@pytest.mark.parametrize("name", SOME)
def test_deepcopy_is_independent(name):
    batch, _ = merged(name, [150, 3])
    before = contents(batch)
    twin = copy.deepcopy(batch)
    twin.update_and_fetch(*tokens(60, b=2))
    twin.filter([1])
    poison_cache(twin)
    mx.eval(twin.keys, twin.values)
    assert contents(batch) == before


@pytest.mark.parametrize("name", FORMATS)
def test_round_trips_through_state(name):
    for lengths in ([0, 0], [150, 3], [40, 300]):
        batch, solos = merged(name, lengths, dtype=mx.bfloat16)
        twin = batch
        before = contents(batch)
        for _ in range(5):
            twin = TQBatchKVCache.from_state(twin.state)
            assert contents(twin) == before
        new = [tokens(140, seed=i, dtype=mx.bfloat16) for i in range(2)]
        twin.update_and_fetch(*joined(new))
        for solo, rows in zip(solos, new, strict=True):
            solo.update_and_fetch(*rows)
        check_rows_equal_solo(twin, solos)


def test_save_and_load_in_a_fresh_process(tmp_path):
    caches = [merged(name, [300, 5], dtype=mx.float16)[0] for name in FORMATS]
    caches += [merged("tq3", [0, 0])[0], TQBatchKVCache([0, 4]), filled("window", 150)]
    path = str(tmp_path / "batch.safetensors")
    cache_module.save_prompt_cache(path, caches)
    code = """
import hashlib, sys
import mlx_tq
import mlx.core as mx, numpy as np
from mlx_lm.models.cache import load_prompt_cache
for c in load_prompt_cache(sys.argv[1]):
    digest = hashlib.sha256(c.state[0].encode())
    for a in c.state[1:]:
        digest.update(np.array(a.view(mx.uint8)).tobytes())
    print(type(c).__name__, digest.hexdigest())
"""
    result = subprocess.run([sys.executable, "-c", code, path], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    want = [f"{type(c).__name__} {state_digest(c.state)}" for c in caches]
    assert result.stdout.split("\n")[:-1] == want


def damaged_states():
    """Name and state of batches that are damaged, or not ours."""
    state = merged("centered window", [150, 90])[0].state
    header, arrays = json.loads(state[0]), state[1:]

    def changed(**fields):
        return [json.dumps(header | fields), *arrays]

    packed = header["packed"]
    cases = {f"no {field}": [json.dumps({k: v for k, v in header.items() if k != field}), *arrays] for field in header}
    return cases | {
        "a single cache": filled("centered window", 150).state,
        "stock": list(BatchKVCache([0]).state),
        "next version": changed(version=STATE_VERSION + 1),
        "no left padding": changed(left_padding=[]),
        "one left padding": changed(left_padding=[0]),
        "negative left padding": changed(left_padding=[0, -60]),
        "left padding text": changed(left_padding="06"),
        "float columns": changed(columns=150.0),
        "more columns": changed(columns=header["columns"] + 200),
        "fewer columns": changed(columns=header["columns"] - 100),
        "half a page": changed(packed=[packed[0] - 16, packed[1]]),
        "more packed": changed(packed=[packed[0] + 320, packed[1]]),
        "fewer packed": changed(packed=[packed[0] - 64, packed[1]]),
        "negative packed": changed(packed=[-32, packed[1]]),
        "three packed": changed(packed=[*packed, 0]),
        "bool packed": changed(packed=[True, packed[1]]),
        "rows null": changed(rows=None),
        "batch 3": changed(rows=[[3, *r[1:]] for r in header["rows"]]),
        "other bits": changed(format=header["format"] | {"key_bits": 2}),
        "right padding of one": changed(right_padding=[[3], None, 4]),
        "right padding text": changed(right_padding="no"),
        "right padding short": changed(right_padding=[[3, 0]]),
        "array lost": state[:-1],
        "array added": [*state, arrays[0]],
        "array cut": [state[0], arrays[0][:, :, :-1], *arrays[1:]],
    }


DAMAGED = damaged_states()


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_states_are_refused_and_change_nothing(name):
    batch, _ = merged("tq3", [60, 2])
    before = contents(batch)
    for load in (TQBatchKVCache.from_state, lambda state: setattr(batch, "state", state)):
        with pytest.raises(ValueError, match="state"):
            load(DAMAGED[name])
    assert contents(batch) == before and batch.format == FORMATS["tq3"]
    with pytest.raises(ValueError, match="state"):
        TQKVCache.from_state(batch.state)


# ------------------------------------------------------------------ refusals


def refusals():
    a = lambda: merged("default", [5, 3])[0]  # noqa: E731
    other = lambda name, **shape: merged(name, [5, 3], **shape)[0]  # noqa: E731

    def under_way():
        batch = a()
        batch.prepare(lengths=[2, 1], right_padding=[0, 1])
        batch.update_and_fetch(*tokens(2, b=2))
        return batch

    def solo(name="default", **options):
        return filled(name, 5, **options)

    def elsewhere():
        return fill_layer(TQKVCache(FORMATS["default"], layer_index=3))

    def fill_layer(cache):
        cache.update_and_fetch(*tokens(5))
        return cache

    return {
        "formats": (lambda: TQKVCache.merge([solo(), solo("tq3")]), "format"),
        "layers": (lambda: TQKVCache.merge([solo(), elsewhere()]), "layer_index"),
        "widths": (lambda: TQKVCache.merge([solo(), solo(dim=128)]), "keys"),
        "value widths": (lambda: TQKVCache.merge([solo(), solo(value_dim=128)]), "values"),
        "dtypes": (lambda: TQKVCache.merge([solo(), solo(dtype=mx.float16)]), "keys"),
        "heads": (lambda: TQKVCache.merge([solo(), solo(h=1)]), "keys"),
        "empty of another format": (lambda: TQKVCache.merge([solo(), TQKVCache("tq3", 1)]), "format"),
        "stock": (lambda: TQKVCache.merge([solo(), cache_module.KVCache()]), "KVCache"),
        "two rows": (lambda: TQKVCache.merge([solo(b=2)]), "2 batch rows"),
        "none": (lambda: TQKVCache.merge([]), "got none"),
        "batch": (lambda: TQKVCache.merge([a()]), "TQBatchKVCache"),
        "extend by single": (lambda: a().extend(solo()), "TQKVCache"),
        "extend by format": (lambda: a().extend(other("tq3")), "format"),
        "extend by width": (lambda: a().extend(other("default", dim=128)), "keys"),
        "extend under way": (lambda: a().extend(under_way()), "finalize"),
        "extract under way": (lambda: under_way().extract(0), "finalize"),
        "prepare under way": (lambda: under_way().prepare(right_padding=[1, 0]), "finalize"),
        "extract": (lambda: a().extract(2), "batch_indices"),
        "filter": (lambda: a().filter([0, 2]), "batch_indices"),
        "filter none": (lambda: a().filter([]), "batch_indices"),
        "filter text": (lambda: a().filter(["a"]), "batch_indices"),
        "left padding of tokens": (lambda: a().prepare(left_padding=[1, 1]), "left_padding"),
        "entries": (lambda: a().prepare(right_padding=[1]), "right_padding"),
        "negative": (lambda: a().prepare(right_padding=[1, -1]), "right_padding"),
        "sums": (lambda: a().prepare(right_padding=[1, 0], lengths=[3, 3]), "add up"),
        "constructor": (lambda: TQBatchKVCache([]), "left_padding"),
        "constructor negative": (lambda: TQBatchKVCache([-1]), "left_padding"),
        "constructor format": (lambda: TQBatchKVCache([0], "q4"), "format"),
        "constructor fused": (lambda: TQBatchKVCache([0], fused="yes"), "fused"),
        "update": (lambda: a().update_and_fetch(*tokens(5)), "like the rows held"),
        "rows": (lambda: TQBatchKVCache([0]).rows, "must hold tokens"),
    }


REFUSALS = refusals()


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    call, word = REFUSALS[name]
    with pytest.raises(ValueError, match=word):
        call()


def test_a_refused_call_changes_nothing():
    batch, _ = merged("window", [150, 3])
    before = contents(batch)
    for call in (
        lambda: batch.extend(merged("tq3", [4])[0]),
        lambda: batch.filter([5]),
        lambda: batch.prepare(left_padding=[0, 1], right_padding=[1, 0]),
        lambda: batch.update_and_fetch(*tokens(4, b=3)),
        lambda: batch.trim(-3),
    ):
        with pytest.raises(ValueError):
            call()
        assert contents(batch) == before


def test_names_that_mlx_lm_reads_otherwise_are_absent():
    for cache in (TQBatchKVCache([0, 1]), merged("default", [5, 3])[0]):
        for name in ("bits", "group_size", "to_quantized", "__len__", "__bool__"):
            assert not hasattr(cache, name)
        assert cache and cache.is_trimmable() is True
    assert cache_module.TQBatchKVCache is TQBatchKVCache


def test_offset_and_left_padding_are_new_arrays_each_time():
    batch, _ = merged("default", [5, 3])
    kept, padding = batch.offset, batch.left_padding
    kept += 7
    padding += 7
    assert batch.offset.tolist() == [5, 3] and batch.left_padding.tolist() == [0, 2]
    before = batch.offset
    batch.update_and_fetch(*tokens(1, b=2))
    assert before.tolist() == [5, 3] and batch.offset.tolist() == [6, 4]


def test_keys_and_values_can_be_tied_into_a_graph():
    batch, _ = merged("default", [300, 3])
    before = contents(batch)
    batch.keys = mx.depends(batch.keys, mx.ones(3))
    batch.values = mx.depends(batch.values, mx.ones(3))
    assert contents(batch) == before
    with pytest.raises(ValueError, match="keys must be arrays"):
        batch.keys = batch.keys[:-1]


def test_explain_and_cache_list():
    batch, solos = merged("default", [5, 3])
    assert mlx_tq.explain(batch)
    lists = [cache_module.CacheList(solo, copy.deepcopy(solo)) for solo in solos]
    both = cache_module.CacheList.merge(lists)
    both.prepare(lengths=[2, 1], right_padding=[0, 1])
    for cache in both.caches:
        cache.update_and_fetch(*tokens(2, b=2))
    both.finalize()
    both.filter([1])
    assert both.size() == 4 and both.extract(0)[1].offset == 4 and both.trim(1) == 1
