"""Which callers of a cache get rows as they are, so that no decode stands ready for them."""

import copy
import importlib.util
import sys
import threading
from itertools import count
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest
from oracle import attention64, decode64, max_error, normal, to64

pytest.importorskip("mlx_lm")
from archs import configs
from archs.probe import forward, tokens
from mlx_lm.models import base, llama

import mlx_tq
from mlx_tq import TQKVCache, callers, store, view
from mlx_tq.batch import TQBatchKVCache
from mlx_tq.codec import PackedRows
from mlx_tq.view import TQView

STOCK = view._original or mx.fast.scaled_dot_product_attention
_serial = count()


@pytest.fixture(autouse=True)
def nothing_known():
    """What is known of a function counts for those that are the same in other files."""
    callers._known.clear()
    callers._known_attention.clear()


def written(tmp_path, text):
    """The module of a text, which has a function `attend(q, keys, values, cache)`."""
    name = f"caller_{next(_serial)}"
    path = tmp_path / f"{name}.py"
    path.write_text(f"from mlx_lm.models.base import scaled_dot_product_attention\nimport mlx.core as mx\n{text}")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bare(module, monkeypatch):
    """Whether `attend` got rows as they are; what it returns must be attention to all rows."""
    seen, takes_rows = [], store.takes_rows

    def recorded(frame):
        seen.append(takes_rows(frame))
        return seen[-1]

    monkeypatch.setattr(store, "takes_rows", recorded)
    q, k, v = normal(0, 1, 4, 3, 64), normal(1, 1, 2, 90, 64), normal(2, 1, 2, 90, 64)
    for format in ("k4v4", "default"):  # all of it packed, and nothing
        cache = TQKVCache(format)
        got = module.attend(q, k, v, cache)
        keys, values = map(decode64, cache.rows)
        assert max_error(got, attention64(q, keys, values, 0.125, "causal")) < 3e-6
    assert seen[0] == seen[1]
    return seen[0]


