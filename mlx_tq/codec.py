"""Encoding and decoding of keys and values in plain MLX ops: the documentation of the codec and its oracle.

A row x, less the mean of its page where keys are centered, becomes y = RHT_s(x) (`rotation.py`), its norm n and one
code per coordinate of y / n (arXiv 2504.19874, algorithm 1). Keys may add the sign sketch of the residual (algorithm 2,
QJL). Only codes live in rotated space: means, exact rows, queries and results are in the model's own.

The kernels encode to the same bits: sums run in one fixed order and no product is added to anything unless it is exact,
so fused multiply-adds change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import packing
from .codebook import lloyd_max, uniform_steps
from .format import RAW_BITS, TQFormat
from .packing import Regions
from .rotation import hadamard, layer_signs, rotate, rotate_back, split_dim, to_dtype

# Tokens that kernels read at a time: packed regions hold a multiple of it.
ROW_BLOCK = 32
FLOAT_DTYPES = (mx.float16, mx.bfloat16, mx.float32)
_TINY_NORM = 1e-12
# Resolution of the integer dot product that chooses the step: exact in float32 up to head_dim 1024.
STEP_GRID = 512


class Layout(NamedTuple):
    """Where the tokens of each batch row are, in tokens: one tuple entry per batch row.

    A row has `pad` columns of left padding, then its tokens in order: `first` exact ones, `packed` ones, `recent` exact
    ones. All rows end at the same column.
    """

    pad: tuple[int, ...]
    first: tuple[int, ...]
    packed: tuple[int, ...]
    recent: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=64)  # the layers of a model ask for the same one
    def uniform(cls, batch: int, first: int, packed: int, recent: int) -> Layout:
        return cls((0,) * batch, (first,) * batch, (packed,) * batch, (recent,) * batch)

    @property
    def length(self) -> int:
        """Columns of the attention matrix: padding and tokens."""
        return self.pad[0] + self.first[0] + self.packed[0] + self.recent[0]

    @property
    def is_uniform(self) -> bool:
        """Whether all batch rows are laid out alike."""
        return all(len(set(field)) == 1 for field in (self.pad, self.first, self.packed, self.recent))


class Memo:
    """What needs not be found out again at the next step of a cache.

    found: what `kernels` knows of its keys; accepted: shapes and dtypes of the last new rows, which were checked, and
    the cache's batch rows, all that the check depends on while the cache holds rows of one kind.
    """

    found: object = None
    accepted: tuple | None = None

    def __reduce__(self):
        return Memo, ()  # copies know nothing


@dataclass(slots=True)  # frozen would triple the time to make one, a part of every decode step
class PackedRows:
    """Keys or values of one layer in packed form, with the rows that are kept exact; not to be changed once made.

    Attributes:
        kind: "keys" or "values".
        format: the TQFormat.
        dim: head_dim D of these rows.
        layer_index: layer whose signs rotate the packed rows.
        dtype: dtype of the rows that were encoded, and of `exact`.
        regions: packed arrays `(B, n_kv_heads, capacity, ...)`, see `packing.py`. None while nothing is packed.
        exact: rows as they came `(B, n_kv_heads, capacity, D)`, the first tokens and then the recent ones, or None.
        layout: which rows of these are live; the rest is unspecified.
        n_kv_heads: number of heads.
        fused: "auto" runs the kernels where they can run, "require" raises where they cannot, "never" uses MLX ops.
    """

    kind: str
    format: TQFormat
    dim: int
    layer_index: int
    dtype: mx.Dtype
    regions: Regions | None
    exact: mx.array | None
    layout: Layout
    n_kv_heads: int
    fused: str = "auto"
    memo: Memo | None = field(default=None, init=False, repr=False, compare=False)  # of the cache
    inputs: tuple | None = field(default=None, init=False, repr=False, compare=False)  # of the last launch, by kernels

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, n_kv_heads, L, D) of the rows this stands for, padding included."""
        return (len(self.layout.pad), self.n_kv_heads, self.layout.length, self.dim)

    @property
    def nbytes(self) -> int:
        """Bytes held, spare capacity included."""
        arrays = [*(self.regions or ()), self.exact]
        return sum(a.nbytes for a in arrays if a is not None)

    @property
    def signs(self) -> tuple[mx.array, mx.array]:
        """The sign vectors (s, s') of this layer."""
        return layer_signs(self.format.seed, self.layer_index, self.dim)


