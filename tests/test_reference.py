import mlx.core as mx
import numpy as np
import pytest
from oracle import decode64, normal, same_bits, to64

from mlx_tq import TQFormat, TQKVCache, attention, encode_keys, encode_values
from mlx_tq.reference import from_reference, to_reference


def packed(dim=64, h=2, n=5, layer_index=1, **changes):
    format = TQFormat.preset("tq3", **changes)
    k, v = normal(0, 1, h, n, dim), normal(1, 1, h, n, dim)
    return encode_keys(k, format, layer_index=layer_index), encode_values(v, format, layer_index=layer_index)


def room(keys):
    """Tokens there is room for: the stride of a head in the buffers."""
    return keys.regions.codes.shape[2]


def half(array, *index):
    """The bits of one float16."""
    return int(np.array(array.view(mx.uint16))[index])


@pytest.mark.parametrize(("dim", "key_words", "value_words"), [(64, 7, 5), (128, 13, 9), (96, 10, 7), (256, 25, 17)])
def test_layout_of_the_buffers(dim, key_words, value_words):
    """Region after region, and in each region head after head."""
    h, n = 3, 6
    keys, values = packed(dim, h, n)
    k, v = (np.array(buffer) for buffer in to_reference(keys, values))
    live, n = n, room(keys)
    assert k.dtype == v.dtype == np.uint32 and k.shape == (h * n * key_words,) and v.shape == (h * n * value_words,)
    codes, bits = dim // 16, dim // 32
    for head in range(h):
        for token in range(live):
            row = head * n + token
            at = (0, head, token)
            np.testing.assert_array_equal(k[row * codes : (row + 1) * codes], np.array(keys.regions.codes)[at])
            start = h * n * codes + row * bits
            np.testing.assert_array_equal(k[start : start + bits], np.array(keys.regions.jl)[at])
            norms = int(k[h * n * (codes + bits) + row])
            assert norms & 0xFFFF == half(keys.regions.scale, *at)
            assert norms >> 16 == half(keys.regions.residual, *at)
            np.testing.assert_array_equal(v[row * codes : (row + 1) * codes], np.array(values.regions.codes)[at])
            assert int(v[h * n * codes + row]) == half(values.regions.scale, *at)


def test_norms_are_plain_norms():
    """The low half is the norm of the key itself, the high half that of the residual of its unit vector."""
    k = normal(0, 1, 1, 4, 64)
    keys, values = encode_keys(k, "tq3"), encode_values(k, "tq3")
    words = np.array(to_reference(keys, values)[0])[-room(keys) :][:4]
    norm, residual = (words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)
    np.testing.assert_allclose(norm.view(np.float16), np.linalg.norm(to64(k)[0, 0], axis=-1), rtol=2**-10)
    np.testing.assert_allclose(residual.view(np.float16), 0.34, atol=0.06)


@pytest.mark.parametrize("dim", (64, 96, 128))
@pytest.mark.parametrize("kappa", ("mmse", "unbiased", "reference"))
def test_round_trip(dim, kappa):
    keys, values = packed(dim, 2, 9, kappa=kappa, seed=7)
    buffers = to_reference(keys, values)
    shape = {
        "n_kv_heads": 2,
        "head_dim": dim,
        "capacity": room(keys),
        "tokens": 9,
        "layer_index": 1,
        "seed": 7,
        "kappa": kappa,
    }
    k, v = from_reference(*buffers, **shape)
    assert (k.format, v.format) == (keys.format, values.format)
    np.testing.assert_array_equal(decode64(k), decode64(keys))
    np.testing.assert_array_equal(decode64(v), decode64(values))
    assert all(same_bits(a, b) for a, b in zip(to_reference(k, v), buffers, strict=True))
    assert k.shape == keys.shape and v.shape == values.shape


