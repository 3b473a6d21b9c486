"""float64 decoding and attention in numpy, written from the definitions, and helpers to make and damage inputs."""

from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np

from mlx_tq.codebook import lloyd_max
from mlx_tq.codec import PackedRows, page_means, quantise
from mlx_tq.rotation import layer_signs, paley, split_dim

# Error of float32 attention. GPUs approximate powers of two; kernels add up codes before they subtract the offset.
TIGHT = 3e-6


def tight(dim):
    """TIGHT for heads of any width: sums of more products round in proportion more."""
    return TIGHT * max(1, dim / 128)


# ------------------------------------------------------------------ inputs


def normal(seed, *shape, dtype=mx.float32, factor=1.0):
    """Standard normal numbers times `factor`."""
    return mx.array((np.random.default_rng(seed).standard_normal(shape) * factor).astype(np.float32)).astype(dtype)


def to64(x):
    """An MLX array of any float dtype as float64."""
    return np.array(x.astype(mx.float32)).astype(np.float64)


def bits_of(x):
    """The bits of an array as unsigned integers, so that NaN compares equal to itself."""
    unsigned = {2: mx.uint16, 4: mx.uint32}[x.dtype.size]
    return np.array(x.view(unsigned))


def same_bits(a, b):
    """Whether two arrays agree in dtype, shape and every bit."""
    return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(bits_of(a), bits_of(b))


# ------------------------------------------------------------------ decoding


@cache
def hadamard_matrix(dim):
    """The Hadamard matrix of the rotation, float64: P_m (x) H_2^k in natural order."""
    m, p = split_dim(dim)
    h = paley(m).astype(np.float64)
    while p > 1:
        h, p = np.kron(h, [[1, 1], [1, -1]]), p // 2
    return h


