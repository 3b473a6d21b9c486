"""Export to and import from the reference engine's packed layout (format `tq3`, one sequence).

Each buffer is one uint32 array of regions, each region `(n_kv_heads, capacity, words)` in row-major order:

    keys      2-bit codes | JL signs | norms: float16 norm in the low half, float16 residual norm in the high half
    values    2-bit codes | norms: float16 norm in the low half, the high half is unused

Codes and signs are the words of `packing.py`. `capacity` is the stride of a head, not the number of live tokens.
"""

from __future__ import annotations

import mlx.core as mx

from .codec import Layout, PackedRows
from .format import TQFormat
from .packing import Regions, words


def to_reference(keys: PackedRows, values: PackedRows) -> tuple[mx.array, mx.array]:
    """The two buffers of packed keys and values of one sequence. Raises ValueError for rows in another format."""
    for rows in (keys, values):
        f = rows.format
        form = (f.key_bits, f.value_bits, f.codebook, f.qjl, f.norm_correction, f.centered_keys, f.scale_dtype)
        if form != (2, 2, "lloyd", True, False, False, "float16") or rows.dim % 32:
            raise ValueError(f"{rows.kind} must be in a tq3 format with head_dim a multiple of 32, got {f}")
        if rows.exact is not None or rows.shape[0] != 1 or rows.regions is None:
            raise ValueError(f"{rows.kind} must be one packed sequence without exact rows, got {rows.shape}")
    half = lambda x: x.view(mx.uint16).astype(mx.uint32)  # noqa: E731
    k, v = keys.regions, values.regions
    k_parts = [k.codes, k.jl, half(k.scale) | (half(k.residual) << 16)]
    return _join(k_parts), _join([v.codes, half(v.scale)])


def _join(parts: list[mx.array]) -> mx.array:
    return mx.concatenate([p.reshape(-1) for p in parts])


def from_reference(
    key_buffer: mx.array,
    value_buffer: mx.array,
    *,
    n_kv_heads: int,
    head_dim: int,
    capacity: int,
    tokens: int,
    layer_index: int = 0,
    seed: int = 42,
    kappa: str = "mmse",
) -> tuple[PackedRows, PackedRows]:
    """Packed keys and values of one sequence of `tokens` tokens; the inverse of `to_reference`.

    Raises ValueError where a buffer's size does not fit n_kv_heads, head_dim and capacity.
    """
    if head_dim % 32:
        raise ValueError(f"head_dim must be a multiple of 32, got {head_dim}")
    if not 0 <= tokens <= capacity:
        raise ValueError(f"tokens must be between 0 and the capacity {capacity}, got {tokens}")
    format = TQFormat.preset("tq3", seed=seed, kappa=kappa)
    layout = Layout.uniform(1, 0, tokens, 0)
    codes, bits = words(head_dim, 2), words(head_dim, 1)

    def split(name, buffer, sizes):
        rows = n_kv_heads * capacity
        if buffer.dtype != mx.uint32 or buffer.shape != (rows * sum(sizes),):
            want = f"uint32 ({rows * sum(sizes)},)"
            raise ValueError(f"{name} must be {want}, got {buffer.dtype} {buffer.shape}")
        out, start = [], 0
        for size in sizes:
            out.append(buffer[start : start + rows * size].reshape(1, n_kv_heads, capacity, size))
            start += rows * size
        return out

    def halves(word):
        low, high = (word[..., 0] & 0xFFFF).astype(mx.uint16), (word[..., 0] >> 16).astype(mx.uint16)
        return low.view(mx.float16), high.view(mx.float16)

    k_codes, k_jl, k_norms = split("key_buffer", key_buffer, (codes, bits, 1))
    v_codes, v_norms = split("value_buffer", value_buffer, (codes, 1))
    norm, residual = halves(k_norms)
    k = Regions(codes=k_codes, jl=k_jl, scale=norm, residual=residual)
    v = Regions(codes=v_codes, scale=halves(v_norms)[0])
    common = (format, head_dim, layer_index, mx.float16)
    return tuple(
        PackedRows(kind, *common, regions, None, layout, n_kv_heads) for kind, regions in (("keys", k), ("values", v))
    )