HEAD = "def attend(q, keys, values, cache):"
ATTEND = "scaled_dot_product_attention(q, keys, values, cache=cache, scale=0.125, mask='causal')"
UPDATE = "keys, values = cache.update_and_fetch(keys, values)"
ONLY = {
    "straight": f"""
{HEAD}
    {UPDATE}
    return {ATTEND}
""",
    "branches": f"""
{HEAD}
    shape = keys.shape
    if cache is not None:
        if q.size:
            {UPDATE}
    else:
        keys = keys.swapaxes(-1, -2)
    out = {ATTEND}
    return out
""",
    "by name": """
def attend(q, k, v, cache):
    k, v = cache.update_and_fetch(k, v)
    return scaled_dot_product_attention(q, values=v, keys=k, cache=cache, scale=0.125, mask="causal")
""",
    "on several lines": """
def attend(q, keys, values, cache):
    keys, values = cache.update_and_fetch(
        keys,
        values,
    )
    return scaled_dot_product_attention(
        q, keys, values, cache, 0.125, "causal"
    )
""",
    "decorated": f"""
def same(f):
    return f

@same
{HEAD}
    {UPDATE}
    return {ATTEND}
""",
}
MORE = {
    "reads the shape": f"""
{HEAD}
    {UPDATE}
    assert keys.shape[2] == 90
    return {ATTEND}
""",
    "computes": f"""
{HEAD}
    {UPDATE}
    return {ATTEND} + 0 * values.sum()
""",
    "another name": f"""
{HEAD}
    {UPDATE}
    k = keys
    return scaled_dot_product_attention(q, k, values, cache=cache, scale=0.125, mask='causal')
""",
    "whole": f"""
{HEAD}
    both = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(q, *both, cache=cache, scale=0.125, mask='causal')
""",
    "adds in place": f"""
{HEAD}
    {UPDATE}
    keys += 0
    return {ATTEND}
""",
    "loop": f"""
{HEAD}
    for _ in range(1):
        n = keys.shape
        {UPDATE}
    return {ATTEND}
""",
    "try": f"""
{HEAD}
    try:
        {UPDATE}
    finally:
        keys.shape
    return {ATTEND}
""",
    "inner function": f"""
{HEAD}
    def shape():
        return keys.shape
    {UPDATE}
    assert shape()[2] == 90
    return {ATTEND}
""",
    "own attention": f"""
{HEAD}
    def scaled_dot_product_attention(q, k, v, cache, scale, mask):
        return mx.fast.scaled_dot_product_attention(q, k[:, :, :], v[:, :, :], scale=scale, mask=mask)
    {UPDATE}
    return {ATTEND}
""",
    "another module's": f"""
def scaled_dot_product_attention(q, k, v, cache, scale, mask):
    return mx.fast.scaled_dot_product_attention(q, k[:, :, :], v[:, :, :], scale=scale, mask=mask)

{HEAD}
    {UPDATE}
    return {ATTEND}
""",
    "locals": f"""
{HEAD}
    {UPDATE}
    assert locals()["keys"].shape[2] == 90
    return {ATTEND}
""",
    "eval": f"""
{HEAD}
    {UPDATE}
    return {ATTEND} + eval("0 * values.sum() if values.size else 1")
""",
    "generator": f"""
def steps(q, keys, values, cache):
    {UPDATE}
    yield
    yield {ATTEND}

{HEAD}
    both = steps(q, keys, values, cache)
    next(both)
    assert both.gi_frame.f_locals["keys"].shape[2] == 90
    return next(both)
""",
    "another call": f"""
def either(q, keys, values, cache, fetch):
    if fetch is not None:
        k, v = fetch(keys, values)
        return mx.fast.scaled_dot_product_attention(q, k[:, :, :], v[:, :, :], scale=0.125, mask='causal')
    {UPDATE}
    return {ATTEND}

{HEAD}
    return either(q, keys, values, None, cache.update_and_fetch)
""",
    "a global": f"""
def sliced(q, k, v, **options):
    del options["cache"]
    return mx.fast.scaled_dot_product_attention(q, k[:, :, :], v[:, :, :], **options)

{HEAD}
    global scaled_dot_product_attention
    {UPDATE}
    scaled_dot_product_attention = sliced
    return {ATTEND}
""",
    "handed on": f"""
def update(keys, values, cache):
    return cache.update_and_fetch(keys, values)

{HEAD}
    keys, values = update(keys, values, cache)
    return {ATTEND}
""",
}


@pytest.mark.parametrize("name", ONLY)
def test_a_caller_that_only_attends_gets_rows_as_they_are(name, tmp_path, monkeypatch):
    assert bare(written(tmp_path, ONLY[name]), monkeypatch)


@pytest.mark.parametrize("name", MORE)
def test_any_other_gets_views(name, tmp_path, monkeypatch):
    assert not bare(written(tmp_path, MORE[name]), monkeypatch)


def test_a_file_that_changed_or_went_away_proves_nothing(tmp_path, monkeypatch):
    for change in (lambda p: p.write_text(p.read_text().replace("0.125", "0.5")), lambda p: p.unlink()):
        callers._known.clear()
        module = written(tmp_path, ONLY["straight"])
        change(tmp_path / f"{module.__name__}.py")
        assert not bare(module, monkeypatch)


def test_attention_that_was_replaced_gets_views(monkeypatch, tmp_path):
    module = written(tmp_path, ONLY["straight"])
    assert bare(module, monkeypatch)
    monkeypatch.undo()

    def mine(q, k, v, cache, scale, mask):
        return base.scaled_dot_product_attention(q, k[:, :, :], v + 0, cache, scale, mask)

    class Proxy:
        """As wrapt makes them."""

        def __getattr__(self, name):
            return getattr(base.scaled_dot_product_attention, name)

        def __call__(self, q, k, v, cache, scale, mask):
            return mine(q, k, v, cache, scale, mask)

    for other in (mine, Proxy()):
        module.scaled_dot_product_attention = other
        assert not bare(module, monkeypatch)
        monkeypatch.undo()


