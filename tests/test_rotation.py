import os
import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from oracle import hadamard_matrix, normal, same_bits, to64

from mlx_tq.rotation import hadamard, layer_signs, paley, rotate, rotate_back, split_dim, supported_dim

DIMS = (64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576)
REFUSED = (-64, 0, 1, 2, 3, 6, 44, 52, 60, 84, 100, 120, 132, 200)
MASK = (1 << 64) - 1

# (layer, head_dim) -> words of s and of s', +1 as bit 1, least significant bit first, seed 42.
GOLDEN_SIGNS = {
    (0, 64): ("40f54e8c 6587b7b0", "ed6a4a21 c7fc53db"),
    (0, 128): ("40f54e8c 6587b7b0 c31220ea 32f6449b", "ed6a4a21 c7fc53db 7380a1be 215f2b34"),
    (1, 64): ("57661b0e cdf0a1a5", None),
}


def sign_words(signs):
    bits = np.array(signs) > 0
    return " ".join(f"{int(sum(1 << i for i in range(32) if w[i])):08x}" for w in bits.reshape(-1, 32))


def python_signs(seed, count):
    """Low bits of xoshiro256** seeded by SplitMix64, in plain integers."""
    state = []
    for _ in range(4):
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        state.append(z ^ (z >> 31))

    def rotl(x, n):
        return ((x << n) | (x >> (64 - n))) & MASK

    out = []
    for _ in range(count):
        out.append(1 if (rotl(state[1] * 5 & MASK, 7) * 9) & 1 else -1)
        t = (state[1] << 17) & MASK
        state[2] ^= state[0]
        state[3] ^= state[1]
        state[1] ^= state[2]
        state[0] ^= state[3]
        state[2] ^= t
        state[3] = rotl(state[3], 45)
    return out


@pytest.mark.parametrize(("layer", "dim"), GOLDEN_SIGNS)
def test_golden_signs(layer, dim):
    s, s_jl = layer_signs(42, layer, dim)
    want, want_jl = GOLDEN_SIGNS[layer, dim]
    assert sign_words(s) == want
    assert want_jl is None or sign_words(s_jl) == want_jl


@pytest.mark.parametrize("seed", (0, 1, 42, 1 << 63, MASK))
@pytest.mark.parametrize("layer", (0, 1, 79, 1 << 40))
def test_signs_equal_a_plain_generator(seed, layer):
    s, s_jl = layer_signs(seed, layer, 96)
    mixed = seed ^ layer
    assert s.dtype == mx.float32 and s.shape == s_jl.shape == (96,)
    assert s.tolist() == python_signs(mixed, 96)
    assert s_jl.tolist() == python_signs((mixed * 0x9E3779B97F4A7C15 + 1) & MASK, 96)


def test_signs_differ_between_layers_seeds_and_sketches():
    seen = {sign_words(signs) for seed in (42, 1066) for layer in range(32) for signs in layer_signs(seed, layer, 128)}
    assert len(seen) == 2 * 32 * 2
    shorter, longer = layer_signs(42, 3, 64)[0], layer_signs(42, 3, 128)[0]
    assert shorter.tolist() == longer[:64].tolist()


@pytest.mark.parametrize("where", ("seed", "layer_index"))
@pytest.mark.parametrize("value", (-1, 1 << 64))
def test_signs_refuse(where, value):
    with pytest.raises(ValueError, match=where):
        layer_signs(**{"seed": 1, "layer_index": 1, "head_dim": 64, where: value})


@pytest.mark.parametrize("order", (12, 20, 28, 36))
def test_paley_is_a_symmetric_hadamard_matrix(order):
    h = paley(order).astype(int)
    assert set(np.unique(h)) == {-1, 1}
    np.testing.assert_array_equal(h @ h.T, order * np.eye(order))
    np.testing.assert_array_equal(h, h.T)


@pytest.mark.parametrize("dim", DIMS)
def test_hadamard_is_its_matrix_and_orthogonal(dim):
    got = to64(hadamard(mx.eye(dim)))
    np.testing.assert_array_equal(got, hadamard_matrix(dim))
    np.testing.assert_array_equal(got @ got.T, dim * np.eye(dim))
    np.testing.assert_array_equal(got, got.T)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("layer", (0, 5))
