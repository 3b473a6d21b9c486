import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import fields

from mlx_tq.format import TQFormat
from mlx_tq.packing import Regions, pack, pack_codes, region_shapes, unpack, unpack_codes, words

DIMS = (64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576)


@pytest.mark.parametrize("width", (1, 2, 4))
@pytest.mark.parametrize("dim", (*DIMS, 4, 12, 20, 28, 31, 33))
def test_pack_layout_and_round_trip(width, dim):
    values = np.random.default_rng(dim).integers(0, 1 << width, (2, 3, dim)).astype(np.uint32)
    packed = pack(mx.array(values), width)
    assert packed.dtype == mx.uint32 and packed.shape == (2, 3, words(dim, width))
    np.testing.assert_array_equal(fields(packed, width, dim), values)
    np.testing.assert_array_equal(np.array(unpack(packed, width, dim)), values)


def test_golden_words():
    two = mx.array([0, 1, 2, 3] * 4, dtype=mx.uint32)
    assert [f"{w:08x}" for w in pack(two, 2).tolist()] == ["e4e4e4e4"]
    four = mx.array(list(range(16)), dtype=mx.uint32)
    assert [f"{w:08x}" for w in pack(four, 4).tolist()] == ["76543210", "fedcba98"]
    one = mx.array([1] + [0] * 31 + [0, 1] + [0] * 30, dtype=mx.uint32)
    assert pack(one, 1).tolist() == [1, 2]
    low, plane = pack_codes(mx.array([4, 3, 7, 0] * 8, dtype=mx.uint32), 3)
    assert [f"{w:08x}" for w in low.tolist()] == ["3c3c3c3c"] * 2
    assert [f"{w:08x}" for w in plane.tolist()] == ["55555555"]


@pytest.mark.parametrize("width", (1, 2, 4))
@pytest.mark.parametrize("dim", (4, 12, 72, 80))
def test_unused_bits_of_the_last_word_are_zero(width, dim):
    packed = np.array(pack(mx.full((dim,), (1 << width) - 1, dtype=mx.uint32), width))
    assert sum(int(w).bit_count() for w in packed) == dim * width


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_codes_round_trip(data):
    bits = data.draw(st.sampled_from((1, 2, 3, 4)))
    dim = data.draw(st.integers(1, 200))
    shape = data.draw(st.sampled_from(((), (1,), (3,), (2, 1, 3))))
    seed = data.draw(st.integers(0, 2**32 - 1))
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (*shape, dim)).astype(np.uint32)
    if bits == 1:
        np.testing.assert_array_equal(np.array(unpack(pack(mx.array(codes), 1), 1, dim)), codes)
        return
    low, plane = pack_codes(mx.array(codes), bits)
    assert (plane is None) == (bits != 3)
    np.testing.assert_array_equal(np.array(unpack_codes(low, plane, bits, dim)), codes)


@given(
    key_bits=st.sampled_from((2, 3, 4, 16)),
    value_bits=st.sampled_from((2, 3, 4, 16)),
    qjl=st.booleans(),
    centered=st.booleans(),
    page=st.sampled_from((32, 128)),
    dim=st.sampled_from((64, 128, 256)),
)
@settings(max_examples=60, deadline=None)
def test_region_shapes_hold_the_stated_bits(key_bits, value_bits, qjl, centered, page, dim):
    if (key_bits == 16 and (qjl or centered)) or key_bits == value_bits == 16:
        return
    format = TQFormat(key_bits, value_bits, qjl=qjl, centered_keys=centered, page=page)
    bits = 0
    for kind in ("keys", "values"):
        shapes = region_shapes(format, kind, dim, mx.float16)
        assert [name for name in Regions._fields if name in shapes] == list(shapes)
        for row, dtype, span in shapes.values():
            bits += 8 * dtype.size * int(np.prod(row, initial=1)) / span
    assert bits / (2 * dim) == format.bits_per_element(dim)


@pytest.mark.parametrize(("dim", "fp16", "want"), [(64, 256, 48), (128, 512, 88)])
def test_tq3_bytes_per_token(dim, fp16, want):
    """The reference's bytes of a key and a value, less the half word it leaves unused."""
    stored = TQFormat.preset("tq3").bits_per_element(dim) * 2 * dim / 8
    assert stored == want - 2 and 2 * 2 * dim == fp16