@pytest.mark.parametrize("keys", ("keys", "keys[:, :, :]"))
def test_attention_of_another_mlx_lm(keys, monkeypatch, tmp_path):
    """Its source must show that it hands keys and values on."""
    other = written(
        tmp_path,
        f"""
def scaled_dot_product_attention(queries, keys, values, cache, scale, mask):
    return mx.fast.scaled_dot_product_attention(queries, {keys}, values, scale=scale, mask=mask)
""",
    )
    monkeypatch.setitem(sys.modules, "mlx_lm.models.base", other)
    assert bare(written(tmp_path, ONLY["straight"]), monkeypatch) is (keys == "keys")


def test_a_source_that_cannot_be_found_proves_nothing(monkeypatch, tmp_path):
    """Modules of optional packages may raise errors of any kind when Python looks for the file of another."""

    class Lazy(ModuleType):
        def __getattr__(self, name):
            raise ImportError("optional")

    module = written(tmp_path, ONLY["straight"])
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    assert not bare(module, monkeypatch)


ONE = {
    "keys": (f"full, _ = {UPDATE[15:]}", "q, full, values, cache=cache"),
    "values": (f"_, full = {UPDATE[15:]}", "q, keys, full, cache=cache"),
    "a star": (f"full, other = {UPDATE[15:]}", "*(q, keys), other, cache"),
}


@pytest.mark.parametrize("name", ONE)
def test_packed_rows_beside_an_array(name, tmp_path):
    """The source allows it, so the hook decodes the rows."""
    update, inputs = ONE[name]
    text = f"{HEAD}\n    {update}\n    return scaled_dot_product_attention({inputs}, scale=0.125, mask='causal')\n"
    q, k, v = normal(0, 1, 4, 3, 64), normal(1, 1, 2, 90, 64), normal(2, 1, 2, 90, 64)
    cache = TQKVCache("k4v4")
    got = written(tmp_path, text).attend(q, k, v, cache)
    assert [known for _, known in callers._known.values()] == [True]
    decoded = [decode64(rows) for rows in cache.rows]
    k, v = (decoded[0], to64(v)) if name == "keys" else (to64(k), decoded[1])
    assert max_error(got, attention64(q, k, v, 0.125, "causal")) < 3e-6


def test_a_hook_of_others_gets_views(monkeypatch, tmp_path):
    """Some wrap MLX's function, after us, to look at what it gets."""
    view.install_hook()
    ours, shapes = mx.fast.scaled_dot_product_attention, []

    def theirs(q, k, v, **options):
        shapes.append(k.shape)
        return ours(q, k, v, **options)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", theirs)
    assert not bare(written(tmp_path, ONLY["straight"]), monkeypatch)
    assert shapes == [(1, 2, 90, 64)] * 2


def test_what_attention_does_not_take_is_decoded():
    """Pairs that ours does not know reach MLX's function as arrays."""
    cache, other, q = TQKVCache("k4v4"), TQKVCache("tq3"), normal(0, 1, 4, 3, 64)
    cache.update_and_fetch(normal(1, 1, 2, 90, 64), normal(2, 1, 2, 90, 64))
    other.update_and_fetch(normal(1, 1, 2, 60, 64), normal(2, 1, 2, 60, 64))
    (keys, values), (_, unlike), (full, _) = cache.rows, other.rows, other.keys_and_values()
    for k, v in ((keys, values), (values, keys), (keys, keys), (full, unlike), (unlike, full)):
        got = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125)
        want = attention64(q, *(decode64(getattr(x, "rows", x)) for x in (k, v)), 0.125)
        assert max_error(got, want) < 3e-6


@pytest.mark.parametrize("make", (TQKVCache, lambda format: TQBatchKVCache([0], format)))
@pytest.mark.parametrize("format", ("default", "k4v4"))
def test_what_callers_get(make, format, tmp_path, monkeypatch):
    """Packed rows, also while nothing is packed, and views where more is done."""
    view.install_hook()
    hook, got = mx.fast.scaled_dot_product_attention, []

    def recorded(q, k, v, **options):
        got.append((type(k), type(v)))
        return hook(q, k, v, **options)

    monkeypatch.setattr(view, "_hook", recorded)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", recorded)
    for text, want in ((ONLY["straight"], PackedRows), (MORE["reads the shape"], TQView)):
        q, k, v = normal(0, 1, 4, 3, 64), normal(1, 1, 2, 90, 64), normal(2, 1, 2, 90, 64)
        written(tmp_path, text).attend(q, k, v, make(format))
        assert got[0] == (want, want)
        got.clear()