def fields(words, width, dim):
    """Fields of `width` bits of uint32 words `(..., n)`, least significant bit first, as int64 `(..., dim)`."""
    words = np.array(words)
    first = np.arange(dim) * width
    return ((words[..., first // 32] >> (first % 32).astype(np.uint32)) & ((1 << width) - 1)).astype(np.int64)


def live_parts(rows):
    """The regions of packed rows without spare capacity, by name; the same number of tokens in each batch row."""
    (count,) = set(rows.layout.packed)
    span = {"mean": rows.format.page}
    regions = rows.regions._asdict()
    return {n: a[:, :, : -(-count // span.get(n, 1))] for n, a in regions.items() if a is not None}


def decode_packed(rows):
    """The row of every packed slot, spare capacity included, float64 `(B, H, capacity, D)`."""
    f, r, dim = rows.format, rows.regions, rows.dim
    bits = f.key_bits if rows.kind == "keys" else f.value_bits
    if bits == 16:
        return to64(r.codes)
    code = fields(r.codes, 4 if bits == 4 else 2, dim)
    if bits == 3:
        code = code + 4 * fields(r.plane, 1, dim)
    x = lloyd_max(bits, dim)[0][code] if f.codebook == "lloyd" else code - (2**bits - 1) / 2
    if rows.kind == "keys" and f.qjl:
        sketch = (2.0 * fields(r.jl, 1, dim) - 1) @ hadamard_matrix(dim) * to64(rows.signs[1])
        x = x + to64(r.residual)[..., None] * f.kappa_value(dim) / np.sqrt(dim) * sketch
    with np.errstate(invalid="ignore"):  # spare slots may hold anything
        x = rotated_back(x * to64(r.scale)[..., None], rows.signs[0])
    if rows.kind == "keys" and f.centered_keys:
        x = x + np.repeat(to64(r.mean), f.page, axis=2)[:, :, : x.shape[2]]
    return x


def rotated_back(y, signs):
    """The inverse of the rotation, float64 `(..., D)`."""
    dim = y.shape[-1]
    return y @ hadamard_matrix(dim).T / np.sqrt(dim) * to64(signs)


def decode64(rows):
    """The rows that `rows` stands for, float64 `(B, H, L, D)`, padding 0."""
    packed = None if rows.regions is None else decode_packed(rows)
    exact = None if rows.exact is None else to64(rows.exact)
    out = np.zeros(rows.shape)
    layout = rows.layout
    for b in range(rows.shape[0]):
        column = layout.pad[b]
        first, count, recent = layout.first[b], layout.packed[b], layout.recent[b]
        for source, start, n in ((exact, 0, first), (packed, 0, count), (exact, first, recent)):
            if n:
                out[b, :, column : column + n] = source[b, :, start : start + n]
                column += n
        assert column == rows.shape[2]
    return out


# ------------------------------------------------------------------ attention


def attention64(q, k, v, scale, mask=None, sinks=None, softcap=None, pad=None):
    """softmax(scale * q k^T + mask) v in float64 `(B, n_heads, L, Dv)`; a query that sees nothing gets 0."""
    q, k, v = (x if isinstance(x, np.ndarray) else to64(x) for x in (q, k, v))
    b, n_heads, length, _ = q.shape
    total = k.shape[2]
    repeat = n_heads // k.shape[1]
    k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
    scores = scale * (q @ k.swapaxes(-1, -2))
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    seen = np.ones(scores.shape, bool)
    if isinstance(mask, str):
        assert mask == "causal"
        seen &= np.arange(total) <= np.arange(total - length, total)[:, None]
    elif mask is not None and mask.dtype == mx.bool_:
        seen &= np.array(mask)
    elif mask is not None:
        scores = scores + to64(mask)
    for i, n in enumerate(pad or ()):
        seen[i, :, :, :n] = False
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        column = np.broadcast_to(to64(sinks)[:, None, None], (b, n_heads, length, 1))
        scores = np.concatenate([scores, column], axis=-1)
        v = np.concatenate([v, np.zeros((*v.shape[:2], 1, v.shape[3]))], axis=2)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total_weight = weights.sum(axis=-1, keepdims=True)
    return weights @ v / np.where(total_weight > 0, total_weight, 1)


def max_error(got, want):
    """Largest absolute difference of an MLX array from a float64 one; fails on NaN or inf."""
    got = to64(got)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return np.abs(got - want).max()


# ------------------------------------------------------------------ damage


def _spoil(array, live):
    """The array with everything from token live[b] on, in each batch row, replaced by NaN or by all ones."""
    out = np.array(array.view(mx.uint16) if array.dtype.size == 2 else array.view(mx.uint32))
    for b, n in enumerate(live):
        out[b, :, n:] = np.iinfo(out.dtype).max  # a NaN in every float dtype
    return mx.array(out).view(array.dtype)


def _room(array, extra):
    return mx.pad(array, [(0, 0), (0, 0), (0, extra)] + [(0, 0)] * (array.ndim - 3))


def poison_rows(rows, extra=0):
    """Packed rows whose unused slots hold NaN and all ones; `extra` adds as many unused pages."""
    layout, page = rows.layout, rows.format.page
    regions = exact = None
    if rows.regions is not None:
        parts = {}
        for name, array in rows.regions._asdict().items():
            if array is not None:
                span = page if name == "mean" else 1
                live = [-(-n // span) for n in layout.packed]
                array = _spoil(_room(array, extra * page // span), live)
            parts[name] = array
        regions = type(rows.regions)(**parts)
    if rows.exact is not None:
        live = [f + r for f, r in zip(layout.first, layout.recent, strict=True)]
        exact = _spoil(_room(rows.exact, extra * page), live)
    return replace(rows, regions=regions, exact=exact)


def poison_cache(cache):
    """Fills the spare capacity of every array of a cache with NaN and all ones."""
    for name, rows in zip(("keys", "values"), cache.rows, strict=True):
        spoiled = poison_rows(rows)
        arrays = [a for a in (*(spoiled.regions or ()), spoiled.exact) if a is not None]
        setattr(cache, name, arrays)


# ------------------------------------------------------------------ packed rows made by hand


def build_rows(kind, parts, format, layout, layer_index=0):
    """Packed rows of hand-chosen layout; parts[b] `(1, H, n_b, D)` are the tokens of batch row b, spare slots 0."""
    signs = layer_signs(format.seed, layer_index, parts[0].shape[3])
    exact, packed = [], []
    for x, first, count in zip(parts, layout.first, layout.packed, strict=True):
        exact.append(mx.concatenate([x[:, :, :first], x[:, :, first + count :]], axis=2))
        rows = x[:, :, first : first + count]
        mean = page_means(rows, format.page) if kind == "keys" and format.centered_keys and count else None
        packed.append(quantise(rows, format, kind, signs, mean) if count else None)

    def stack(arrays):
        size = max(a.shape[2] for a in arrays)
        return mx.concatenate([_room(a, size - a.shape[2]) for a in arrays], axis=0)

    regions = None
    if any(p is not None for p in packed):
        full = next(p for p in packed if p is not None)
        parts_of = {}
        for name, array in full._asdict().items():
            if array is not None:
                held = [getattr(p, name) if p else array[:, :, :0] for p in packed]
                parts_of[name] = stack(held)
        regions = type(full)(**parts_of)
    exact = stack(exact) if any(f + r for f, r in zip(layout.first, layout.recent, strict=True)) else None
    h, dim = parts[0].shape[1], parts[0].shape[3]
    return PackedRows(kind, format, dim, layer_index, parts[0].dtype, regions, exact, layout, h)
