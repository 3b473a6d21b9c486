"""Views of packed rows, and the hook that lets `mx.fast.scaled_dot_product_attention` attend to them and to the rows.

mlx-lm looks the function up at every call, so replacing the one name reaches every model. Calls with neither go to
MLX's own function.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import mlx.core as mx

from . import kernels
from .attention import attention, is_usual
from .callers import only_attends
from .codec import Memo, PackedRows, decode_keys, decode_values, plain_rows
from .format import RAW_BITS

_original = _hook = None
_users: set[int] = set()  # ids of the memos of caches whose rows need the hook
_leaving = False  # whether the hook goes with the last of them
# Views are decoded, should a model read them, in memory for a multiple of so many tokens: MLX takes up to a millisecond
# to make the graph for another size, and each token would need one.
_STEP = 256


class TQView(mx.array):
    """What a cache hands to attention: an array whose value is the decoded rows, not yet evaluated, and `rows`.

    Attention reads `rows`, and the decode never runs; a model that computes with the keys itself gets decoded rows. A
    view that was changed in place has no `rows` any more.
    """

    rows: PackedRows | None = None


def _forget_rows(change):
    @functools.wraps(change)
    def changed(self, *args):
        self.rows = None
        return change(self, *args)

    return changed


for _name in ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "imatmul"):
    if hasattr(mx.array, f"__{_name}__"):
        setattr(TQView, f"__{_name}__", _forget_rows(getattr(mx.array, f"__{_name}__")))


def views(keys: PackedRows, values: PackedRows) -> tuple[TQView, TQView]:
    """The views of packed keys and values, `(B, n_kv_heads, L, D)` in the rows' dtype."""
    k, v = map(TQView, plain_rows(keys, values) or _decoded(keys, values))
    k.rows, v.rows = keys, values
    return k, v


def takes_rows(caller: FrameType) -> bool:
    """Whether an update may return `PackedRows`, which are no arrays, to the function that runs in `caller`.

    It may where that function only attends, by our hook. Where somebody puts another function in the hook's place
    between an update and its attention, that one gets them, too.
    """
    if not hook_installed():
        install_hook()
    return mx.fast.scaled_dot_product_attention is _hook and only_attends(caller)


def _fused(keys: PackedRows, values: PackedRows) -> bool:
    return keys.fused != "never" and kernels.reason(keys.dim, values.dim) is None


def _decoded(keys: PackedRows, values: PackedRows) -> Sequence[mx.array]:
    # Exact values are read by those who compute with them: one kernel for both would decode the keys as well.
    if values.format.value_bits != RAW_BITS and _fused(keys, values):
        decoded = kernels.decode(keys, values, _STEP)
        if decoded is not None:
            return decoded
    return decode_keys(keys), decode_values(values)


def install_hook() -> None:
    """Replaces `mx.fast.scaled_dot_product_attention`, once."""
    global _original, _hook, _leaving
    _leaving = False
    if _original is not None:
        return
    original = mx.fast.scaled_dot_product_attention

    @functools.wraps(original)
    def scaled_dot_product_attention(q, k, v, *args, **kwargs):
        if type(k) is PackedRows and not args:
            out = kernels.attend_again(q, k, v, **kwargs)
            if out is not None:
                return out
        keys, values = _rows(k), _rows(v)
        if keys is not None and values is not None and not args:
            return _attend(original, q, k, v, keys, values, **kwargs)
        return original(q, _array(k), _array(v), *args, **kwargs)

    _original = original
    mx.fast.scaled_dot_product_attention = _hook = scaled_dot_product_attention


def keep_hook(memo: Memo) -> None:
    """Lets `release_hook` wait until a cache and its rows, which share the memo, are gone: they need the hook."""
    if id(memo) not in _users:
        _users.add(id(memo))
        weakref.finalize(memo, _forget_user, id(memo)).atexit = False


def _forget_user(user: int) -> None:
    _users.discard(user)
    if _leaving and not _users:
        remove_hook()


def release_hook() -> None:
    """Removes the hook, once the caches in use are gone."""
    global _leaving
    _leaving = True
    if not _users:
        remove_hook()


def remove_hook() -> None:
    """Puts MLX's own function back, until an update: it decodes all rows of views, and refuses `PackedRows`."""
    global _original
    if _original is not None:
        mx.fast.scaled_dot_product_attention = _original
        _original = None


def hook_installed() -> bool:
    return _original is not None


def _attend(original, q, k, v, keys, values, *, scale, mask=None, sinks=None, stream=None, **other):
    """Attention to the rows of k and v."""
    if sinks is None and keys.layout is values.layout and is_usual(q, keys, values, mask, None, None):
        plain = plain_rows(keys, values)
        if plain is not None:  # what `attention` would do after checks that take longer
            return original(q, *plain, scale=scale, mask=mask, stream=stream, **other)
    if keys is values:
        keys, values = _key_and_value(keys)
    if other or keys.kind != "keys" or values.kind != "values" or keys.layout != values.layout:
        return original(q, _array(k), _array(v), scale=scale, mask=mask, sinks=sinks, stream=stream, **other)
    if stream is None:
        return attention(q, keys, values, scale=scale, mask=mask, sinks=sinks)
    with mx.stream(stream):
        return attention(q, keys, values, scale=scale, mask=mask, sinks=sinks)


def _rows(x) -> PackedRows | None:
    """The packed rows that x is, or is a view of."""
    return x.rows if type(x) is TQView else x if type(x) is PackedRows else None


def _array(x):
    """What x is for MLX's own function."""
    if type(x) is not PackedRows:
        return x
    return decode_keys(x) if x.kind == "keys" else decode_values(x)


def _key_and_value(keys: PackedRows) -> tuple[PackedRows, PackedRows]:
    """Packed keys that are the values too, as the latent of MLA is: the same codes mean the same rows as either."""
    format = keys.format
    if keys.kind != "keys" or format.qjl or format.centered_keys or format.key_bits == RAW_BITS:
        return keys, keys  # not alike: these are decoded
    keys = replace(keys, format=replace(format, value_bits=format.key_bits))
    return keys, replace(keys, kind="values")
