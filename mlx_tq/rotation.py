"""Sign generation and the randomised Hadamard transform (RHT), as MLX ops.

RHT_s(x) = H (s * x) / sqrt(d), with H a symmetric Hadamard matrix, so the inverse is s * (H y) / sqrt(d). For d a
power of two H is the Walsh-Hadamard matrix in natural order; for d = m 2^k with m in 12, 20, 28 or 36 it is
P_m (x) H_2^k with P_m from Paley's second construction. The transform is written as additions only, in a fixed order,
so that every backend and every kernel gives the same bits.
"""

from __future__ import annotations

from functools import cache
from math import isqrt

import mlx.core as mx
import numpy as np

_PALEY_ORDERS = (12, 20, 28, 36)
_GOLDEN_RATIO = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def split_dim(head_dim: int) -> tuple[int, int]:
    """head_dim as (m, 2**k) with m = 1 or a Paley order.

    Raises ValueError where no Hadamard matrix of that size is known here.
    """
    if isinstance(head_dim, int) and head_dim > 0:
        for m in (1, *_PALEY_ORDERS):
            p = head_dim // m
            if head_dim == m * p and p & (p - 1) == 0 and head_dim >= 4:
                return m, p
    raise ValueError(f"head_dim must be m * 2**k with m in 1, 12, 20, 28, 36 and at least 4, got {head_dim}")


def supported_dim(head_dim: int) -> bool:
    """Whether `split_dim` accepts head_dim."""
    try:
        split_dim(head_dim)
    except ValueError:
        return False
    return True


@cache
def paley(order: int) -> np.ndarray:
    """The symmetric Hadamard matrix of Paley's second construction, int8 `(order, order)`; order = 2 (q + 1)."""
    if order == 1:
        return np.ones((1, 1), np.int8)
    q = order // 2 - 1
    p = isqrt(q)
    if p * p == q:  # GF(p^2) as pairs a + b i with i^2 = -1, a field because p = 3 mod 4
        elements = [(a, b) for a in range(p) for b in range(p)]
        squares = {((a * a - b * b) % p, 2 * a * b % p) for a, b in elements} - {(0, 0)}
        subtract = lambda u, v: ((u[0] - v[0]) % p, (u[1] - v[1]) % p)  # noqa: E731
        zero = (0, 0)
    else:
        elements = list(range(q))
        squares = {a * a % q for a in elements} - {0}
        subtract = lambda u, v: (u - v) % q  # noqa: E731
        zero = 0
    character = lambda d: 0 if d == zero else (1 if d in squares else -1)  # noqa: E731
    c = np.ones((q + 1, q + 1), np.int8)
    c[0, 0] = 0
    c[1:, 1:] = [[character(subtract(u, v)) for v in elements] for u in elements]
    h = np.kron(c, [[1, 1], [1, -1]]) + np.kron(np.eye(q + 1, dtype=np.int8), [[1, -1], [-1, -1]])
    return h.astype(np.int8)


def hadamard(x: mx.array) -> mx.array:
    """Unnormalised H x over the last axis, float32 `(..., D)`. Raises ValueError for an unsupported D."""
    shape = x.shape
    m, p = split_dim(shape[-1])
    x = x.astype(mx.float32)
    if x.size == 0:
        return x
    if m == 1 and mx.default_device().type == mx.cpu:
        # MLX's own transform adds in this order on the CPU (not on every backend) and is one operation.
        return mx.hadamard_transform(x, scale=1.0)
    h = 1
    while h < p:
        x = x.reshape(*shape[:-1], -1, 2, h)
        a, b = x[..., 0, :], x[..., 1, :]
        x = mx.stack([a + b, a - b], axis=-2)
        h *= 2
    x = x.reshape(shape)
    if m > 1:
        rows = x.reshape(*shape[:-1], m, p)
        part = [rows[..., i, :] for i in range(m)]
        negative = [-r for r in part]
        mixed = []
        for signs in paley(m):
            terms = [part[i] if s > 0 else negative[i] for i, s in enumerate(signs)]
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            mixed.append(total)
        x = mx.stack(mixed, axis=-2).reshape(shape)
    return x


def to_dtype(x: mx.array, dtype: mx.Dtype) -> mx.array:
    """float32 x in dtype; finite values beyond the range of float16 become its largest ones."""
    if dtype == mx.float16:
        top = mx.finfo(mx.float16).max
        x = mx.where(mx.isfinite(x), mx.clip(x, -top, top), x)
    return x.astype(dtype)


def rotate(x: mx.array, signs: mx.array) -> mx.array:
    """RHT_signs(x) over the last axis, rounded to x's dtype as `to_dtype` does.

    Shapes: x `(..., D)`, signs `(D,)` of +1/-1. A row with a non-finite coordinate rotates to all non-finite.
    """
    return to_dtype(hadamard(x.astype(mx.float32) * signs) * (x.shape[-1] ** -0.5), x.dtype)


def rotate_back(y: mx.array, signs: mx.array) -> mx.array:
    """The inverse of `rotate`, float32 `(..., D)`."""
    return hadamard(y) * (y.shape[-1] ** -0.5) * signs


def _u64(value: int) -> mx.array:
    # mx.array takes no Python int above 2**63.
    return mx.array(np.array(value & _MASK, np.uint64))


def _splitmix64(state: mx.array) -> mx.array:
    z = (state ^ (state >> 30)) * _u64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27)) * _u64(0x94D049BB133111EB)
    return z ^ (z >> 31)


def _rotl(x: mx.array, n: int) -> mx.array:
    return (x << n) | (x >> (64 - n))


def _sign_stream(seeds: mx.array, count: int) -> mx.array:
    """`count` signs for each 64-bit seed `(N,)`, as `(N, count)`: the low bits of xoshiro256**, 1 meaning +1."""
    s = [_splitmix64(seeds + _u64(_GOLDEN_RATIO * (i + 1))) for i in range(4)]
    low = []
    for _ in range(count):
        low.append((_rotl(s[1] * 5, 7) * 9) & 1)
        t = s[1] << 17
        s[2] = s[2] ^ s[0]
        s[3] = s[3] ^ s[1]
        s[1] = s[1] ^ s[2]
        s[0] = s[0] ^ s[3]
        s[2] = s[2] ^ t
        s[3] = _rotl(s[3], 45)
    return mx.stack(low, axis=-1).astype(mx.float32) * 2 - 1


@cache
def layer_signs(seed: int, layer_index: int, head_dim: int) -> tuple[mx.array, mx.array]:
    """The sign vectors (s, s') of a layer: +1/-1, float32 `(D,)`; s rotates, s' makes the QJL sketch.

    xoshiro256** seeded by SplitMix64 from L = seed XOR layer_index for s and L * 0x9E3779B97F4A7C15 + 1 for s'.
    """
    for name, value in (("seed", seed), ("layer_index", layer_index)):
        if not 0 <= value <= _MASK:
            raise ValueError(f"{name} must be in [0, 2**64), got {value}")
    split_dim(head_dim)
    layer = seed ^ layer_index
    seeds = mx.array(np.array([layer, (layer * _GOLDEN_RATIO + 1) & _MASK], np.uint64))
    # 64-bit integer ops on the CPU: the loop is serial and short. Evaluated now, since streams belong to threads.
    with mx.stream(mx.cpu):
        signs = _sign_stream(seeds, head_dim)
        s, s_jl = mx.contiguous(signs[0]), mx.contiguous(signs[1])
    mx.eval(s, s_jl)
    return s, s_jl
