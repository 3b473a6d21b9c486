"""Bugs put into the kernels on purpose: the tests' own checks must catch every one.

Each bug replaces one piece of one file. `probe` then runs what the file takes part in, under the runner, against the
codec and float64 attention; a bug is caught by a problem that the runner reports or by a wrong result.
"""

import mlx.core as mx
import msl
import numpy as np
import pytest
from oracle import attention64, build_rows, decode64, normal, poison_rows, same_bits, to64

import mlx_tq
from mlx_tq import TQFormat, codec, kernels
from mlx_tq.codec import Layout
from mlx_tq.rotation import layer_signs

pytestmark = pytest.mark.skipif(kernels.backend() is not None, reason="the runner finds these, a GPU may not")

BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"

BLOCK = "threadgroup_barrier(mem_flags::mem_threadgroup);"

# file, text, replacement, and which occurrence of the text (from 0).
BUGS = {
    # barriers
    "butterflies of lanes without a difference": ("common.h", "lane & h ? -1.0f : 1.0f", "1.0f", 0),
    "butterflies of registers the other way": ("common.h", "v[n + H / 32] = a - b", "v[n + H / 32] = b - a", 0),
    "neighbours are not added up in lanes": ("encode.h", "v[n] += simd_shuffle_xor", "simd_shuffle_xor", 0),
    "neighbours are not added up in registers": ("encode.h", "v[n] += v[n + H / 32]", "v[n] += 0.0f", 0),
    "sum of another part": ("encode.h", "simd_shuffle(v[m * P / 32], ushort(m * P % 32))", "simd_shuffle(v[0], ushort(0))", 0),
    "no barrier where a row was stored": ("common.h", BARRIER, "", 0),
    "no barrier after mixing": ("common.h", BARRIER, "", 1),
    "no barrier after packing": ("encode.h", BARRIER, "", 0),
    "levels are read before they are written": (
        "attend.metal", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", 0),
    "barrier orders device memory only": ("common.h", "mem_flags::mem_threadgroup", "mem_flags::mem_device", 0),
    "sums overwrite queries that are still read": ("attend.metal", BARRIER + "\nif (lane * CV", "if (lane * CV", 0),
    "queries are read before others rotated them": ("attend.metal", BARRIER, "", 0),
    "means overwrite queries that are still read": ("attend.metal", "  " + BARRIER, "", 0),
    "early return before the barrier": (
        "attend.metal", "if (sg == 0) levels", "if (split >= splits) return;\nif (sg == 0) levels", 0),
    "simdgroups share one scratch row": ("attend.metal", "floats + sg * ROOM;", "floats;", 0),
    "scratch is too small": ("attend.metal", "scratch[NSG * ROOM / 4]", "scratch[NSG * D / 4]", 0),
    "threadgroup memory above 32 KiB": ("attend.metal", "scratch[NSG * ROOM / 4]", "scratch[NSG * R * D * 10]", 0),
    "sketches where the queries are": ("attend.metal", "SKETCHES = R * (D > DV ? D : DV)", "SKETCHES = 0", 0),
    "no room for sketches and means": ("attend.metal", "(QJL ? CENTERED ? 3 : 2 : 1)", "(QJL ? 2 : 1)", 0),
    "means in place of rotated queries that are still read": ("attend.metal", "PLAIN = QJL ? 2 * SKETCHES : 0", "PLAIN = 0", 0),
    # strides and places
    "packed stride of the exact rows": ("attend.metal", "at_packed = size_t(slot) * capacity", "at_packed = slot * exact_capacity", 0),
    "exact stride is the live length": ("attend.metal", "at_exact = size_t(slot) * exact_capacity", "at_exact = slot * n_exact", 0),
    "stride is the live length": ("attend.metal", "at_packed = size_t(slot) * capacity", "at_packed = slot * n_packed", 0),
    "batch is left out of the slot": ("attend.metal", "batch * params[12] + kv_head;", "kv_head;", 0),
    "query head of another group": ("common.h", "(slot * G + row % G) * L", "(slot + row % G) * L", 0),
    "rows of a tile in another order": ("common.h", "* L + row / G;", "* L + row % L;", 0),
    "value scales of the keys": ("attend.metal", "v_scale_at = v_scale + at_packed", "v_scale_at = k_scale + at_packed", 0),
    "third bits of another row": ("tq.h", "next_row<D, 1>(plane, I * R), levels", "plane, levels", 0),
    "values of a neighbouring token": ("tq.h", "weights + weights_of<R>(I)", "weights + weights_of<R>(I ^ 1)", 0),
    "recent exact rows before the packed ones": ("attend.metal", "t < first ? t : n_packed + t);", "t);", 0),
    "padding is not counted": ("attend.metal", "column = pad +", "column =", 0),
    "page of the next block": ("attend.metal", "start / PAGE * D", "(start + 32) / PAGE * D", 0),
    "mean is never renewed": ("attend.metal", "mean_score == LOWEST || start % PAGE == 0", "mean_score == LOWEST", 0),
    "mean of the first block is missing": ("attend.metal", "mean_score == LOWEST || start % PAGE == 0", "start % PAGE == 0", 0),
    "signs of the keys for the values": ("merge.metal", "head / G", "head % G", 0),
    "splits overlap": ("common.h", "(range.coded ? worker :", "(range.coded ? worker / 2 :", 0),
    "last split is cut": ("common.h", "range.end = min(range.begin + share, blocks)", "range.end = min(range.begin + share, blocks - 1)", 0),
    "merge skips the last split": ("merge.metal", "if (s < splits)", "if (s + 1 < splits)", 0),
    "an output coordinate is never written": ("merge.metal", "int i = lane; i < DV; i += 32) {", "int i = lane; i + 1 < DV; i += 32) {", 0),
    "a partial result is never written": ("attend.metal", "int i = lane; i < DV; i += 32) partial", "int i = lane; i + 1 < DV; i += 32) partial", 0),
    "rows past the last are written": ("attend.metal", "r < n_rows; ++r", "r < R; ++r", 0),
    # masks
    "causal off by one": ("common.h", "column <= columns - params[1] + row / G", "column < columns - params[1] + row / G", 0),
    "causal lets one too many through": ("common.h", "column <= columns - params[1] + row / G", "column <= columns - params[1] + 1 + row / G", 0),
    "blocks are skipped too early": ("attend.metal", "> last_seen) break", ">= last_seen) break", 0),
    "tail of the last block is seen": ("attend.metal", "score[i], t < live,", "score[i], t <= live,", 0),
    "mask of the first head": ("common.h", "* size_t(params[9])", "* 0", 0),
    "mask of the first row": ("common.h", "* size_t(params[10])", "* 0", 0),
    "mask read past its end": ("common.h", "min(column, columns - 1)", "(column + 64)", 0),
    "bool mask inverted": ("common.h", "bool(mask[at])", "!bool(mask[at])", 0),
    "additive mask taken for bool": ("common.h", "s += float(mask[at])", "seen = seen && mask[at]", 0),
    "minus infinity counts": ("common.h", "!(s == -INFINITY)", "true", 0),
    # softmax
    "accumulator is not rescaled": ("attend.metal", "fma(acc[r * CV + e], smaller,", "fma(acc[r * CV + e], 1.0f,", 0),
    "sum is not rescaled": ("attend.metal", "denominator *= shrink;", "", 0),
    "maximum starts at zero": ("attend.metal", "top = LOWEST,", "top = 0.0f,", 0),
    "no maximum": ("attend.metal", "max(top, row_max", "max(top, 0.0f * row_max", 0),
    "splits merged without their maximum": ("merge.metal", "weight = exp2(softmax[at] - top)", "weight = 1.0f", 0),
    "natural instead of base 2": ("common.h", "s *= LOG2E;", "", 0),
    "sink is forgotten": ("merge.metal", "SINKS ? exp2", "false ? exp2", 0),
    "sink counted by every simdgroup": ("merge.metal", "denominator += denominators[n]", "denominator += denominators[n] + (SINKS ? exp2(sink - top) : 0.0f)", 0),
    "soft-cap after the mask": ("common.h", "if (SOFTCAP) s = softcap * tanh(s / softcap);", "", 0),
    "accumulator is not initialised": ("attend.metal", "acc[e] = 0.0f;", "", 0),
    # query rows of lanes
    "queries in the order of the rows": ("tq.h", "(r ^ own) * D", "r * D", 0),
    "means in the order of the rows": ("attend.metal", "(r ^ own) * D", "r * D", 0),
    "keys start with another row": ("attend.metal", "k_start = r == int(own)", "k_start = r == 0", 0),
    "sketches start with another row": ("attend.metal", "jl_start = r == int(own)", "jl_start = r == 0", 0),
    "starts of the first chunk": ("tq.h", "ushort(place * C % 32)", "ushort(0)", 0),
    "starts of half of the chunks": ("tq.h", "int w = J * C; w < 32", "int w = J * C; w < 16", 0),
    "every row starts": ("tq.h", "r ? 0.0f : start", "start", 0),
    "offset of the first row": ("attend.metal", "simd_shuffle(offset, ushort(r * J))", "simd_shuffle(offset, ushort(0))", 0),
    "rows swapped with the wrong lane": ("tq.h", "x[r + R / 2], ushort(J * R / 2)", "x[r + R / 2], ushort(J)", 0),
    "shrinkage of the first row": ("attend.metal", "shrink, ushort(r * J)", "shrink, ushort(0)", 0),
    "excess of the first tokens only": ("tq.h", "weights + i, part", "weights, part", 0),
    "weights are read before they are written": ("attend.metal", "  " + BARRIER, "", 2),
    "weights are written before they are read": ("attend.metal", "  " + BARRIER, "", 1),
    "excess is read before it is written": ("tq.h", BARRIER, "", 1),
    "excess overwrites weights in use": ("tq.h", BARRIER, "", 0),
    # decoding
    "swapped halves of a word": ("tq.h", "low = float(pair.x);\n    high = float(pair.y);", "low = float(pair.y);\n    high = float(pair.x);", 0),
    "bits beyond the denormals": ("tq.h", "(W * k >= 8 ? word >> 8 : word)", "word", 0),
    "wrong weight of the third bit": ("tq.h", "up = at + W - k;", "up = at + W - 1 - k;", 0),
    "offset of the codes is off": ("common.h", "((1 << B) - 1) * 0.5f", "((1 << B) - 2) * 0.5f", 0),
    "inner and outer levels swapped": ("tq.h", "inner = levels[2], outer = levels[3]", "inner = levels[3], outer = levels[2]", 0),
    "value levels for the keys": ("attend.metal", "v_plane_at, levels + 16,", "v_plane_at, levels,", 0),
    "butterfly keeps the wrong half": ("tq.h", "keep = upper ? b : a", "keep = upper ? a : b", 0),
    "idle lanes count": ("tq.h", "there ? four[i] : 0.0f", "four[i]", 0),
    "Paley column instead of row": ("common.h", "row >> b & 1u ? other : -other", "row >> b & 1u ? -other : other", 0),
    "residual norm is forgotten": ("attend.metal", "fma(float(k_residual_at[i]), ", "fma(1.0f, ", 0),
    "unset sign bits count 0": ("attend.metal", "? -jl_part : jl_start", "? 0.0f : jl_start", 0),
    "key codes count from 0": ("attend.metal", "? -k_code.offset * part : k_start", "? 0.0f : k_start", 0),
    "value codes count from 0": ("attend.metal", "row_sum<R, J>(excess) * v_code.offset", "0.0f", 0),
    "one unit for all coordinates of queries": ("attend.metal", "DENORMAL>(lane % C), k_factor", "DENORMAL>(0), k_factor", 0),
    "one unit for all coordinates of sketches": ("attend.metal", "DENORMAL>(lane % C);", "DENORMAL>(0);", 0),
    "one unit for all coordinates of values": ("attend.metal", "DENORMAL>(lane % CV)", "DENORMAL>(0)", 0),
    "sketches have the unit of queries": ("attend.metal", "y[i] / k_factor", "y[i]", 0),
    "step of the values is forgotten": ("attend.metal", "consts[3] * v_code.step", "consts[3]", 0),
    "query is not rotated": ("attend.metal", "if (!coded || KB == RAW) continue;", "continue;", 0),
    "exact rows get a rotated query": ("attend.metal", "if (!coded || KB == RAW) continue;", "", 0),
    "means get a rotated query": ("attend.metal", "if (CENTERED && coded) {", "if (false) {", 0),
    "a weight of another split": ("merge.metal", "weights[sg * 32 + k]", "weights[sg * 32 + (k ^ 1)]", 0),
    "exact rows are left out": ("common.h", "tokens.exact = row[1] + row[3]", "tokens.exact = row[3]", 0),
    "exact rows are dealt out twice": ("attend_mma.metal", "block = coded_end", "block = coded_end / 2", 0),
    "blocks are dealt out twice": ("common.h", "worker - tokens.coders) * share", "worker - tokens.coders) * (share - 1)", 0),
    "result is not rotated back": ("attend.metal", "rotate_row_back<DV>(y, v_signs, v_mix, consts[3] * v_code.step, lane);", "", 0),
    "exact rows are rotated back": ("attend.metal", "if (coded && VB != RAW) {\n    for", "if (VB != RAW) {\n    for", 0),
    "sums are rotated back before all are there": ("attend.metal", BARRIER + "\n#pragma unroll 1\nfor (int r = 0; r < n_rows", "for (int r = 0; r < n_rows", 0),
    "pointer without an address space": ("tq.h", "thread const float* a, thread", "const float* a, thread", 0),
    "no barrier before shares are added": ("merge.metal", "threadgroup_barrier(mem_flags::mem_threadgroup);", "", 0),
    # matrix units
    "queries are read before they are rotated": ("attend_mma.metal", BLOCK, "", 0),
    "sums overwrite fragments in use": ("attend_mma.metal", BLOCK, "", 1),
    "sums are read before they are written": ("attend_mma.metal", BLOCK, "", 2),
    "sums of codes overwrite sums in use": ("attend_mma.metal", BLOCK, "", 3),
    "sums are rotated back before they are written": ("attend_mma.metal", BLOCK, "", 4),
    "sums are read before they are rotated back": ("attend_mma.metal", BLOCK, "", 5),
    "sums of exact rows are rotated back": ("attend_mma.metal", "(m < coders ? coded_sum[n] : exact_sum[n])", "coded_sum[n]", 0),
    "unit of the rotated query": ("attend_mma.metal", "score[i] * plain_unit[column]", "score[i] * row_unit[column]", 0),
    "room for the sums only": ("attend_mma.metal", "QUERIES > SUMS ? QUERIES : SUMS", "SUMS / 4", 0),
    "unit of another row": ("attend_mma.metal", "row_unit[4 * s + t]", "row_unit[4 * s + (t ^ 1)]", 0),
    "keys of the same block again": ("attend_mma.metal", "k_rows += step * (32 * K_ROW);", "", 0),
    "values of the same block again": ("attend_mma.metal", "v_rows += step * (32 * V_ROW);", "", 0),
    "scales of the same block again": ("attend_mma.metal", "v_scales += step * 64;", "", 0),
    "blocks past the last are read": ("attend_mma.metal", "min(1, coded_end - 1 - block)", "20000", 0),
    "mean of the first page only": ("attend_mma.metal", "mean_scores[at * R", "mean_scores[0 * R", 0),
    "mean of the first block only": ("attend_mma.metal", "(block == begin || uint(start) % PAGE == 0)", "block == begin", 0),
    "queries have one byte": ("attend_mma.metal", "to[4] = as_type<float>(low);", "to[4] = 0.0f;", 0),
    "higher byte of a query is not rounded": ("attend_mma.metal", "(whole + 128) >> 8", "whole >> 8", 0),
    "higher fields of keys are not larger": ("attend_mma.metal", "16 * low[2 * i] + high[2 * i]", "low[2 * i] + high[2 * i]", 0),
    "sums keep the old unit": ("mma.h", "* smaller, high = rint", ", high = rint", 0),
    "sums of weights keep the old unit": ("mma.h", "float(total[s]) * smaller", "float(total[s])", 0),
    "sums of digits lose the lower one": ("mma.h", "int(rint(fma(-256.0f, high, sum)))", "0", 0),
    "the unit keeps the old maximum": ("mma.h", "gain[s] / shrink[s]", "gain[s]", 0),
    "accumulators keep the old maximum": ("attend_mma.metal", "acc[i] *= shrink[i / (TILES * 4)];", "", 0),
    "weights stay beyond 16 bits": ("mma.h", "* gain[s] > MOST_WEIGHT", "* gain[s] > 4 * MOST_WEIGHT", 0),
    "weights are not weighed again": ("attend_mma.metal", "weigh<S, MASK>(score, factor, top, gain, weight, sums);\n", "", 0),
    "weights are not transposed": ("attend_mma.metal", "transpose_8x8(weights[i])", "weights[i]", 0),
    "tokens of weights in another order": ("mma.h", "0x4051", "0x0415", 0),
    "tokens of values in another order": ("mma.h", "i / 4 * 2 + i / 2 % 2 * 4 + i % 2", "i", 0),
    "third bit one place off": ("mma.h", "third << (2 - w % 2)", "third << (1 - w % 2)", 0),
    "halves of words swapped": ("mma.h", "upper ? 0x7632", "!upper ? 0x7632", 0),
    "offset of the values is forgotten": ("attend_mma.metal", "* code_offset<VB, false>();", "* 0.0f;", 0),
    "values keep the fields below them": ("attend_mma.metal", "field ? sums[-2] : 0", "0", 0),
    "exact keys past the live ones": ("attend_mma.metal", "min(token + 8, n_exact - 1)", "(token + 200)", 0),
    "rows past the last are written too": ("attend_mma.metal", "if (row < rows_here) partial", "partial", 0),
    "denominator of some tokens": ("attend_mma.metal", "denominator[s] = over_tokens_sum(denominator[s]);", "", 0),
    "a gap on one side": ("attend_mma.metal", "d + d / CV", "d", 0),
    "blocks are dropped too early": ("attend_mma.metal", "> last_seen) break", ">= last_seen) break", 0),
    "a simdgroup reads a block twice": ("attend_mma.metal", "block = begin; block", "block = max(0, begin - 1); block", 0),
    # encoding
    "ties go down": ("encode.h", "unit[n] >= table[16 + b]", "unit[n] > table[16 + b]", 0),
    "codes are not clamped": ("encode.h", "clamp(int(floor(x)) + (1 << (B - 1)), 0, (1 << B) - 1)", "int(floor(x)) + (1 << (B - 1))", 0),
    "the first step always": ("encode.h", "if (cosine > best) {", "if (c == 0) {", 0),
    "the last step of equals": ("encode.h", "if (cosine > best) {", "if (cosine >= best * 0.999f) {", 0),
    "norms are not rounded first": ("encode.h", "const float x = round12(unit[n]);", "const float x = unit[n];", 0),
    "plane shifted": ("encode.h", "float(code[n] >> 2)", "float(code[n] >> 1)", 0),
    "scale of the sketch": ("encode.h", "LLOYD ? residual : residual / step", "residual / step + 1.0f", 0),
    "sketch sign of zero": ("encode.h", "unit[n] >= 0.0f ? 1.0f", "unit[n] > 0.5f ? 1.0f", 0),
    "mean of the wrong page": ("encode.metal", "row % L / PAGE", "0", 0),
    "mean is added": ("encode.metal", "- (CENTERED", "+ (CENTERED", 0),
    "float16 overflows": ("common.h", "T(isfinite(x) ? min(max(x, -top), top) : x)", "T(x)", 0),
    "not finite becomes zero": ("encode.h", "finite ? 0.0f : NAN", "0.0f", 0),
    "values with the keys' words": ("encode.metal", "v_words + size_t(row) * encoded_words(DV, VB, false)", "v_words + size_t(row) * encoded_words(D, KB, QJL)", 0),
    "rotation is not normalised": ("common.h", "v[n] *= norm;", "v[n] *= 1.0f;", 0),
    "means of half a page": ("encode.h", "page_sum<N / 2, D>(x) + page_sum<N / 2, D>(x + N / 2 * D)", "page_sum<N / 2, D>(x) * 2.0f", 0),
    "a coordinate without a mean": ("means.metal", "if (at >= n_means)", "if (at + 1 >= n_means)", 0),
    "means past the last one": ("means.metal", "if (at >= n_means) return;", "", 0),
    "means of other tokens": ("means.metal", "* room + first + page", "* room + page", 0),
    "means of other heads": ("means.metal", "size_t(page / pages) * room", "size_t(page / pages) * (pages * PAGE)", 0),
    "codes of other tokens": ("encode.metal", "* room + first + row", "* room + row", 0),
    "codes of other heads": ("encode.metal", "size_t(row / L) * room", "size_t(row / L) * L", 0),
    "dense rows without spare ones": ("decode.metal", "column < columns ? column - tokens.pad : -1", "column - tokens.pad", 0),
    "dense rows keep their rotation": ("decode.metal", "if (KB != RAW) rotate_held_back", "if (false) rotate_held_back", 0),
    "dense means are forgotten": ("decode.metal", "CENTERED && holds", "false && holds", 0),
    "dense padding is not zero": ("decode.metal", "else if (token >= 0)", "else", 0),
    "dense values with key scales": ("decode.metal", "float(v_scale[at])", "float(k_scale[at])", 0),
    "dense page is off": ("decode.metal", "place / PAGE", "(place + 1) / PAGE", 0),
}  # fmt: skip

LLOYD = TQFormat(2, 4, codebook="lloyd", centered_keys=True, page=64)
TQ3 = TQFormat.preset("tq3", page=32)
CENTERED_TQ3 = TQFormat.preset("tq3", page=32, centered_keys=True)
MIXED = TQFormat(3, 2, page=32)
DEFAULT = TQFormat(page=32)


def cached(format, dim, value_dim=None, packed=96):
    """Poisoned keys and values of two unlike batch rows."""
    counts = (195, 58 + packed)
    layout = Layout((0, counts[0] - counts[1]), (2, 1), (160, packed), (33, 57))
    make = lambda kind, d, s: poison_rows(  # noqa: E731
        build_rows(kind, [normal(s + b, 1, 2, n, d, factor=2) for b, n in enumerate(counts)], format, layout), 1
    )
    return make("keys", dim, 1), make("values", value_dim or dim, 5)


def attend(format, dim, length, bound=4e-6, factor=1.0, shift=0.0, value_dim=None, n_heads=4, packed=96, **options):
    keys, values = cached(format, dim, value_dim, packed)
    q = normal(9, 2, n_heads, length, dim, factor=factor)
    if shift:  # every key has a large constant component: all scores far below zero
        u = mx.ones((dim,)) * dim**-0.5
        layout = Layout((0, 0), (2, 2), (160, 160), (33, 33))
        parts = [normal(b, 1, 2, 195, dim) + 40 * u for b in range(2)]
        keys = poison_rows(build_rows("keys", parts, format, layout), 1)
        values = poison_rows(build_rows("values", [normal(b, 1, 2, 195, dim) for b in range(2)], format, layout), 1)
        q = q - shift * u
    got = to64(mlx_tq.attention(q, keys, values, scale=dim**-0.5, **options))
    want = attention64(q, decode64(keys), decode64(values), dim**-0.5, pad=keys.layout.pad, **options)
    return np.isfinite(got).all() and np.abs(got - want).max() < bound * max(1, factor, shift)


def attend_mma(format, length, factor=1.0, **options):
    """Scores that grow along the sequence, and scales of the values too."""
    layout = Layout((0, 41), (2, 1), (640, 576), (33, 57))
    grow = [mx.arange(1, n + 1)[:, None] / n for n in (675, 634)]
    make = lambda kind, s: poison_rows(  # noqa: E731
        build_rows(
            kind, [(normal(s + b, 1, 2, len(g), 64) * g).astype(mx.float16) for b, g in enumerate(grow)], format, layout
        )
    )
    keys, values, q = make("keys", 1), make("values", 5), normal(9, 2, 4, length, 64, dtype=mx.float16, factor=factor)
    got = to64(mlx_tq.attention(q, keys, values, scale=0.125, **options))
    want = attention64(q, decode64(keys), decode64(values), 0.125, pad=keys.layout.pad, **options)
    return np.isfinite(got).all() and np.abs(got - want).max() < 2e-3


def encode(format, dim, value_dim, dtype):
    x = [np.random.default_rng(d).standard_normal((2, 2, 70, d)).astype(np.float32) for d in (dim, value_dim)]
    for a in x:
        a[0, 0, 0], a[0, 0, 1], a[0, 0, 2, 3], a[0, 1, 3] = 0, 3000, np.inf, np.eye(a.shape[3])[5] * 50000
    s = layer_signs(42, 3, dim)[0]
    x[0][1, 1, 4] = np.array(s) * 9000  # rotates to one coordinate beyond float16
    k, v = (mx.array(a).astype(dtype) for a in x)
    k_signs, v_signs = (layer_signs(format.seed, 3, d) for d in (dim, value_dim))
    mean = codec.page_means(k, format.page) if format.centered_keys else None
    want = *codec.quantise(k, format, "keys", k_signs, mean), *codec.quantise(v, format, "values", v_signs)
    got = kernels.encode(k, v, mean, format, 3)
    zero = lambda a: a if a.dtype == mx.uint32 else mx.where(mx.isnan(a), -1, a)  # noqa: E731
    pairs = zip((*got[0], *got[1]), want, strict=True)
    return all(same_bits(zero(a), zero(b)) for a, b in pairs if b is not None)


def encode_pages(dtype):
    format, k = TQFormat(centered_keys=True, page=32), normal(1, 1, 3, 100, 48, dtype=dtype)
    some = mx.contiguous(k[:, :, 5:69])
    want = kernels.encode(some, some, codec.page_means(some, format.page), format, 3)
    made = kernels.encode(some, some, None, format, 3), kernels.encode(k, k, None, format, 3, (5, 69))
    same = lambda a, b: a is b is None or same_bits(a, b)  # noqa: E731
    return all(same(*pair) for got in made for rows in zip(got, want, strict=True) for pair in zip(*rows, strict=True))


def dense(format, dim):
    keys, values = cached(format, dim)
    pairs = zip(kernels.decode(keys, values, 128), (keys, values), strict=True)
    return all(np.abs(to64(got) - decode64(rows)).max() < 2e-5 for got, rows in pairs)


def bool_mask(*shape):
    return mx.array(np.random.default_rng(3).random(shape) < 0.6)


def additive(*shape):
    x = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    x[..., 0:40] = -np.inf
    x[:, 1, 0] = -np.inf  # a query that sees nothing
    return mx.array(x)


def probes(file):
    """Runs until one of them fails; yields whether the result was right."""
    if file in ("means.metal", "encode.metal", "encode.h"):
        yield encode_pages(mx.bfloat16)
    if file in ("encode.metal", "encode.h", "common.h"):
        yield encode(MIXED, 64, 64, mx.float16)
        yield encode(TQ3, 64, 80, mx.float16)
        yield encode(LLOYD, 80, 64, mx.float32)
        yield encode(TQFormat(4, 4, qjl=True, page=32), 64, 64, mx.float32)
    if file in ("attend.metal", "merge.metal", "tq.h", "common.h"):
        yield attend(DEFAULT, 64, 6, mask="causal")
        yield attend(TQ3, 64, 1, mask=bool_mask(2, 4, 1, 195))
        yield attend(MIXED, 80, 2, mask=additive(1, 4, 2, 195), value_dim=64)
        yield attend(LLOYD, 64, 3, mask=bool_mask(1, 4, 3, 195), sinks=mx.array([5.0, -3.0, 0.0, 2.0]))
        yield attend(DEFAULT, 64, 1, factor=30.0, softcap=9.0)
        yield attend(MIXED, 64, 1, shift=60.0)
        yield attend(DEFAULT, 64, 1, factor=20.0)
        yield attend(DEFAULT, 64, 1, sinks=mx.array([90.0, 80.0, 70.0, 60.0]))
        yield attend(DEFAULT, 64, 3, n_heads=2)
        yield attend(LLOYD, 64, 5)
        yield attend(DEFAULT, 64, 1, packed=0)  # simdgroups without tokens
        yield attend(TQ3, 80, 1)
        yield attend(TQ3, 64, 2)
        yield attend(CENTERED_TQ3, 64, 2)
    if file in ("attend_mma.metal", "mma.h"):
        yield attend_mma(DEFAULT, 3, mask="causal")
        yield attend_mma(TQFormat(3, 3, centered_keys=True, page=32), 1, factor=4.0)
        yield attend_mma(DEFAULT, 100, mask="causal")
    if file == "decode.metal":
        yield dense(TQ3, 64)
        yield dense(LLOYD, 80)


def caught(file) -> str:
    """What catches a bug in the kernels as they are now, or "" where nothing does."""
    try:
        return "" if all(probes(file)) else "wrong result"
    except msl.MSLError as error:
        return ", ".join(sorted(error.kinds))


@pytest.fixture
def few_splits(monkeypatch):
    """Few splits, so that a simdgroup has several blocks and the merge several parts."""
    monkeypatch.setattr(kernels, "_WANTED_ITEMS", {"metal": 36})
    monkeypatch.setattr(kernels, "_MULTIPROCESSORS", 0)
    monkeypatch.setattr(kernels, "_DENSE_ROWS", 1 << 30)
    monkeypatch.setattr(kernels, "_has_mma", lambda device: True)
    kernels.forget_launches()
    yield
    kernels.forget_launches()


@pytest.mark.parametrize("file", ("means.metal", "encode.metal", "attend.metal", "attend_mma.metal", "decode.metal"))
def test_the_kernels_as_they_are_pass(fused_kernels, few_splits, file):
    assert caught(file) == ""


@pytest.mark.parametrize("name", BUGS)
def test_every_bug_is_caught(fused_kernels, few_splits, monkeypatch, name):
    file, old, new, which = BUGS[name]
    real = kernels.text

    def text(wanted):
        whole = real(wanted)
        if wanted != file:
            return whole
        at = -1
        for _ in range(which + 1):
            at = whole.index(old, at + 1)
        return whole[:at] + new + whole[at + len(old) :]

    monkeypatch.setattr(kernels, "text", text)
    kernels._kernel.cache_clear()
    assert caught(file), f"nothing notices: {name}"