def test_capacity_is_a_stride_and_spare_rows_do_not_count():
    keys, values = packed(64, 3, 64)
    buffers = to_reference(keys, values)
    shape = {"n_kv_heads": 3, "head_dim": 64, "layer_index": 1}
    k, v = from_reference(*buffers, capacity=64, tokens=17, **shape)
    assert k.shape == v.shape == (1, 3, 17, 64)
    np.testing.assert_allclose(decode64(k), decode64(keys)[:, :, :17], atol=1e-12)
    q = normal(2, 1, 6, 1, 64)
    got = attention(q, k, v, scale=0.125)
    short = attention(q, *(encode(normal(i, 1, 3, 64, 64)[:, :, :17], "tq3", layer_index=1)
                           for i, encode in enumerate((encode_keys, encode_values))), scale=0.125)  # fmt: skip
    np.testing.assert_allclose(to64(got), to64(short), atol=1e-6)


def test_the_seed_and_layer_select_the_signs():
    keys, values = packed(64, 2, 9)
    buffers = to_reference(keys, values)
    shape = {"n_kv_heads": 2, "head_dim": 64, "capacity": room(keys), "tokens": 9}
    for wrong in ({"layer_index": 2}, {"layer_index": 1, "seed": 43}):
        k, _ = from_reference(*buffers, **shape, **wrong)
        assert np.abs(decode64(k) - decode64(keys)).max() > 0.5


@pytest.mark.parametrize(
    "format",
    [
        "k4v4",
        "default",
        TQFormat.preset("tq3", qjl=False),
        TQFormat.preset("tq3", codebook="uniform"),
        TQFormat.preset("tq3", norm_correction=True),
        TQFormat.preset("tq3", scale_dtype="bfloat16"),
        TQFormat.preset("tq3", centered_keys=True),
        TQFormat.preset("tq3", key_bits=3),
    ],
    ids=str,
)
def test_only_its_own_format_is_exported(format):
    x = normal(0, 1, 2, 5, 64)
    with pytest.raises(ValueError, match="tq3"):
        to_reference(encode_keys(x, format), encode_values(x, format))


def test_only_one_whole_packed_sequence_is_exported():
    two = normal(0, 2, 2, 5, 64)
    with pytest.raises(ValueError, match="one packed sequence"):
        to_reference(encode_keys(two, "tq3"), encode_values(two, "tq3"))
    exact = TQKVCache(TQFormat.preset("tq3", sinks=4))
    exact.update_and_fetch(two[:1], two[:1])
    with pytest.raises(ValueError, match="one packed sequence"):
        to_reference(*exact.rows)
    odd = normal(0, 1, 2, 5, 80)
    with pytest.raises(ValueError, match="multiple of 32"):
        to_reference(encode_keys(odd, "tq3"), encode_values(odd, "tq3"))


def test_a_cache_is_exported_with_its_capacity():
    cache = TQKVCache("tq3", layer_index=1)
    k, v = normal(0, 1, 2, 9, 64), normal(1, 1, 2, 9, 64)
    cache.update_and_fetch(k, v)
    buffers = to_reference(*cache.rows)
    capacity = cache.keys[0].shape[2]
    assert capacity > 9
    shape = {"n_kv_heads": 2, "head_dim": 64, "capacity": capacity, "tokens": 9, "layer_index": 1}
    for rows, want in zip(from_reference(*buffers, **shape), cache.rows, strict=True):
        np.testing.assert_array_equal(decode64(rows), decode64(want))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"head_dim": 128}, "key_buffer must be"),
        ({"head_dim": 80}, "multiple of 32"),
        ({"capacity": 10}, "key_buffer must be"),
        ({"n_kv_heads": 3}, "key_buffer must be"),
        ({"tokens": 1000}, "tokens must be"),
        ({"tokens": -1}, "tokens must be"),
        ({"kappa": "best"}, "kappa must be"),
    ],
    ids=str,
)
def test_import_refuses(change, word):
    keys, values = packed(64, 2, 9)
    k, v = to_reference(keys, values)
    shape = {"n_kv_heads": 2, "head_dim": 64, "capacity": room(keys), "tokens": 9}
    with pytest.raises(ValueError, match=word):
        from_reference(k, v, **(shape | change))
    with pytest.raises(ValueError, match="value_buffer must be"):
        from_reference(k, v[:-1], **shape)
    with pytest.raises(ValueError, match="key_buffer must be"):
        from_reference(k.astype(mx.int32), v, **shape)
