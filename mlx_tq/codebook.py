"""Quantiser levels for one coordinate of a random unit vector. Nothing else knows a level.

A coordinate x of a uniformly random unit vector in d dimensions has the density
f(x) ~ (1 - x^2)^((d - 3) / 2) (arXiv 2504.19874, section 3). Both codebooks are built for it and symmetric about 0.
"""

from __future__ import annotations

from functools import cache

import numpy as np

# Optimal step of a uniform quantiser of a standard normal, by bits (Max, 1960).
UNIFORM_STEP = {2: 0.9957, 3: 0.5860, 4: 0.3352}

# The steps an encoder may choose from, as multiples of the optimal one: small enough a set to try at every vector.
STEP_CHOICES = (0.85, 0.925, 1.0, 1.1)


@cache
def lloyd_max(bits: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Lloyd-Max levels `(2**bits,)` and inner boundaries `(2**bits - 1,)`, float64, ascending.

    A value on a boundary belongs to the level above it. Raises ValueError for bits outside 1-4 or head_dim below 4.
    """
    if bits not in (1, 2, 3, 4):
        raise ValueError(f"bits must be 1, 2, 3 or 4, got {bits}")
    if head_dim < 4:
        raise ValueError(f"head_dim must be at least 4, got {head_dim}")
    half = 1 << (bits - 1)
    nodes, weights = np.polynomial.legendre.leggauss(64)

    def centroids(edges):
        # With x = sin t the density is cos(t)^(d-2): smooth, and its first moment has a closed form.
        t = np.arcsin(edges)
        mid, rad = (t[1:] + t[:-1]) / 2, (t[1:] - t[:-1]) / 2
        mass = (np.cos(mid[:, None] + rad[:, None] * nodes) ** (head_dim - 2) @ weights) * rad
        moment = -np.diff((1 - edges**2) ** ((head_dim - 1) / 2)) / (head_dim - 1)
        return moment / mass

    sigma = head_dim**-0.5
    # Beyond 12 sigma the density is below 1e-30: the last cell may end there.
    top = min(1.0, 12 * sigma)
    levels = min(1.0, 4 * sigma) * (np.arange(half) + 0.5) / (half + 1)
    for _ in range(20_000):
        edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [top]])
        new = centroids(edges)
        done = np.abs(new - levels).max() < 1e-15
        levels = new
        if done:
            break
    levels = np.concatenate([-levels[::-1], levels])
    return levels, (levels[1:] + levels[:-1]) / 2


def uniform_steps(bits: int, head_dim: int) -> tuple[float, ...]:
    """The candidate steps for a unit vector; code c stands for (c - (2**bits - 1) / 2) * step."""
    return tuple(UNIFORM_STEP[bits] * head_dim**-0.5 * m for m in STEP_CHOICES)
