"""Scaled dot-product attention over packed keys and values."""

from __future__ import annotations

from functools import partial
from math import isfinite

import mlx.core as mx
import numpy as np

from . import kernels
from .codec import FLOAT_DTYPES, PackedRows, dequantise, live_regions, plain_rows
from .format import RAW_BITS
from .rotation import hadamard, rotate_back, to_dtype

# Bounds on what the ops path holds at a time: score elements of a block, and tokens of a block.
_BLOCK_SCORES = 1 << 21
_BLOCK_TOKENS = 2048
_QUERY_ROWS = 512
_LOWEST = float(np.finfo(np.float32).min)
# How `explain` begins while no token is packed.
_PLAIN = "MLX's own attention until tokens are packed, then "


def attention(
    q: mx.array,
    keys: PackedRows,
    values: PackedRows,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    softcap: float | None = None,
) -> mx.array:
    """softmax(scale * q keys^T + mask) values, straight from the packed rows.

    Shapes: q `(B, n_heads, L, D)` float16, bfloat16 or float32; keys D wide and values Dv wide, n_heads a multiple of
    n_kv_heads; the result is `(B, n_heads, L, Dv)` in q's dtype. S is the length of keys and values.

    While no token is packed, and but for masks that are arrays, padding and soft-caps, MLX's own attention does it.

    Args:
        scale: factor of the scores.
        mask: None, "causal" (the last query sees all S columns), or an array that broadcasts to `(B, n_heads, L, S)`:
            bool (True is seen) or additive. Columns of left padding are never seen. A query that sees nothing gets 0.
        sinks: logits `(n_heads,)` that take part in the softmax and have no value.
        softcap: scores become softcap * tanh(score / softcap) before the mask.

    Raises:
        ValueError: shapes, dtypes or options that do not go together.
    """
    if isinstance(keys, PackedRows):
        out = kernels.attend_again(q, keys, values, scale=scale, mask=mask, sinks=sinks, softcap=softcap)
        if out is not None:
            return out
    _check(q, keys, values, scale, mask, sinks, softcap)
    why = _ops_reason(keys, values)
    if keys.fused == "require" and why is not None:
        raise ValueError(f'fused="require", but {why}')
    plain = plain_rows(keys, values)
    if plain is not None and is_usual(q, keys, values, mask, sinks, softcap):
        return mx.fast.scaled_dot_product_attention(q, *plain, scale=scale, mask=mask, sinks=sinks)
    if why is None and q.size:
        return kernels.attend(q, keys, values, scale, mask, sinks, softcap)
    return ops_attention(q, keys, values, scale, mask, sinks, softcap)


def is_usual(q, keys: PackedRows, values: PackedRows, mask, sinks, softcap) -> bool:
    """Whether MLX's own attention means the same by these arguments, and takes them as a model gives them."""
    return (
        q.size > 0
        and keys.layout.length > 0
        and q.dtype == keys.dtype == values.dtype
        and (mask is None or (isinstance(mask, str) and q.shape[2] <= keys.layout.length))
        and (sinks is None or sinks.dtype == q.dtype)
        and softcap is None
    )


def _ops_reason(keys: PackedRows, values: PackedRows) -> str | None:
    if keys.fused == "never":
        return 'fused="never"'
    if keys.format != values.format:
        return "keys and values are in different formats"
    return kernels.reason(keys.dim, values.dim)


def holds_latent(cache) -> bool:
    """Whether a TQKVCache or TQBatchKVCache holds the latent of multi-head latent attention (MLA) as keys.

    Told by its rows: one KV head, and exact values, the rope key, that are narrower than the keys.
    """
    format = cache.format
    if format.value_bits != RAW_BITS or format.qjl or format.centered_keys or cache.empty():
        return False
    keys, values = cache.rows
    return keys.n_kv_heads == 1 and values.dim < keys.dim


def _explain_cache(cache) -> str:
    if hasattr(cache, "caches"):  # a CacheList
        return " + ".join(map(_explain_cache, cache.caches))
    if not hasattr(type(cache), "rows"):
        return f"{type(cache).__name__}, not compressed"
    if cache.empty():
        return "no tokens yet"
    keys, values = cache.rows
    if holds_latent(cache):
        return f"{explain(keys, keys)}, prompts over decoded rows"
    path = explain(keys, values)
    # Batches have masks that are arrays, which MLX's own attention takes otherwise.
    return path if cache.make_mask(1) is None else path.removeprefix(_PLAIN)


def by_layers(texts: list[str]) -> str:
    """What each layer's text is: one line for neighbours that have the same."""
    lines, start = [], 0
    for i, text in enumerate(texts):
        if i + 1 < len(texts) and texts[i + 1] == text:
            continue
        lines.append(f"layer {i}: {text}" if start == i else f"layers {start}-{i}: {text}")
        start = i + 1
    return "\n".join(lines)


