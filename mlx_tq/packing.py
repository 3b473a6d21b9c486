"""The bit layout of packed rows, and its only definition.

A row is one key or value of D coordinates. All words are uint32 and filled from the least significant bit; a row starts
at a word, and unused bits of its last word are 0. Rows of one layer lie in one array per region, `(B, H, L, words)`:

    region     dtype   words per row       content
    codes      uint32  ceil(D * w / 32)    w-bit fields, w = 2 for 2- and 3-bit codes, 4 for 4-bit codes:
                                           coordinate i in bits [w i, w i + w) of the row
    plane      uint32  ceil(D / 32)        3-bit codes only: the third (highest) bit of coordinate i in bit i
    jl         uint32  ceil(D / 32)        keys with QJL only: bit i is set where the sketch is >= 0
    scale      16 bit  (none)              float the codes are multiplied by, `(B, H, L)`
    residual   16 bit  (none)              keys with QJL only: norm g of the residual of the unit vector, `(B, H, L)`
    mean       16 bit  D per page          centered keys only: the mean of each page, `(B, H, pages, D)`

With 16 "bits" a row is not coded: `codes` holds the coordinates themselves, `(B, H, L, D)`.
`reference.py` rearranges the regions to the single buffer of the reference engine.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from .format import RAW_BITS


class Regions(NamedTuple):
    """The arrays of packed rows; None where the format has no such region."""

    codes: mx.array
    plane: mx.array | None = None
    jl: mx.array | None = None
    scale: mx.array | None = None
    residual: mx.array | None = None
    mean: mx.array | None = None


def field_width(bits: int) -> int:
    """Width in bits of one field of the `codes` region."""
    return 4 if bits == 4 else 2


def words(dim: int, width: int) -> int:
    """Words that `dim` fields of `width` bits take."""
    return -(-dim * width // 32)


def pack(values: mx.array, width: int) -> mx.array:
    """Packs fields `(..., D)` of uint32 below 2**width into words `(..., ceil(D * width / 32))`, width 1, 2 or 4."""
    dim, per_word = values.shape[-1], 32 // width
    count = words(dim, width)
    if count * per_word != dim:
        values = mx.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, count * per_word - dim)])
    shifts = mx.arange(0, 32, width, dtype=mx.uint32)
    # The fields are disjoint, so their sum is their union.
    return mx.sum(values.reshape(*values.shape[:-1], count, per_word) << shifts, axis=-1)


def unpack(packed: mx.array, width: int, dim: int) -> mx.array:
    """The inverse of `pack`: uint32 fields `(..., dim)`."""
    shifts = mx.arange(0, 32, width, dtype=mx.uint32)
    fields = (packed[..., None] >> shifts) & ((1 << width) - 1)
    return fields.reshape(*packed.shape[:-1], -1)[..., :dim]


def pack_codes(codes: mx.array, bits: int) -> tuple[mx.array, mx.array | None]:
    """(codes, plane) regions of uint32 codes `(..., D)` below 2**bits."""
    if bits == 3:
        return pack(codes & 3, 2), pack(codes >> 2, 1)
    return pack(codes, bits), None


def unpack_codes(codes: mx.array, plane: mx.array | None, bits: int, dim: int) -> mx.array:
    """uint32 codes `(..., dim)` from their regions."""
    low = unpack(codes, field_width(bits), dim)
    return low if plane is None else low | (unpack(plane, 1, dim) << 2)


def region_shapes(format, kind: str, dim: int, dtype: mx.Dtype) -> dict[str, tuple[tuple[int, ...], mx.Dtype, int]]:
    """Each region of `kind` ("keys" or "values") as name -> (shape of one row, dtype, tokens per row)."""
    bits = format.bits(kind)
    if bits == RAW_BITS:
        return {"codes": ((dim,), dtype, 1)}
    scale = getattr(mx, format.scale_dtype)
    out = {"codes": ((words(dim, field_width(bits)),), mx.uint32, 1)}
    if bits == 3:
        out["plane"] = ((words(dim, 1),), mx.uint32, 1)
    if kind == "keys" and format.qjl:
        out["jl"] = ((words(dim, 1),), mx.uint32, 1)
    out["scale"] = ((), scale, 1)
    if kind == "keys" and format.qjl:
        out["residual"] = ((), scale, 1)
    if kind == "keys" and format.centered_keys:
        out["mean"] = ((dim,), dtype, format.page)
    return out
