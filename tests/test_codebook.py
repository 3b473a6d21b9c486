import re

import numpy as np
import pytest

from mlx_tq.codebook import STEP_CHOICES, UNIFORM_STEP, lloyd_max, uniform_steps
from mlx_tq.format import TQFormat

DIMS = (64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576)

GOLDEN_LEVELS = {
    (2, 64): ([0.0565148704, 0.187496856], 0.122005858),
    (2, 128): ([0.0399915949, 0.133041516], 0.0865165591),
}
# Distortion of a unit vector of 128 coordinates: Lloyd-Max, by bits.
GOLDEN_DISTORTION = {1: 0.361, 2: 0.116, 3: 0.0340, 4: 0.0093}


def density(dim, n=2_000_001):
    """Grid, and the weights of a normalised coordinate density on it."""
    x = np.linspace(-1, 1, n)
    with np.errstate(divide="ignore"):
        f = np.exp((dim - 3) / 2 * np.log1p(-(x**2)))
    return x, f / f.sum()


@pytest.mark.parametrize(("bits", "dim"), GOLDEN_LEVELS)
def test_golden_levels(bits, dim):
    levels, edges = lloyd_max(bits, dim)
    positive, boundary = GOLDEN_LEVELS[bits, dim]
    # The constants are float32 values: ours round to the same ones.
    np.testing.assert_array_equal(levels[2:].astype(np.float32), np.array(positive, np.float32))
    assert np.float32(edges[2]) == np.float32(boundary)
    assert abs(edges[1]) < 1e-16


@pytest.mark.parametrize("bits", GOLDEN_DISTORTION)
def test_distortion(bits):
    x, f = density(128)
    levels, edges = lloyd_max(bits, 128)
    distortion = 128 * np.sum(f * (x - levels[np.searchsorted(edges, x, side="right")]) ** 2)
    assert distortion == pytest.approx(GOLDEN_DISTORTION[bits], rel=0.005)
    assert distortion > 4.0**-bits  # Shannon's bound


@pytest.mark.parametrize("bits", (1, 2, 3, 4))
@pytest.mark.parametrize("dim", (4, 64, 80, 576))
def test_levels_are_the_centroids_of_their_cells(bits, dim):
    x, f = density(dim)
    levels, edges = lloyd_max(bits, dim)
    cell = np.searchsorted(edges, x, side="right")
    mass, moment = (np.bincount(cell, weights=w, minlength=2**bits) for w in (f, f * x))
    # A grid point on the wrong side of a boundary moves a centroid by about the grid's step.
    np.testing.assert_allclose(levels, moment / mass, atol=2e-6)
    np.testing.assert_allclose(edges, (levels[1:] + levels[:-1]) / 2, rtol=1e-15)
    np.testing.assert_array_equal(levels, -levels[::-1])
    assert (np.diff(levels) > 0).all()


@pytest.mark.parametrize(("bits", "dim"), [(0, 64), (5, 64), (16, 64), (2, 3), (2, 0)])
def test_lloyd_refuses(bits, dim):
    with pytest.raises(ValueError, match=r"bits must be|head_dim must be"):
        lloyd_max(bits, dim)


@pytest.mark.parametrize("bits", UNIFORM_STEP)
@pytest.mark.parametrize("dim", DIMS)
def test_uniform_steps_bracket_the_best_step(bits, dim):
    steps = uniform_steps(bits, dim)
    assert list(steps) == sorted(steps) and len(steps) == len(STEP_CHOICES)
    assert steps[0] < UNIFORM_STEP[bits] / dim**0.5 < steps[-1]


@pytest.mark.parametrize("bits", UNIFORM_STEP)
def test_uniform_step_is_optimal_for_a_normal(bits):
    x = np.linspace(-12, 12, 400_001)
    f = np.exp(-(x**2) / 2)
    f /= f.sum()

    def distortion(step):
        code = np.clip(np.floor(x / step) + 2 ** (bits - 1), 0, 2**bits - 1)
        return np.sum(f * (x - (code - (2**bits - 1) / 2) * step) ** 2)

    best = UNIFORM_STEP[bits]
    assert distortion(best) < min(distortion(best * 0.995), distortion(best * 1.005))


# ------------------------------------------------------------------ formats


@pytest.mark.parametrize(
    "wrong",
    [
        {"key_bits": 1},
        {"key_bits": 5},
        {"value_bits": 8},
        {"key_bits": "4"},
        {"codebook": "kmeans"},
        {"kappa": "best"},
        {"scale_dtype": "float32"},
        {"qjl": 1},
        {"norm_correction": None},
        {"window": -1},
        {"window": 1.5},
        {"sinks": True},
        {"seed": -1},
        {"seed": 1 << 64},
        {"page": 16},
        {"page": 96},
        {"key_bits": 16, "qjl": True},
        {"key_bits": 16, "centered_keys": True},
        {"key_bits": 16, "value_bits": 16},
    ],
    ids=str,
)
def test_format_refuses(wrong):
    with pytest.raises(ValueError) as error:
        TQFormat(**wrong)
    assert any(name in str(error.value) for name in wrong)


def test_format_is_a_value():
    assert TQFormat(seed=7) == TQFormat(seed=7) != TQFormat(seed=8)
    assert len({TQFormat(), TQFormat(), TQFormat(qjl=True)}) == 2
    assert TQFormat(**TQFormat.preset("tq3").as_dict()) == TQFormat.preset("tq3")
    with pytest.raises(AttributeError):
        TQFormat().key_bits = 2


def test_presets():
    assert {"default", "k4v4", "tq3"} <= set(TQFormat.presets())
    for name, format in TQFormat.presets().items():
        assert TQFormat.resolve(name) == format == TQFormat.resolve(format)
        assert TQFormat.preset(name, seed=3).seed == 3
    assert TQFormat.resolve(None) == TQFormat.preset("default")
    for wrong in ("q4_0", 4, {"key_bits": 4}):
        with pytest.raises(ValueError, match="format must be"):
            TQFormat.resolve(wrong)


def test_tq3_is_the_reference_format():
    tq3 = TQFormat.preset("tq3")
    assert (tq3.key_bits, tq3.value_bits, tq3.qjl, tq3.codebook, tq3.scale_dtype) == (2, 2, True, "lloyd", "float16")
    # 2 bits of code, 1 of sketch and two 16-bit norms for a key; a value's norm takes 16 bits.
    for dim in (64, 128):
        assert tq3.bits_per_element(dim) == (3 * dim + 32 + 2 * dim + 16) / (2 * dim)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ((0,), "head_dim must be an int of at least 1, got 0"),
        ((-64, 64), "head_dim must be an int of at least 1, got -64"),
        ((64, 0), "value_dim must be an int of at least 1, got 0"),
        ((64.0,), "head_dim must be an int of at least 1, got 64.0"),
    ],
)
def test_bits_of_no_element(widths, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TQFormat().bits_per_element(*widths)


@pytest.mark.parametrize("dim", (64, 128))
def test_kappa(dim):
    values = {k: TQFormat(qjl=True, kappa=k).kappa_value(dim) for k in ("unbiased", "mmse", "reference")}
    assert values["unbiased"] == pytest.approx(np.sqrt(np.pi / 2) / np.sqrt(dim))
    assert values["mmse"] == pytest.approx(np.sqrt(2 / np.pi) / np.sqrt(dim))
    assert values["reference"] == pytest.approx(values["unbiased"] / np.sqrt(dim))
