"""The kernel runner in tests/msl: what it computes, and that it finds bugs put into a kernel."""

from pathlib import Path

import mlx.core as mx
import msl
import numpy as np
import pytest
from msl import MSLError

ok, reason = msl.available()
pytestmark = pytest.mark.skipif(not ok, reason=reason)

TG = "threadgroup_barrier(mem_flags::mem_threadgroup);"
I = "thread_position_in_grid.x"  # noqa: E741
SG = "simdgroup_barrier(mem_flags::mem_threadgroup);"


def run(source, inputs, shape, dtype=mx.float32, threads=None, group=None, header="", template=None, **call):
    """One call of a kernel with inputs a, b, ... and one output `out`; its value."""
    options = {k: call.pop(k) for k in ("atomic_outputs", "ensure_row_contiguous", "compile_options") if k in call}
    names = "abcdefgh"[: len(inputs)]
    kernel = msl.metal_kernel("t", list(names), ["out"], source, header=header, **options)
    threads = threads or int(np.prod(shape))
    group = group or min(threads, 256)
    return kernel(
        inputs=inputs,
        template=template,
        grid=(threads, 1, 1),
        threadgroup=(group, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
        **call,
    )[0]


def kinds(*args, **kwargs) -> set[str]:
    """Kinds of the problems that a run raises."""
    with pytest.raises(MSLError) as caught:
        run(*args, **kwargs)
    return caught.value.kinds


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_dtype_template(dtype):
    x = mx.random.normal((1000,)).astype(dtype)
    out = run(
        "uint i = thread_position_in_grid.x; T t = a[i]; out[i] = exp(t);", [x], (1000,), dtype, template=[("T", dtype)]
    )
    assert out.dtype == dtype
    assert mx.allclose(out.astype(mx.float32), mx.exp(x.astype(mx.float32)), rtol=1e-2)


def test_int_and_bool_templates():
    out = run("out[0] = B ? N : 0;", [mx.ones(8)], (1,), mx.int32, template=[("N", 3), ("B", True)])
    assert out.item() == 3


def test_every_half_is_converted_exactly():
    bits = np.arange(65536, dtype=np.uint32) * 0x10001
    src = f"half2 h = as_type<half2>(a[{I}]); out[2 * {I}] = float(h.x); out[2 * {I} + 1] = float(h.y);"
    out = np.array(run(src, [mx.array(bits)], (65536, 2), threads=65536))
    want = bits.view(np.float16).reshape(65536, 2).astype(np.float32)
    assert np.array_equal(out, want, equal_nan=True)


def test_masked_bits_are_half_denormals():
    src = """uint i = thread_position_in_grid.x; half2 h = as_type<half2>(a[0] & (0x00010001u << i));
    out[2 * i] = float(h.x) * exp2(24.0f - float(i)); out[2 * i + 1] = float(h.y) * exp2(24.0f - float(i));"""
    out = np.array(run(src, [mx.full((8,), 0x0155FFFF, mx.uint32)], (20,), threads=10)).reshape(10, 2)
    assert (out[:, 0] == 1).all()
    assert (out[:, 1] == [0x155 >> i & 1 for i in range(10)]).all()


def test_half_arithmetic_rounds_once():
    a, b, c = 1 + 2.0**-10, (1 - 2.0**-10) * 2.0**-11, 1 + 2.0**-10
    out = run("out[0] = fma(a[0], a[1], a[2]);", [mx.array([a, b, c] + [0] * 5, mx.float16)], (1,), mx.float16)
    assert out.item() == 1 + 2.0**-10


def test_bfloat_rounds_to_even():
    x = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    out = run("uint i = thread_position_in_grid.x; out[i] = bfloat(a[i]);", [mx.array(x)], (4096,), mx.bfloat16)
    assert mx.array_equal(out, mx.array(x).astype(mx.bfloat16))


def test_literals_are_single_precision():
    out = run("out[0] = a[0] * 0.1 + 0.2;", [mx.full((8,), 3.0)], (1,))
    assert out.item() == np.float32(3) * np.float32(0.1) + np.float32(0.2)


def test_vectors_and_integer_functions():
    src = """uint i = thread_position_in_grid.x; uint4 w = ((const device uint4*)a)[i];
    half2 h = as_type<half2>(w.x); float4 f = float4(float2(h), 1.0f, float(popcount(w.y))); f.xy *= 2.0f;
    f.w += select(0.0f, 1.0f, w.z > w.w) + float(extract_bits(w.w, 4u, 4u));
    *(device float4*)(out + 4 * i) = fma(f, float4(2.0f), f.wzyx);"""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, (64, 4), dtype=np.uint32)
    x[:, 0] = rng.normal(size=(64, 2)).astype(np.float16).view(np.uint32).ravel()
    h = x[:, :1].copy().view(np.float16).astype(np.float32) * 2
    w = np.bitwise_count(x[:, 1]) if hasattr(np, "bitwise_count") else [bin(v).count("1") for v in x[:, 1]]
    f = np.stack([h[:, 0], h[:, 1], np.ones(64), np.array(w) + (x[:, 2] > x[:, 3]) + ((x[:, 3] >> 4) & 15)], 1)
    assert np.allclose(run(src, [mx.array(x)], (64, 4), threads=64), f * 2 + f[:, ::-1])