def explain(keys, values: PackedRows | None = None) -> str:
    """Which path attention takes here: "kernels (metal)", "kernels (cuda)" or "MLX ops: " and the reason.

    Takes packed keys and values, a TQKVCache or TQBatchKVCache, or a list of caches, whose answers come `by_layers`. A
    cache without tokens has no head_dim yet, so its answer is "no tokens yet". A latent is the key and the value of a
    token's attention, and models expand the decoded latent for a prompt, which the answer says.

    Raises:
        ValueError: something else.
    """
    if isinstance(keys, list | tuple) and not any(isinstance(entry, PackedRows) for entry in keys):
        return by_layers([_explain_cache(cache) for cache in keys])
    if values is None and (hasattr(type(keys), "rows") or hasattr(keys, "caches")):
        return _explain_cache(keys)
    if not isinstance(keys, PackedRows) or not isinstance(values, PackedRows):
        got = f"{type(keys).__name__} and {type(values).__name__}"
        raise ValueError(f"keys and values must be PackedRows, or keys a cache or a list of caches, got {got}")
    why = _ops_reason(keys, values)
    path = f"kernels ({kernels.backend()})" if why is None else f"MLX ops: {why}"
    return _PLAIN + path if plain_rows(keys, values) is not None and keys.dtype == values.dtype else path