def test_rotation_and_its_inverse(dim, layer):
    s, s_jl = layer_signs(42, layer, dim)
    for signs in (s, s_jl):
        matrix = to64(rotate(mx.eye(dim), signs))
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-6)
    x = normal(dim, 2, 3, 5, dim)
    y = rotate(x, s)
    np.testing.assert_allclose(to64(y), (to64(x) * to64(s)) @ hadamard_matrix(dim) / np.sqrt(dim), atol=2e-6)
    np.testing.assert_allclose(to64(rotate_back(y, s)), to64(x), atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(to64(y), axis=-1), np.linalg.norm(to64(x), axis=-1), rtol=1e-6)


@pytest.mark.parametrize("dim", REFUSED)
def test_other_widths_are_refused_by_name(dim):
    assert not supported_dim(dim)
    with pytest.raises(ValueError, match=f"head_dim must be .*got {dim}"):
        split_dim(dim)
    if dim > 0:
        with pytest.raises(ValueError, match="head_dim must be"):
            hadamard(mx.zeros((2, dim)))
        with pytest.raises(ValueError, match="head_dim must be"):
            layer_signs(42, 0, dim)


@pytest.mark.parametrize("dim", (4, 24, 64, 80, 128, 256, 512))
@pytest.mark.parametrize("rows", (0, 1, 3, 64))
def test_butterfly_gives_the_bits_of_the_transform(dim, rows, monkeypatch):
    x = normal(7, rows, dim, factor=30)
    direct = hadamard(x)
    mx.eval(direct)
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    monkeypatch.setattr(mx, "hadamard_transform", None)
    assert same_bits(hadamard(x), direct)


def test_only_powers_of_two_reach_the_transform(monkeypatch):
    widths = []
    original = mx.hadamard_transform
    monkeypatch.setattr(mx, "hadamard_transform", lambda x, **kw: widths.append(x.shape[-1]) or original(x, **kw))
    for dim in DIMS:
        mx.eval(hadamard(mx.ones((3, dim))))
    assert widths == [d for d in DIMS if d & (d - 1) == 0]


def test_every_width_in_a_fresh_process():
    """A transform that writes past its buffer would end this process, not the test run."""
    code = f"""
import mlx.core as mx, numpy as np, mlx_tq
for dim in {DIMS}:
    x = mx.array(np.random.default_rng(dim).standard_normal((1, 2, 33, dim)).astype(np.float32))
    rows = mlx_tq.encode_keys(x, mlx_tq.TQFormat(key_bits=4, qjl=True))
    error = mx.linalg.norm(mlx_tq.decode_keys(rows) - x) / mx.linalg.norm(x)
    assert 0 < error.item() < 0.12, (dim, error)
    values = mlx_tq.encode_values(x, "k4v4")
    keys = mlx_tq.encode_keys(x, "k4v4")
    assert mx.isfinite(mlx_tq.attention(x, keys, values, scale=dim**-0.5)).all().item(), dim
for dim in {tuple(d for d in REFUSED if d > 0)}:
    try:
        mlx_tq.encode_keys(mx.zeros((1, 1, 1, dim)))
    except ValueError as error:
        assert "head_dim" in str(error)
    else:
        raise AssertionError(dim)
print("done")
"""
    env = os.environ | {"MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "85"}
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, env=env)
    assert result.returncode == 0 and result.stdout.strip() == "done", result.stderr


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16, mx.float32))
def test_rotate_keeps_the_dtype(dtype):
    x = normal(1, 2, 64, dtype=dtype)
    s, _ = layer_signs(42, 0, 64)
    y = rotate(x, s)
    assert y.dtype == dtype
    exact = (to64(x) * to64(s)) @ hadamard_matrix(64) / 8
    np.testing.assert_allclose(to64(y), exact, rtol=float(mx.finfo(dtype).eps) / 2 + 1e-6, atol=2e-6)


def test_float16_saturates_and_never_overflows():
    s, _ = layer_signs(42, 0, 128)
    x = (s * 60000).astype(mx.float16)  # rotates to one coordinate of 60000 * sqrt(128)
    y = rotate(x, s)
    assert y[0].item() == 65504 and mx.isfinite(y).all().item()
    assert rotate(-x, s)[0].item() == -65504


@pytest.mark.parametrize("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16, mx.float32))
@pytest.mark.parametrize("dim", (64, 80))
def test_a_bad_row_is_all_bad_and_its_neighbours_are_not(bad, dtype, dim):
    x = np.random.default_rng(0).standard_normal((3, dim)).astype(np.float32)
    x[1, 17] = bad
    y = to64(rotate(mx.array(x).astype(dtype), layer_signs(42, 0, dim)[0]))
    assert not np.isfinite(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()