def test_scalar_functions():
    src = """out[0] = precise::exp2(a[0]); out[1] = fast::exp2(a[0]); out[2] = metal::select(1.0f, 2.0f, a[0] > 0.0f);
    out[3] = clamp(a[0], 0.0f, 1.0f); out[4] = float(clz(1u)); out[5] = float(ctz(8u));
    out[6] = float(mulhi(1u << 31, 4u)); out[7] = float(insert_bits(0u, 5u, 4u, 4u));
    out[8] = float(reverse_bits(1u) >> 31); out[9] = rsqrt(4.0f); out[10] = float(half4(half2(1.0h), half2(2.0h)).z);
    out[11] = float(any(uint2(0u, 1u) != uint2(0u)));
    out[12] = isnan(NAN) ? 1.0f : 0.0f; out[13] = max(NAN, 3.0f);
    out[14] = float(int(rint(2.5f))); out[15] = fmod(7.0f, 4.0f);"""
    out = run(src, [mx.full((8,), 1.5)], (16,), threads=1)
    assert np.allclose(out, [2**1.5, 2**1.5, 2, 1, 31, 3, 2, 80, 1, 0.5, 2, 1, 1, 3, 2, 3])


def test_simd_functions():
    src = """uint l = thread_index_in_simdgroup; uint v = a[l];
    out[l] = simd_shuffle_xor(v, 1); out[32 + l] = simd_shuffle(v, (l + 5) & 31); out[64 + l] = simd_broadcast(v, 7);
    out[96 + l] = simd_prefix_exclusive_sum(v); out[128 + l] = simd_prefix_inclusive_sum(v);
    out[160 + l] = uint(uint64_t(simd_ballot(v & 1u))); out[192 + l] = simd_shuffle_down(v, 1);
    out[224 + l] = simd_max(v); out[256 + l] = simd_min(v); out[288 + l] = simd_sum(v);
    out[320 + l] = quad_sum(v); out[352 + l] = simd_shuffle_up(v, 2);"""
    x, i = np.arange(3, 35, dtype=np.uint32), np.arange(32)
    got = np.array(run(src, [mx.array(x)], (12, 32), mx.uint32, threads=32))
    want = [
        x[i ^ 1],
        x[(i + 5) & 31],
        x[7],
        np.cumsum(x) - x,
        np.cumsum(x),
        (1 << i[x & 1 == 1]).sum(),
        np.append(x[1:], x[31]),
    ]
    want += [34, 3, x.sum(), x.reshape(8, 4).sum(1).repeat(4), np.append(x[:2], x[:-2])]
    for row, expected in zip(got, want, strict=True):
        assert (row == expected).all()