def _check(q, keys, values, scale, mask, sinks, softcap) -> None:
    if not isinstance(q, mx.array) or q.ndim != 4 or q.dtype not in FLOAT_DTYPES:
        got = f"{q.dtype} {q.shape}" if isinstance(q, mx.array) else type(q).__name__
        raise ValueError(f"q must be a float array (B, n_heads, L, head_dim), got {got}")
    for name, rows in (("keys", keys), ("values", values)):
        if not isinstance(rows, PackedRows) or rows.kind != name:
            raise ValueError(f"{name} must be PackedRows made by encode_{name} or a TQKVCache, got {rows!r:.80}")
    b, n_heads, length, dim = q.shape
    layout, n_kv = keys.layout, keys.n_kv_heads
    if layout != values.layout or n_kv != values.n_kv_heads:
        raise ValueError(f"keys and values must hold the same tokens, got {keys.shape} and {values.shape}")
    if len(layout.pad) != b or dim != keys.dim:
        raise ValueError(f"q must match keys {keys.shape} in batch and head_dim, got {q.shape}")
    if n_heads % n_kv:
        raise ValueError(f"n_heads must be a multiple of n_kv_heads {n_kv}, got {n_heads}")
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f'mask must be None, "causal" or an array, got {mask!r}')
    elif mask is not None:
        full = (b, n_heads, length, keys.shape[2])
        if not isinstance(mask, mx.array) or (mask.dtype != mx.bool_ and mask.dtype not in FLOAT_DTYPES):
            raise ValueError(f"mask must be a bool or float array, got {getattr(mask, 'dtype', mask)}")
        if mask.ndim > 4 or any(m not in (1, n) for m, n in zip(mask.shape[::-1], full[::-1], strict=False)):
            raise ValueError(f"mask must broadcast to {full}, got {mask.shape}")
    if sinks is not None and (not isinstance(sinks, mx.array) or sinks.shape != (n_heads,)):
        raise ValueError(f"sinks must be an array ({n_heads},), got {getattr(sinks, 'shape', sinks)}")
    if not _is_finite(scale):
        raise ValueError(f"scale must be a finite number, got {scale!r}")
    if softcap is not None and not (_is_finite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a positive, finite number or None, got {softcap!r}")


def _is_finite(x) -> bool:
    try:
        return isfinite(x)
    except (TypeError, ValueError):
        return False


# ------------------------------------------------------------------ the ops path


def _segments(keys: PackedRows, values: PackedRows, block: int):
    """Yields (columns `(B, n)`, live `(B, n)`, packed, load) of every block of tokens.

    `columns` says where each token stands in the attention matrix, `live` whether it exists, `packed` whether the
    tokens are packed, and load(rows) gives their regions then, else their exact rows `(B, n_kv_heads, n, D)`.
    """
    layout = keys.layout
    pad, first, packed, recent = (
        np.array(f)[:, None] for f in (layout.pad, layout.first, layout.packed, layout.recent)
    )
    paged = keys.format.page
    block = -(-block // paged) * paged
    for start in range(0, int(packed.max()), block):
        stop = min(start + block, int(packed.max()))
        token = np.arange(start, stop)[None]

        yield pad + first + token, token < packed, True, partial(live_regions, start=start, stop=stop)
    for start in range(0, int((first + recent).max()), block):
        stop = min(start + block, int((first + recent).max()))
        token = np.arange(start, stop)[None]

        def load(rows, start=start, stop=stop):
            return rows.exact[:, :, start:stop]

        yield pad + np.where(token < first, token, packed + token), token < first + recent, False, load


def _take_columns(mask: mx.array, columns: np.ndarray) -> mx.array:
    """Columns `(B, n)` of a mask `(B or 1, H, L, S or 1)`; columns past the end, of spare rows, take the last."""
    if mask.shape[-1] == 1:
        return mask
    columns = np.minimum(columns, mask.shape[-1] - 1)
    if (columns == columns[:1]).all():
        start, n = int(columns[0, 0]), columns.shape[1]
        if (columns[0] == np.arange(start, start + n)).all():
            return mask[..., start : start + n]
        return mx.take(mask, mx.array(columns[0].astype(np.int32)), axis=-1)
    b, h, length = columns.shape[0], *mask.shape[1:3]
    mask = mx.broadcast_to(mask, (b, *mask.shape[1:]))
    index = mx.broadcast_to(mx.array(columns.astype(np.int32))[:, None, None], (b, h, length, columns.shape[1]))
    return mx.take_along_axis(mask, index, axis=-1)


def ops_attention(q, keys, values, scale, mask, sinks, softcap) -> mx.array:
    """Online softmax over blocks of tokens, each decoded for itself: nothing of size n_heads * S is ever held."""
    return kernels.by_query_rows(
        lambda part, rows, behind: _online(part, keys, values, scale, rows, sinks, softcap, behind + part.shape[2]),
        *(q, mask, _QUERY_ROWS),
    )


def _online(q, keys, values, scale, mask, sinks, softcap, remaining) -> mx.array:
    """Attention of some query rows; the first of them is `remaining` tokens from the end of the columns."""
    b, n_heads, length, dim = q.shape
    n_kv, dtype = keys.n_kv_heads, q.dtype
    groups = n_heads // n_kv
    q = q.astype(mx.float32) * scale
    q_rot = (hadamard(q * keys.signs[0]) * dim**-0.5).reshape(b, n_kv, groups * length, dim)
    q = q.reshape(b, n_kv, groups * length, dim)
    total = keys.layout.length
    position = mx.arange(total - remaining, total - remaining + length)[:, None]
    is_array = mask is not None and not isinstance(mask, str)

    if sinks is None:
        top = mx.full((b, n_kv, groups * length, 1), _LOWEST)
        denominator = mx.zeros(top.shape)
    else:
        sinks = mx.maximum(sinks.astype(mx.float32), _LOWEST)
        top = mx.broadcast_to(sinks[:, None], (b, n_heads, length)).reshape(b, n_kv, -1, 1)
        denominator = mx.ones(top.shape)
    out = {}  # what plain and coded values add to the result; the latter stays rotated to the end

    rows = max(1, b * n_heads * length)
    block = max(keys.format.page, min(_BLOCK_TOKENS, _BLOCK_SCORES // rows))
    for columns, live, packed, load in _segments(keys, values, block):
        count = columns.shape[1]
        # One block at a time: the next waits for all sums, else all weights would be held to the end.
        after = [*out.values(), denominator]
        dense, mean, coded = _dense(keys, load(keys), packed)
        scores = (q_rot if coded else q) @ mx.depends(dense, after).swapaxes(-1, -2)
        if mean is not None:
            scores = scores + mx.repeat(q @ mean.swapaxes(-1, -2), keys.format.page, axis=-1)[..., :count]
        scores = scores.reshape(b, n_heads, length, count)
        if softcap is not None:
            scores = softcap * mx.tanh(scores / softcap)
        if is_array:
            part = _take_columns(mask, columns)
            scores = mx.where(part, scores, -mx.inf) if part.dtype == mx.bool_ else scores + part.astype(mx.float32)
        if not live.all():
            scores = mx.where(mx.array(live)[:, None, None], scores, -mx.inf)
        if mask is not None and not is_array and columns.max() > total - remaining:
            seen = mx.array(columns.astype(np.int32))[:, None, None] <= position
            scores = mx.where(seen, scores, -mx.inf)
        scores = scores.reshape(b, n_kv, groups * length, count)
        # A finite floor keeps exp(-inf - -inf) out; rows that see nothing keep weight 0.
        new_top = mx.maximum(top, mx.max(scores, axis=-1, keepdims=True))
        weights = mx.exp(scores - new_top)
        shrink = mx.exp(top - new_top)
        denominator = denominator * shrink + mx.sum(weights, axis=-1, keepdims=True)
        dense, _, coded = _dense(values, load(values), packed)
        if not live.all():
            dense = mx.where(mx.array(live)[:, None, :, None], dense, 0)  # spare rows may hold anything
        out = {kind: sums * shrink for kind, sums in out.items()}
        out[coded] = out.get(coded, 0) + weights @ dense
        top = new_top
    if True in out:
        out[True] = rotate_back(out[True], values.signs[0])
    total = sum(out.values(), mx.zeros((b, n_kv, groups * length, values.dim)))
    total = total / mx.where(denominator > 0, denominator, 1)
    return to_dtype(total.reshape(b, n_heads, length, values.dim), dtype)


def _dense(rows: PackedRows, loaded, packed: bool) -> tuple[mx.array, mx.array | None, bool]:
    """float32 rows of a segment `(B, n_kv_heads, n, D)`, the means to be added, and whether the rows are rotated."""
    if not packed:
        return loaded.astype(mx.float32), None, False
    if rows.format.bits(rows.kind) == RAW_BITS:
        return loaded.codes.astype(mx.float32), None, False
    mean = None if loaded.mean is None else loaded.mean.astype(mx.float32)
    return dequantise(loaded, rows.format, rows.kind, rows.dim, rows.signs[1]), mean, True