def plain_rows(keys: PackedRows, values: PackedRows) -> tuple[mx.array, mx.array] | None:
    """All rows as they came `(B, n_kv_heads, L, D)`, where none is packed and there is no padding."""
    layout = keys.layout
    if any(layout.packed) or any(layout.pad) or keys.exact is None or values.exact is None:
        return None
    return keys.exact[:, :, : layout.length], values.exact[:, :, : layout.length]


def check_rows(name: str, x: mx.array) -> None:
    """Raises ValueError unless x is a float array `(B, n_kv_heads, L, D)` with a D that can be rotated."""
    check_array(name, x)
    check_shape(name, x.shape, x.dtype)


def check_array(name: str, x: mx.array) -> None:
    """Raises ValueError unless x is an array."""
    if not isinstance(x, mx.array):
        raise ValueError(f"{name} must be an mlx array, got {type(x).__name__}")


def check_shape(name: str, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    """`check_rows` of an array of this shape."""
    if len(shape) != 4:
        raise ValueError(f"{name} must have shape (B, n_kv_heads, L, head_dim), got {shape}")
    if not shape[0] or not shape[1]:
        raise ValueError(f"{name} must have at least one batch row and one head, got {shape}")
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be float16, bfloat16 or float32, got {dtype}")
    try:
        split_dim(shape[3])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


# ------------------------------------------------------------------ arithmetic shared with the kernels


def round12(x: mx.array) -> mx.array:
    """float32 rounded to 12 significant bits (ties away from 0), so that squares and differences of it are exact."""
    rounded = ((x.view(mx.uint32) + 0x800) & 0xFFFFF000).view(mx.float32)
    return mx.where(mx.isfinite(x), rounded, x)  # the carry would turn some NaN into 0


def tree_sum(x: mx.array) -> mx.array:
    """Sum over the last axis, `(..., D)` to `(...,)`: neighbours first, over the 2**k part, then the rest in order."""
    m, p = split_dim(x.shape[-1])
    x = x.reshape(*x.shape[:-1], m, p)
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    total = x[..., 0, 0]
    for i in range(1, m):
        total = total + x[..., i, 0]
    return total


def row_norm(y: mx.array) -> mx.array:
    """Euclidean norm over the last axis, float32, of coordinates rounded to 12 bits."""
    return mx.sqrt(tree_sum(mx.square(round12(y))))


def page_means(rows: mx.array, page: int) -> mx.array:
    """Means of whole and last partial pages, `(B, H, L, D)` to `(B, H, ceil(L / page), D)`, in the rows' dtype."""
    b, h, length, dim = rows.shape
    pages = -(-length // page)
    x = mx.pad(rows.astype(mx.float32), [(0, 0), (0, 0), (0, pages * page - length), (0, 0)])
    x = x.reshape(b, h, pages, page, dim)
    while x.shape[3] > 1:
        x = x[:, :, :, 0::2] + x[:, :, :, 1::2]
    count = np.full(pages, page, np.float32)
    count[-1] = length - (pages - 1) * page
    return (x[:, :, :, 0] / mx.array(count)[:, None]).astype(rows.dtype)


def _for_each_token(mean: mx.array, page: int, tokens: int) -> mx.array:
    """Page means `(B, H, pages, D)` as float32 `(B, H, tokens, D)`."""
    return mx.repeat(mean.astype(mx.float32), page, axis=2)[:, :, :tokens]


# ------------------------------------------------------------------ quantisation


@cache
def lloyd_tables(bits: int, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 levels, boundaries and squared levels."""
    levels, edges = (a.astype(np.float32) for a in lloyd_max(bits, dim))
    return levels, edges, levels * levels


def _to_scale(x: mx.array, format: TQFormat) -> mx.array:
    """float32 scales in the stored type; float16 saturates rather than overflow."""
    if format.scale_dtype == "float16":
        top = mx.finfo(mx.float16).max
        x = mx.where(mx.isfinite(x), mx.minimum(x, top), x)
    return x.astype(getattr(mx, format.scale_dtype))


def _uniform_codes(unit: mx.array, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    """(codes, sum of squares of 2 code - (2**bits - 1), step) with the step of the largest cosine, per row."""
    dim = unit.shape[-1]
    half, top = 1 << (bits - 1), (1 << bits) - 1
    grid = mx.floor(unit * (STEP_GRID * dim**0.5)).astype(mx.int32)
    best = None
    for step in uniform_steps(bits, dim):
        code = mx.clip(mx.floor(unit * (1 / step)) + half, 0, top).astype(mx.int32)
        odd = 2 * code - top
        square = mx.sum(odd * odd, axis=-1)
        dot = mx.sum(grid * odd, axis=-1).astype(mx.float32)
        cosine = dot * dot / square.astype(mx.float32)
        step = mx.full(square.shape, step, mx.float32)
        if best is None:
            best = (cosine, code, square, step)
            continue
        better = cosine > best[0]
        best = (
            mx.maximum(cosine, best[0]),
            mx.where(better[..., None], code, best[1]),
            mx.where(better, square, best[2]),
            mx.where(better, step, best[3]),
        )
    return best[1].astype(mx.uint32), best[2], best[3]


def quantise(
    rows: mx.array, format: TQFormat, kind: str, signs: tuple[mx.array, mx.array], mean: mx.array | None = None
) -> Regions:
    """Rotates and packs rows.

    Shapes: rows `(B, H, L, D)`; signs s and s' `(D,)`; mean, from `page_means`, for centered keys, else None.
    A row with norm below 1e-12 stores scale 0. A row with a coordinate that is not finite (or a norm beyond 1.8e19)
    stores scale NaN, so that it decodes to NaN and touches no other row.
    """
    bits = format.bits(kind)
    if bits == RAW_BITS:
        return Regions(codes=rows)
    dim = rows.shape[-1]
    x = rows.astype(mx.float32)
    if mean is not None:
        x = x - _for_each_token(mean, format.page, rows.shape[2])
    y = rotate(x, signs[0])
    norm = row_norm(y)
    finite = mx.isfinite(norm)
    present = finite & (norm >= _TINY_NORM)
    inverse = mx.where(present, 1 / norm, 0)[..., None]
    unit = mx.where(present[..., None], y * inverse, 0)
    norm = mx.where(present, norm, mx.where(finite, 0, mx.nan))
    jl = residual = None
    sketch = kind == "keys" and format.qjl
    if format.codebook == "uniform":
        code, square, step = _uniform_codes(unit, bits)
        if sketch:
            odd = (2 * code.astype(mx.int32) - ((1 << bits) - 1)).astype(mx.float32)
            centre = round12(odd * (step * 0.5)[..., None])
        scale = 2 * norm / mx.sqrt(square.astype(mx.float32)) if format.norm_correction and not sketch else norm * step
    else:
        levels, edges, squares = lloyd_tables(bits, dim)
        code = sum((unit >= float(edge)).astype(mx.uint32) for edge in edges)
        if sketch:
            centre = mx.array(levels)[code]
        scale = norm
        if format.norm_correction and not sketch:
            scale = norm / mx.sqrt(tree_sum(mx.array(squares)[code]))
    if sketch:
        rest = round12(unit) - centre
        jl = packing.pack((hadamard(rest * signs[1]) >= 0).astype(mx.uint32), 1)
        residual = row_norm(rest)
        if format.codebook == "uniform":
            residual = residual / step  # the scale that multiplies the whole estimate is n * step, not n
        residual = _to_scale(residual, format)
    codes, plane = packing.pack_codes(code, bits)
    return Regions(codes, plane, jl, _to_scale(scale, format), residual, mean)


def dequantise(regions: Regions, format: TQFormat, kind: str, dim: int, jl_signs: mx.array) -> mx.array:
    """What coded regions stand for in rotated space and without their means, float32 `(B, H, L, D)`."""
    bits = format.bits(kind)
    code = packing.unpack_codes(regions.codes, regions.plane, bits, dim)
    if format.codebook == "uniform":
        x = code.astype(mx.float32) - ((1 << bits) - 1) / 2
    else:
        x = mx.array(lloyd_tables(bits, dim)[0])[code]
    if regions.jl is not None:
        bit = packing.unpack(regions.jl, 1, dim).astype(mx.float32) * 2 - 1
        weight = regions.residual.astype(mx.float32) * (format.kappa_value(dim) * dim**-0.5)
        x = x + weight[..., None] * (hadamard(bit) * jl_signs)
    return x * regions.scale.astype(mx.float32)[..., None]


def decode_regions(
    regions: Regions, format: TQFormat, kind: str, dim: int, signs: tuple[mx.array, mx.array]
) -> mx.array:
    """The rows that packed regions stand for, float32 `(B, H, L, D)`; the first token begins a page."""
    if format.bits(kind) == RAW_BITS:
        return regions.codes.astype(mx.float32)
    x = rotate_back(dequantise(regions, format, kind, dim, signs[1]), signs[0])
    return x if regions.mean is None else x + _for_each_token(regions.mean, format.page, x.shape[2])


# ------------------------------------------------------------------ whole arrays


def _encode(x: mx.array, format, kind: str, layer_index: int) -> PackedRows:
    format = TQFormat.resolve(format)
    check_rows(kind, x)
    if not mx.all(mx.isfinite(x)).item():
        raise ValueError(f"{kind} must be finite, got NaN or inf")
    b, h, length, dim = x.shape
    mean = page_means(x, format.page) if kind == "keys" and format.centered_keys and length else None
    regions = quantise(x, format, kind, layer_signs(format.seed, layer_index, dim), mean)
    regions = grow_regions(regions, -length % ROW_BLOCK)  # kernels read whole blocks
    return PackedRows(kind, format, dim, layer_index, x.dtype, regions, None, Layout.uniform(b, 0, length, 0), h)


def grow_regions(regions: Regions, spare: int) -> Regions:
    """Packed regions with room for `spare` more tokens, less than a page of them."""
    if not spare:
        return regions
    room = lambda a: mx.pad(a, [(0, 0), (0, 0), (0, spare)] + [(0, 0)] * (a.ndim - 3))  # noqa: E731
    return Regions(**{n: a if a is None or n == "mean" else room(a) for n, a in regions._asdict().items()})


def encode_keys(keys: mx.array, format: TQFormat | str | None = None, *, layer_index: int = 0) -> PackedRows:
    """Packs all keys `(B, n_kv_heads, L, D)`; the window of the format is a matter of the cache and not applied here.

    Raises ValueError for a bad rank, dtype, head_dim or format, and for NaN or inf.
    """
    return _encode(keys, format, "keys", layer_index)


def encode_values(values: mx.array, format: TQFormat | str | None = None, *, layer_index: int = 0) -> PackedRows:
    """Packs all values `(B, n_kv_heads, L, D)`, see `encode_keys`."""
    return _encode(values, format, "values", layer_index)


def live_regions(rows: PackedRows, start: int, stop: int) -> Regions:
    """The packed regions of tokens [start, stop), start a multiple of the page."""
    page = rows.format.page
    parts = {}
    for name, array in rows.regions._asdict().items():
        if name == "mean" and array is not None:
            array = array[:, :, start // page : -(-stop // page)]
        elif array is not None:
            array = array[:, :, start:stop]
        parts[name] = array
    return Regions(**parts)


def _decode(rows: PackedRows) -> mx.array:
    """All rows in their dtype `(B, n_kv_heads, L, D)`; padding is 0."""
    layout = rows.layout
    b, h, length, dim = rows.shape
    packed, exact = max(layout.packed), max(f + r for f, r in zip(layout.first, layout.recent, strict=True))
    parts = []
    if exact:
        parts.append(rows.exact[:, :, :exact])
    if packed:
        regions = live_regions(rows, 0, packed)
        parts.append(to_dtype(decode_regions(regions, rows.format, rows.kind, dim, rows.signs), rows.dtype))
    if not parts:
        return mx.zeros((b, h, length, dim), rows.dtype)
    if layout.is_uniform and not layout.pad[0]:
        if len(parts) == 2:
            first = layout.first[0]
            parts = [parts[0][:, :, :first], parts[1], parts[0][:, :, first:]]
        return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0]
    table = mx.concatenate([*parts, mx.zeros((b, h, 1, dim), rows.dtype)], axis=2)
    return mx.take_along_axis(table, _sources(layout, exact, packed)[:, None, :, None], axis=2)


@lru_cache(maxsize=4)  # the layers of a model ask for the same one
def _sources(layout: Layout, exact: int, packed: int) -> mx.array:
    """Row `(B, columns)` each column comes from: an exact row, a packed row behind them, or the zero row at the end."""
    index = np.full((len(layout.pad), layout.length), exact + packed, np.int32)
    for i, (pad, first, count, recent) in enumerate(
        zip(layout.pad, layout.first, layout.packed, layout.recent, strict=True)
    ):
        tokens = np.concatenate([np.arange(first), exact + np.arange(count), first + np.arange(recent)])
        index[i, pad:] = tokens
    return mx.array(index)


def decode_keys(keys: PackedRows) -> mx.array:
    """The keys `(B, n_kv_heads, L, D)` that the packed rows stand for, in the dtype they were encoded from."""
    return _decode(keys)


def decode_values(values: PackedRows) -> mx.array:
    """The values that the packed rows stand for, see `decode_keys`."""
    return _decode(values)


def estimate_scores(queries: mx.array, keys: PackedRows, *, scale: float = 1.0) -> mx.array:
    """Scores of queries `(B, n_heads, L, D)` on packed keys, float32 `(B, n_heads, L, S)`, without decoding a key.

    scale * (n sum q_rot c + n g kappa (2 sum_{bit = 1} q_jl - sum q_jl)), with q_rot = RHT_s(q), q_jl = RHT_s'(q_rot)
    (arXiv 2504.19874, section 3.2). Rows must all be packed and not centered. The clear form of what the kernels do.
    """
    if keys.exact is not None or keys.format.centered_keys or keys.format.key_bits == RAW_BITS:
        raise ValueError("keys must be coded, packed in full and not centered")
    b, n_heads, length, dim = queries.shape
    groups = n_heads // keys.n_kv_heads
    s, s_jl = keys.signs
    q_rot = hadamard(queries.astype(mx.float32) * s) * dim**-0.5
    q_rot = q_rot.reshape(b, keys.n_kv_heads, groups * length, dim)
    regions = live_regions(keys, 0, keys.layout.length)
    plain = regions._replace(jl=None, scale=mx.ones_like(regions.scale))
    unit = dequantise(plain, keys.format, "keys", dim, s_jl)
    scores = q_rot @ unit.swapaxes(-1, -2)
    if keys.format.qjl:
        q_jl = hadamard(q_rot * s_jl) * dim**-0.5
        bit = packing.unpack(regions.jl, 1, dim).astype(mx.float32)
        signed = 2 * (q_jl @ bit.swapaxes(-1, -2)) - mx.sum(q_jl, axis=-1, keepdims=True)
        scores = scores + regions.residual.astype(mx.float32)[..., None, :] * keys.format.kappa_value(dim) * signed
    scores = scale * scores * regions.scale.astype(mx.float32)[..., None, :]
    return scores.reshape(b, n_heads, length, -1)