def test_many_shuffles():
    src = """uint l = thread_index_in_simdgroup; float x = a[l], y = 0.0f;
    for (uint k = 0; k < 200; ++k) y += simd_shuffle_xor(x, ushort(k & 31));
    out[thread_position_in_grid.x] = y + simd_shuffle(x, ushort(l ^ 3u)) * 0.0f;"""
    x = np.arange(32, dtype=np.float32)
    want = sum(x[np.arange(32) ^ (k & 31)] for k in range(200))
    assert np.array_equal(np.array(run(src, [mx.array(x)], (1024,), group=1024)).reshape(32, 32)[5], want)
    assert msl.last_run().collectives == 1024 * 201


MATMUL = f"""
  simdgroup_matrix<T, 8, 8> A, B; simdgroup_matrix<float, 8, 8> C = simdgroup_matrix<float, 8, 8>(0);
  threadgroup T tile[64];
  const uint lane = thread_index_in_simdgroup;
  for (uint k = 0; k < K; k += 8) {{
    for (uint e = lane; e < 64; e += 32) tile[e] = a[(e / 8) * K + k + e % 8];
    {SG}
    simdgroup_load(A, tile, 8);
    simdgroup_load(B, b + k, K, 0, true);
    simdgroup_multiply_accumulate(C, A, B, C);
    {SG} // end
  }}
  simdgroup_store(C, out, 8);
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_simdgroup_matrix(dtype):
    a, b = (mx.random.normal((8, 64)).astype(dtype) for _ in range(2))
    given = {"shape": (8, 8), "threads": 32, "template": [("T", dtype), ("K", 64)]}
    assert mx.allclose(run(MATMUL, [a, b], **given), a.astype(mx.float32) @ b.astype(mx.float32).T, atol=1e-3)
    assert kinds(MATMUL.replace(f"{SG} // end", ""), [a, b], **given) == {"race"}


def test_atomics_and_init_value():
    x, given = mx.arange(1000).astype(mx.uint32), {"shape": (4,), "threads": 1000, "group": 64}
    src = "atomic_fetch_add_explicit(&out[a[thread_position_in_grid.x] % 4], 1.0f, memory_order_relaxed);"
    assert (np.array(run(src, [x], **given, atomic_outputs=True, init_value=0)) == 250).all()
    assert kinds(src, [x], **given, atomic_outputs=True) == {"uninitialised"}
    assert "race" in kinds("out[a[thread_position_in_grid.x] % 4] += 1.0f;", [x], **given, init_value=0)


# ---------------------------------------------------------------- what MLX passes


def test_shape_and_strides():
    src = "uint e = thread_position_in_grid.x; out[e] = a[elem_to_loc(e, a_shape, a_strides, a_ndim)] + b;"
    x = mx.arange(24).reshape(4, 6).astype(mx.float32)
    assert mx.array_equal(run(src, [x, 2.0], (4, 6)), x + 2)
    for view in (x.T, x[:, ::2], x[::2, 1:4], mx.broadcast_to(x[:, :1], (4, 6))):
        assert mx.array_equal(run(src, [view, 2.0], view.shape, ensure_row_contiguous=False), view + 2)
        assert mx.array_equal(run(src, [view, 2.0], view.shape), view + 2)


def test_small_inputs_are_in_constant_space():
    header = "inline float first(const device float* p) { return p[0]; }\n"
    assert run("out[0] = first(a);", [mx.ones(8)], (1,), header=header).item() == 1
    assert kinds("out[0] = first(a);", [mx.ones(7)], (1,), header=header) == {"type"}


def test_install():
    msl.install()
    try:
        kernel = mx.fast.metal_kernel(name="t", input_names=["a"], output_names=["out"], source="out[0] = a[0];")
        out = kernel(
            inputs=[mx.ones(8)],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            stream=mx.cpu,
            verbose=False,
        )
    finally:
        msl.uninstall()
    assert out[0].item() == 1 and mx.fast.metal_kernel is not msl.metal_kernel


def test_edge_threadgroup_is_smaller():
    src = "out[thread_position_in_grid.x] = threads_per_threadgroup.x + 1000 * dispatch_threads_per_threadgroup.x;"
    out = run(src, [mx.ones(8)], (70,), mx.uint32, group=32)
    assert out[0].item() == 32032 and out[69].item() == 32006


def test_empty_output():
    assert run("out[0] = a[0];", [mx.ones(8)], (0,), threads=0, group=1).size == 0


@pytest.mark.parametrize("math", ["safe", "relaxed", "fast"])
def test_math_mode(math):
    if "compile_options" not in mx.fast.metal_kernel.__doc__:
        pytest.skip("this MLX has no compile_options")
    assert run("out[0] = a[0] + 1.0f;", [mx.ones(8)], (1,), compile_options={"math_mode": math}).item() == 2


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            f"if ({I} < 9) out[{I}] = a[0];",
            "out: 1 of 10 elements never written; first at element 9",
        ),
        (f"out[{I}] = a[{I}];", "read of 4 bytes at byte offset 36 of a (36 bytes)"),
        (f"out[{I} + 1] = a[0];", "write of 4 bytes at byte offset 40 of out"),
        (f"out[{I}] = a[int({I}) - 1];", "read of 4 bytes at byte offset -4 of a"),
        (f"((device float*)a)[0] = 1.0f; out[{I}] = 0.0f;", "[write-to-input]"),
        (f"out[{I}] = out[{I} ^ 1];", "[uninitialised]"),
        (f"out[{I}] = (*(device float2*)(a + 1)).x;", "[misaligned]"),
        (f"out[{I}] = float(1u << (uint(a[0]) + 31u));", "[undefined-behaviour]"),
        (f"int x = 2147483647; x += int(a[0]); out[{I}] = x;", "signed overflow in +"),
        (f"int zero = int(a[0]) - 1; out[{I}] = 7 / zero;", "division by zero"),
        (f"float p[4] = {{1, 2, 3, 4}}; out[{I}] = p[{I}];", "array index out of bounds"),
        (f"out[{I}] = float(int(a[0] * 1e20f));", "float to integer conversion"),
        (f"out[{I}] = extract_bits(uint(a[0]), 28u, 8u);", "[invalid-operation]"),
        (f"while (a[0] > 0.0f) {{}} out[{I}] = 0.0f;", "[timeout]"),
        (f"threadgroup float t[9000]; t[0] = 0.0f; out[{I}] = a[0];", "[threadgroup-memory]"),
        (f"out[{I}] = simd_shuffle(a[0], ushort(40));", "[invalid-operation]"),
        (f"if ({I} < 4) out[{I}] = simd_sum(a[0]); else out[{I}] = 0.0f;", "[divergence]"),
        (f"threadgroup float t[10]; out[{I}] = t[{I}];", "[uninitialised]"),
    ],
)
def test_message(source, message):
    with msl.options(timeout=1.0), pytest.raises(MSLError) as caught:
        run(source, [mx.ones(9)], (10,))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("uint grid_size = 4; out[0] = a[0] * grid_size;", "redefinition of 'grid_size'"),
        ("out[0] = max(a[0], 0);", "ambiguous"),
        ("out[0] = std::max(a[0], 0.0f);", "std::"),
        ("out[0] = double(a[0]);", "double"),
        ("bfloat b = a[0]; out[0] = float(b);", "must be explicit"),
        ("const float* p = a; out[0] = p[0];", "pointer without an address space"),
        ("thread float* p = a; out[0] = p[0];", "cannot initialize"),
        ("out[0] = float(as_type<half>(uint(a[0])));", "sizes differ"),
        ("float x; if (a[0] > 0.0f) x = 1.0f; out[0] = x;", "uninitialized"),
        ("auto f = [](float x) { return x; }; out[0] = f(a[0]);", "lambda"),
        ("a[0] = 1.0f; out[0] = 1.0f;", "read-only"),
        ("out[0] = simd_sum(ulong(1));", "64-bit"),
        ("float4 v = float4(1.0f, 2.0f); out[0] = v.x;", "wrong number of components"),
    ],
)
def test_compile_message(source, message):
    with pytest.raises(MSLError) as caught:
        run(source, [mx.ones(9)], (1,))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fence", "good"), [(SG, True), (SG.replace("mem_threadgroup)", "mem_none)"), False), ("", False)]
)
def test_simdgroup_barrier_orders_its_own_simdgroup(fence, good):
    src = f"threadgroup float t[64]; uint i = thread_index_in_threadgroup; t[i] = a[i]; {fence} out[i] = t[i ^ 1];"
    x = mx.arange(64).astype(mx.float32)
    if good:
        assert run(src, [x], (64,), group=64)[3].item() == 2
    else:
        assert kinds(src, [x], (64,), group=64) & {"race", "uninitialised"}
    assert kinds(src.replace("i ^ 1", "i ^ 32"), [x], (64,), group=64) & {"race", "uninitialised"}


def test_calls_of_a_helper_are_told_apart():
    header = "inline float total(float x) { return simd_sum(x); }\n"
    src = f"float x; if (a[{I}] > 15.0f) x = total(a[{I}]); else x = total(2.0f * a[{I}]); out[{I}] = x;"
    assert kinds(src, [mx.arange(32).astype(mx.float32)], (32,), header=header) == {"divergence"}
    same = f"float x = 0.0f; for (int k = 0; k < 9; ++k) x += total(a[{I}]); out[{I}] = x;"
    assert run(same, [mx.ones(32)], (32,), header=header)[3].item() == 9 * 32


def test_problems_point_to_lines():
    src = f"float x = 0.0f;\nx += a[{I}];\nx += a[{I} + 1];\nout[{I}] = x;"
    with pytest.raises(MSLError, match=r"at line \d+ `x \+= a\[.* \+ 1\];`"):
        run(src, [mx.ones(16)], (16,))
    matrix = f"simdgroup_matrix<float, 8, 8> m;\n{SG}\nsimdgroup_load(m, a, 9);\nsimdgroup_store(m, out, 8);"
    with pytest.raises(MSLError, match=r"at line \d+ `simdgroup_load"):
        run(matrix, [mx.ones(64)], (64,), threads=32)


def test_misaligned_inputs():
    src = f"float4 v = ((const device float4*)a)[{I}]; out[{I}] = v.x + v.y + v.z + v.w;"
    assert run(src, [mx.ones(16)], (4,))[0].item() == 4
    with msl.options(misalign=True):
        assert kinds(src, [mx.ones(16)], (4,)) == {"misaligned"}
        assert run(f"out[{I}] = a[{I}];", [mx.ones(16)], (16,))[15].item() == 1


def test_poison_shows_and_checks_can_be_left_out():
    with msl.options(allow_unwritten=True):
        assert np.isnan(run("if (false) out[0] = 0.0f;", [mx.ones(8)], (1,)).item())
    with msl.options(checks=False):
        assert run(f"out[{I}] = a[{I} / 4];", [mx.ones(256)], (1024,))[7].item() == 1


def test_library_runs_text_as_it_stands():
    text = """
    #include <metal_stdlib>
    using namespace metal;
    template <typename T, int N> [[kernel]] void scale(
        device const T* a [[buffer(0)]], device T* b [[buffer(1)]], constant uint& n [[buffer(2)]],
        uint i [[thread_position_in_grid]]) {
      if (i < n) b[i] = a[i] * T(N);
    }
    template [[host_name("scale3")]] [[kernel]] decltype(scale<float, 3>) scale<float, 3>;
    """
    b, n = np.zeros(10, np.float32), np.array([10], np.uint32)
    stats = msl.Library(text).run([np.arange(10, dtype=np.float32), b, n], (16, 1, 1), (16, 1, 1), unset=[1])
    assert (b == 3 * np.arange(10)).all() and stats.accesses == 36
    with pytest.raises(MSLError, match="1025 threads"):
        msl.Library(text).run([b, b.copy(), n], (1025, 1, 1), (1025, 1, 1))


# ---------------------------------------------------------------- bugs put into a kernel

SAMPLE = Path(msl.__file__).parent / "samples"
BODY, HEADER = ((SAMPLE / f"softmax_sum{end}").read_text() for end in (".metal", ".h"))
ROWS, COLUMNS, D, TILE = 3, 300, 64, 128


def softmax_sum(body=BODY, header=HEADER, tile=TILE):
    """Largest error of the sample kernel against float64, relative."""
    rng = np.random.default_rng(3)
    x = rng.normal(-40, 8, size=(ROWS, COLUMNS + 4)).astype(np.float16)
    x[:, :50] -= 30  # the maximum moves after the first tile
    codes, scales = rng.integers(0, 16, (COLUMNS, D)), rng.uniform(0.5, 2, COLUMNS).astype(np.float16)
    words = (codes.reshape(COLUMNS, D // 8, 8).astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(-1)
    params = np.array([COLUMNS, COLUMNS + 4, 0, 0, 0, 0, 0, 0], np.uint32)
    kernel = msl.metal_kernel("softmax_sum", ["x", "v", "v_scale", "params", "scale"], ["out", "stats"], body, header)
    out, stats = kernel(
        inputs=[mx.array(x), mx.array(words.astype(np.uint32)), mx.array(scales), mx.array(params), 0.25],
        template=[("T", mx.float32), ("TILE", tile), ("D", D)],
        grid=(ROWS * TILE, 1, 1),
        threadgroup=(TILE, 1, 1),
        output_shapes=[(ROWS, D), (ROWS, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )
    scores = 0.25 * x[:, :COLUMNS].astype(np.float64)
    p = np.exp2(scores - scores.max(1, keepdims=True))
    want = p @ ((codes - 7.5) * scales[:, None].astype(np.float64)) / p.sum(1, keepdims=True)
    error = np.abs(np.array(out) - want).max() / np.abs(want).max()
    return max(error, np.abs(np.array(stats)[:, 1] / p.sum(1) - 1).max())


@pytest.mark.parametrize("seed", range(5))
def test_sample(seed):
    with msl.options(seed=seed, misalign=True):
        assert softmax_sum() < 1e-5


def nth(text, old, new, n):
    """`text` with the n-th `old` replaced."""
    assert text.count(old) >= n, old
    parts = text.split(old)
    return old.join(parts[:n]) + new + old.join(parts[n:])


HELPER = "constant constexpr"
CODES = "const uint word = v[(start + i) * (D / 8) + tid / 8];"
PAIRS = "const uint2 word2 = *(const device uint2*)(v + (start + i) * (D / 8) + min(tid / 8, D / 8 - 2u)); "
PAIRS += "const uint word = word2.x ^ word2.y;"
# Kind of problem, bug, what is replaced, by what, and which occurrence of it. Of kinds in one string either may be
# reported; "result" is for bugs that only make the numbers wrong.
BUGS = [
    ("race uninitialised", "no barrier after the maxima", TG, "", 1),
    ("race", "no barrier before the sums", TG, "", 2),
    ("race", "no barrier after the sums", TG, "", 3),
    ("race", "no barrier at the end of a tile", TG, "", 4),
    ("race", "barrier without memory", "mem_flags::mem_threadgroup", "mem_flags::mem_none", 2),
    ("race", "barrier of device memory", "mem_flags::mem_threadgroup", "mem_flags::mem_device", 3),
    ("race", "barrier of the simdgroup", "threadgroup_barrier(", "simdgroup_barrier(", 2),
    ("race", "all lanes write the maximum", "if (lane == 0) part[sg] = simd_top;", "part[sg] = simd_top;", 1),
    ("race", "all threads write the state", "if (tid == 0) {", "{", 2),
    ("race", "rows of the output overlap", "out[row * D + tid]", "out[row + tid]", 1),
    ("divergence", "barrier for some threads", TG, f"if (tid < D) {TG}", 4),
    ("divergence", "barrier in both branches", TG, f"if (tid < D) {TG} else\n{TG}", 4),
    ("divergence", "early return", "if (tid < D) acc[tid] = 0.0f;", "if (tid >= D) return;\nacc[tid] = 0.0f;", 1),
    ("divergence", "simd function for some lanes", "= simd_sum(w)", "= live ? simd_sum(w) : 0.0f", 1),
    ("uninitialised", "accumulator not set", "if (tid < D) acc[tid] = 0.0f;", "", 1),
    ("uninitialised", "sum not set", "state[1] = 0.0f;", "", 1),
    ("uninitialised", "one simdgroup left out", "if (lane == 0) part", "if (lane == 0 && sg > 0) part", 1),
    ("undefined-behaviour", "lanes past the simdgroups", "lane < TILE / 32 ? part[lane] : LOWEST", "part[lane]", 1),
    ("undefined-behaviour", "no guard on acc", "if (tid < D) {", "{", 1),
    ("undefined-behaviour", "shift too far", "word >> (4u * k)", "word >> (8u * k)", 1),
    ("undefined-behaviour", "private array index", "tid] * shrink;", "tid] * q[tid];", 1),
    (
        "out-of-bounds",
        "no guard on columns",
        "live ? w * float(v_scale[column]) : 0.0f",
        "w * float(v_scale[column])",
        1,
    ),
    ("out-of-bounds", "no guard on the tail", "min(uint(TILE), n - start)", "uint(TILE)", 1),
    ("out-of-bounds", "wrong row stride", "x[row * stride + column]", "x[row * stride * 2 + column]", 1),
    ("out-of-bounds", "wrong word stride", "(start + i) * (D / 8)", "(start + i) * D", 1),
    ("out-of-bounds", "output row too far", "out[row * D + tid]", "out[(row + 1) * D + tid]", 1),
    ("unwritten-output", "last element not written", "if (tid < D) out[", "if (tid + 1 < D) out[", 1),
    ("unwritten-output", "half of stats not written", "if (tid < 2) stats", "if (tid < 1) stats", 1),
    ("write-to-input", "input written", "const bool live", "((device half*)x)[0] = 0.0h; const bool live", 1),
    ("misaligned", "vector load at odd words", CODES, PAIRS, 1),
    ("threadgroup-memory", "too much of it", "float acc[D];", "float acc[D], more[8192]; more[tid] = 0.0f;", 1),
    ("timeout", "endless loop", "start += TILE", "start += 0 * TILE", 1),
    ("warning", "private variable not set", "float total = state[1] * shrink;", "float total;", 1),
    ("result", "maximum not subtracted", "exp2(score - new_top)", "exp2(score)", 1),
    ("result", "no rescale", "acc[tid] * shrink", "acc[tid]", 1),
    ("result", "maximum starts at 0", "state[0] = LOWEST", "state[0] = 0.0f", 1),
    ("result", "wrong field", "tid % 8)", "tid / 8)", 1),
    (
        "msl-lint",
        "pointer without address space",
        HELPER,
        f"inline float f(const float* p) {{ return *p; }}\n{HELPER}",
        1,
    ),
    ("msl-lint", "constant without address space", HELPER, "constexpr", 1),
    (
        "msl-lint",
        "threadgroup array in a helper",
        HELPER,
        f"inline void f() {{ threadgroup int z; z = 1; }}\n{HELPER}",
        1,
    ),
    ("msl-lint", "double", "const float simd_total", "const double simd_total", 1),
    (
        "type",
        "pointer to another address space",
        "float total = state[1]",
        "const device float* p = state;\nfloat total = p[1]",
        1,
    ),
    ("type", "ambiguous call", "max(old_top, top)", "max(old_top, 0)", 1),
    ("type", "implicit bfloat", "const float simd_top =", "const bfloat simd_top =", 1),
    ("type", "wrong as_type", "float(v_scale[column])", "float(as_type<half>(column))", 1),
]


@pytest.mark.parametrize(("kind", "name", "old", "new", "n"), BUGS, ids=[bug[1] for bug in BUGS])
def test_bug_is_found(kind, name, old, new, n):
    body, header = (BODY, nth(HEADER, old, new, n)) if old not in BODY else (nth(BODY, old, new, n), HEADER)
    if "q[tid]" in new:
        body = body.replace("uint column", "float q[2] = {1.0f, 2.0f};\nconst uint column")
    try:
        with msl.options(timeout=1.0):
            found = {"result"} if not softmax_sum(body, header) < 1e-5 else set()
    except MSLError as error:
        found = error.kinds
    assert found & set(kind.split()), found