def test_options_mean_the_same_before_tokens_are_packed(tmp_path):
    """MLX's own function refuses some dtypes, changes others, and has numbers for queries that see nothing."""
    text = """
def attend(q, keys, values, cache, mask, sinks):
    keys, values = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(q, keys, values, cache=cache, scale=0.125, mask=mask, sinks=sinks)
"""
    module = written(tmp_path, text)
    for dtype, row_dtype in ((mx.float16, mx.float16), (mx.bfloat16, mx.float32)):
        cache = TQKVCache(mlx_tq.TQFormat(window=64, page=32))
        for start, n in ((0, 60), (60, 50), (110, 1)):
            k, v = (normal(i + start, 1, 2, n, 64, dtype=row_dtype) for i in (1, 2))
            q, sinks = normal(start, 1, 4, n, 64, dtype=dtype), normal(3, 4)
            mask = mx.where(mx.arange(start + n)[None] <= mx.arange(start, start + n)[:, None], 0.0, -mx.inf)
            mask[0] = -mx.inf
            out = module.attend(q, k, v, cache, mask, sinks)
            assert out.dtype == dtype and (to64(out)[:, :, 0] == 0).all()
    assert [known for _, known in callers._known.values()] == [True]


def test_each_function_is_read_once(tmp_path, monkeypatch):
    ours, theirs = (written(tmp_path, ONLY["straight"]) for _ in range(2))
    theirs.scaled_dot_product_attention = lambda *args, **options: base.scaled_dot_product_attention(*args, **options)
    parsed, read = [], callers._parsed
    monkeypatch.setattr(callers, "_parsed", lambda code: parsed.append(code) or read(code))
    q, k, v = normal(0, 1, 4, 3, 64), normal(1, 1, 2, 90, 64), normal(2, 1, 2, 90, 64)
    for _ in range(3):
        for module in (ours, theirs):
            module.attend(q, k, v, TQKVCache("k4v4"))
    assert len(parsed) == 3 and len(set(parsed)) == 2  # two files with the same function, and mlx-lm's


def test_llama_decodes_nothing(monkeypatch):
    model, pieces = configs.build("llama"), (tokens(50), tokens(1, 1), tokens(9, 2))
    caches, twins = (mlx_tq.make_prompt_cache(model, "k4v4") for _ in range(2))
    monkeypatch.setattr(view, "_decoded", lambda *rows: pytest.fail("decoded"))
    got = [to64(forward(model, caches, ids)) for ids in pieces]
    assert {code for code, known in callers._known.values() if known} == {llama.Attention.__call__.__code__}
    monkeypatch.undo()
    monkeypatch.setattr(view, "only_attends", lambda frame: False)
    for ids, logits in zip(pieces, got, strict=True):
        np.testing.assert_array_equal(logits, to64(forward(model, twins, ids)))


def test_the_hook_waits_for_caches_in_use():
    """Another thread may disable a model between an update and its attention."""
    view.remove_hook()
    model = configs.build("llama")
    caches = mlx_tq.make_prompt_cache(model, "k4v4")
    forward(model, caches, tokens(40))
    twin = copy.deepcopy(caches)
    forward(model, twin, tokens(3))

    def other():
        with mlx_tq.enable(configs.build("llama")):
            pass

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert view.hook_installed()
    del caches
    assert view.hook_installed()
    del twin
    assert not view.hook_installed() and mx.fast.scaled_dot_product_attention is STOCK


def test_the_hook_waits_for_views_of_a_cache_that_is_gone():
    view.remove_hook()
    cache = TQKVCache("k4v4")
    cache.update_and_fetch(normal(1, 1, 2, 90, 64), normal(2, 1, 2, 90, 64))
    keys, values = cache.keys_and_values()
    del cache
    view.release_hook()
    assert view.hook_installed()
    del keys, values
    assert not view.hook_installed()


def test_without_mlx_lm_nothing_is_proven(monkeypatch):
    monkeypatch.delitem(sys.modules, "mlx_lm.models.base")
    assert not callers._is_mlx_lm(base.scaled_dot_product_attention)
