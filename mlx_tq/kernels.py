"""Registers the kernels in `kernels/` and launches them on packed rows.

The same text runs through `mx.fast.metal_kernel` and, with `cuda.h` in front, through `mx.fast.cuda_kernel`. Each
kernel is built once; lengths are inputs, so no kernel is compiled again as a cache grows. `kernels/README.md` lists the
buffers. Everything a kernel takes for granted is checked here before it is launched.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import count, product
from math import prod
from operator import add
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from . import codec
from .codebook import STEP_CHOICES, uniform_steps
from .codec import ROW_BLOCK, Layout, PackedRows
from .format import RAW_BITS, TQFormat
from .packing import Regions, field_width, region_shapes, words
from .rotation import layer_signs, paley, split_dim

NSG = 4  # simdgroups of a threadgroup
_THREADGROUP_BYTES = 32 << 10
_MAX_DIM = 512
_MAX_SPLITS = 512
# Scores of one launch: about half a second on the smallest Apple GPUs, which stop a command that runs for seconds.
_MAX_SCORES = 1 << 31
# Simdgroups that keep a device busy, by back end.
_WANTED_ITEMS = {"metal": 1024, "cuda": 4096}
# Widths that attend_mma.metal takes, with how many of its threadgroups of 4 query rows, and of 8, a multiprocessor has
# registers for, and multiprocessors of large GPUs. Of the widest rows 8 queries do not fit registers.
_MMA_RESIDENT = {64: (4, 3), 128: (3, 2), 256: (2,)}
_MULTIPROCESSORS = 132
# From so many blocks in all on, as many threadgroups as fit share them. Below, each multiprocessor has one at least:
# each more would rotate the queries again and leave `merge` more to read.
_MMA_MANY_BLOCKS = 65536
# Packed blocks that one of its simdgroups may read: sums of products of two bytes then fit 32 bits.
_MMA_SHARE = 1024
# What a block of exact tokens takes, in packed blocks.
_EXACT_COST = {"attend": 3, "attend_mma": 2}
# From so many query rows to a KV head on, where MLX's own attention has kernels for the width, rows are decoded first.
_DENSE_ROWS = 192
_DENSE_DIMS = (64, 80, 128)
# Bytes decoded at a time: the first figure, or up to the second until as many query rows as keep a device busy share
# them. MLX's attention has threadgroups of 128 rows on CUDA and of 32 on Metal, each of which reads all keys: with
# fewer rows than the first figure their way through the keys takes longer than the kernels here.
_DENSE_BYTES = (32 << 20, 256 << 20)
_DENSE_QUERIES = {"metal": (512, 4096), "cuda": (1536, 16384)}
_MIN_ELEMENTS = 8  # MLX hands smaller inputs over in another address space


_ROWS = "k_codes k_plane k_jl k_scale k_residual k_mean k_exact v_codes v_plane v_scale v_exact"
_INPUTS = {
    "attend": f"query {_ROWS} mask k_signs k_jl_signs k_mix v_signs v_mix params consts",
    "merge": "partial sinks params consts",
    "means": "keys params",
    "encode": "keys values k_mean k_signs k_jl_signs k_mix v_signs v_mix k_table v_table params consts",
    "decode": f"{_ROWS} k_signs k_jl_signs k_mix v_signs v_mix params consts",
}
_INPUTS["attend_mma"] = _INPUTS["attend"]
_HEADERS = {
    "attend": "common.h tq.h",
    "attend_mma": "common.h mma.h",
    "merge": "common.h",
    "means": "common.h encode.h",
    "encode": "common.h encode.h",
    "decode": "common.h tq.h",
}
_OUTPUTS = {
    "attend": "partial",
    "attend_mma": "partial",
    "merge": "out",
    "means": "k_mean",
    "encode": "k_words k_scales v_words v_scales",
    "decode": "k_dense v_dense",
}


def path(name: str) -> Path:
    """A file of `kernels/`, of the installed package or the checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels", here.parent / "kernels"):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"kernel text {name!r} is missing beside {here}: reinstall mlx-tq")


def text(name: str) -> str:
    """The text of a file of `kernels/`."""
    return path(name).read_text(encoding="utf-8")


def header(name: str) -> str:
    """The text in front of a kernel's body."""
    return "".join(map(text, _HEADERS[name].split()))


def backend() -> str | None:
    """ "metal" or "cuda" where MLX would run on such a device now, else None."""
    if mx.default_device().type == mx.gpu:
        if mx.metal.is_available():
            return "metal"
        if mx.cuda.is_available():
            return "cuda"
    return None


def without_comments(source: str) -> str:
    """The text without comments and indentation: MLX compares all of it at every launch."""
    lines = (line.split("//")[0].strip() for line in source.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def _included(*names: str) -> str:
    """Lines that include files of `kernels/`: the CUDA back end hashes all text at every launch, so it gets no more."""
    return "".join(f'#include "{path(name).as_posix()}"\n' for name in names)


@cache
def _kernel(name: str, backend: str):
    body, heads = f"{name}.metal", _HEADERS[name].split()
    if backend == "cuda":
        make, source, head = mx.fast.cuda_kernel, _included(body), _included("cuda.h", *heads)
    else:
        make, source, head = mx.fast.metal_kernel, without_comments(text(body)), without_comments(header(name))
    return make(
        name=f"tq_{name}",
        input_names=_INPUTS[name].split(),
        output_names=_OUTPUTS[name].split(),
        source=source,
        header=head,
    )


# ------------------------------------------------------------------ small inputs, made once


def _evaluated(array: mx.array) -> mx.array:
    mx.eval(array)
    return array


@cache
def _nothing(dtype: mx.Dtype = mx.uint32) -> mx.array:
    return _evaluated(mx.zeros(_MIN_ELEMENTS, dtype))


@cache
def mix_rows(dim: int) -> mx.array:
    """Rows of the Paley matrix of `dim` as bits, bit b set where column b is +1; uint32."""
    matrix = paley(split_dim(dim)[0])
    rows = ((matrix > 0).astype(np.uint64) << np.arange(len(matrix), dtype=np.uint64)).sum(axis=1)
    return _evaluated(mx.array(np.resize(rows, max(len(rows), _MIN_ELEMENTS)).astype(np.uint32)))


@lru_cache(maxsize=64)
def code_table(format: TQFormat, kind: str, dim: int) -> mx.array:
    """Constants of the quantiser, float32 `(48,)`.

    Uniform: 1 / step from 0, step from 6, the resolution of the choice at 12.
    Lloyd-Max: levels from 0, boundaries from 16, squared levels from 32.
    """
    table, bits = np.zeros(48, np.float32), format.bits(kind)
    if bits != RAW_BITS and format.codebook == "uniform":
        steps = np.array(uniform_steps(bits, dim))
        table[: len(steps)], table[6 : 6 + len(steps)] = 1 / steps, steps
        table[12] = codec.STEP_GRID * dim**0.5
    elif bits != RAW_BITS:
        for start, values in zip((0, 16, 32), codec.lloyd_tables(bits, dim), strict=True):
            table[start : start + len(values)] = values
    return _evaluated(mx.array(table))


@lru_cache(maxsize=256)
def _consts(format: TQFormat, dim: int, value_dim: int, dtypes: tuple, scale: float, softcap: float | None) -> mx.array:
    """Floats that kernels read: see `consts` in kernels/README.md."""
    out = np.zeros(40, np.float32)
    top = {mx.float16: 65504.0}
    out[0] = scale
    out[1] = softcap or 0
    out[2] = format.kappa_value(dim) * dim**-0.5
    out[3], out[4] = value_dim**-0.5, dim**-0.5
    out[5], out[7] = (top.get(dtype, 3.38e38) for dtype in dtypes)
    out[6] = top.get(getattr(mx, format.scale_dtype), 3.38e38)
    if format.codebook == "lloyd":
        for start, kind, width in ((8, "keys", dim), (24, "values", value_dim)):
            if format.bits(kind) != RAW_BITS:
                levels = codec.lloyd_tables(format.bits(kind), width)[0]
                out[start : start + len(levels)] = levels
    return _evaluated(mx.array(out))


# Steps whose params are made at once: to a GPU of NVIDIA each array that the processor writes is a page that migrates.
_STEPS_AHEAD = 32


def _params(step: bool, ints, layout: Layout, *args) -> mx.array:
    """ints(layout, *args) for a kernel; for a single step as a row of the array that has those of the next ones too."""
    if not step:
        return mx.array(ints(layout, *args), mx.int32)
    done = layout.recent[0] % _STEPS_AHEAD
    return _params_ahead(ints, _later(layout, -done), *args)[done]


@lru_cache(maxsize=64)
def _params_ahead(ints, layout: Layout, *args) -> mx.array:
    return mx.array([ints(_later(layout, n), *args) for n in range(_STEPS_AHEAD)], mx.int32)


def _later(layout: Layout, steps: int) -> Layout:
    return layout._replace(recent=tuple([n + steps for n in layout.recent]))


def _token_ints(layout: Layout, workers: int, cost: int, share: int) -> list[int]:
    """Where the tokens of each batch row are and who reads them, see `params` in kernels/README.md."""
    out = []
    for pad, first, packed, recent in zip(*layout, strict=True):
        out += (pad, first, packed, recent, *_deal(packed, first + recent, workers, cost, share), 0)
    return out


def _deal(packed: int, exact: int, workers: int, cost: int, most: int) -> tuple[int, int, int]:
    """How workers, each of which reads tokens of one kind, share so many packed and exact tokens.

    A block of exact tokens takes as long as `cost` packed ones, and a worker may read `most` packed ones. Returns how
    many workers read packed blocks, packed blocks of each of them, and exact blocks of each of the others. Tokens of
    both kinds need two workers.
    """
    packed, exact = (-(-n // ROW_BLOCK) for n in (packed, exact))
    others = round(workers * cost * exact / max(1, packed + cost * exact))
    others = min(max(others, exact > 0), max(1, exact), workers - -(-packed // most))
    coders = workers - others
    return coders, -(-packed // max(1, coders)), -(-exact // max(1, others))


def _padded(array: mx.array) -> mx.array:
    flat = array.reshape(-1)
    return mx.pad(flat, (0, _MIN_ELEMENTS - flat.size)) if flat.size < _MIN_ELEMENTS else array


# ------------------------------------------------------------------ what can run


@cache
def dim_reason(dim: int, name: str = "head_dim") -> str | None:
    """Why the kernels do not take rows of this width, or None."""
    m, _ = split_dim(dim)
    if dim % (32 if dim > 256 else 16):
        return f"{name} {dim} is not a multiple of {32 if dim > 256 else 16}"
    if dim > _MAX_DIM:
        return f"{name} {dim} is above {_MAX_DIM}"
    if m > 32:
        return f"{name} {dim} needs a Hadamard matrix of order {m}, the kernels know 12, 20 and 28"
    return None


def reason(dim: int, value_dim: int) -> str | None:
    """Why rows of these widths go through MLX ops here, or None where the kernels run."""
    device = backend()
    if device is None:
        return f"the default device is {mx.default_device().type.name}, the kernels need a Metal or CUDA GPU"
    return dim_reason(dim) or dim_reason(value_dim, "value head_dim") or self_test(device).problem


class SelfTest:
    """Outcome of the self test of a back end: `problem` is None where the kernels gave the right numbers.

    denormal: whether codes may be read as float16 denormals; mma: whether attend_mma.metal may run where it can.
    """

    def __init__(
        self, problem: str | None, denormal: bool, error: float | None, running: bool = False, mma: bool = True
    ):
        self.problem, self.denormal, self.error, self.running, self.mma = problem, denormal, error, running, mma


# A float16 result may be off by so much less, compared with a float32 one.
_SHORT_WEIGHT = 0.02
_tests: dict[str, SelfTest] = {}
_test_lock = threading.RLock()


def self_test(device: str) -> SelfTest:
    """Compiles the kernels and compares a small case with MLX ops, once per process.

    Reading codes as float16 denormals needs a GPU that keeps them; where that fails the kernels convert integers
    instead, and where both fail they do without matrix units. Where all fails, a warning says so and everything runs on
    MLX ops.
    """
    test = _tests.get(device)
    if test is not None and not test.running:
        return test
    with _test_lock:
        if device not in _tests:
            problem = None
            for mma, denormal in product((True, False) if _has_mma(device) else (True,), (True, False)):
                _tests[device] = SelfTest(None, denormal, None, True, mma)  # what the launches below will see
                try:
                    error = _self_test_error(device)
                    problem = None if error < 1e-4 else f"the self test is off by {error:.3g}"
                except Exception as failure:  # a compiler or driver error of any kind: report it, use ops
                    error, problem = None, f"the self test failed: {failure}"
                if problem is None:
                    break
            _tests[device] = SelfTest(problem, denormal, error, mma=mma)
            _last_calls.clear()  # of kernels that failed, maybe
            if problem is not None:
                warnings.warn(f"mlx-tq uses MLX ops, not its {device} kernels: {problem}", RuntimeWarning, stacklevel=2)
        return _tests[device]


def _self_test_error(device: str) -> float:
    """Largest difference between kernels and MLX ops on the CPU, relative to the largest value.

    Covers encoding, and attention to packed and to exact tokens. Encoded bits may differ where a device rounds a
    division in another way: a few codes off by one are no fault, so rows count only if they decode to something else.
    """
    from .attention import ops_attention

    rng = np.random.default_rng(1)
    k, v = (mx.array(rng.standard_normal((1, 2, 96, 64)), mx.float32) for _ in range(2))
    q = mx.array(rng.standard_normal((1, 4, 1, 64)), mx.float32)
    layout = Layout.uniform(1, 2, 70, 9)
    errors = []
    for format in (TQFormat(centered_keys=True, page=32), TQFormat(key_bits=3, value_bits=2)):
        signs = layer_signs(format.seed, 0, 64)
        pairs = (("keys", k), ("values", v))
        with mx.stream(mx.cpu):
            means = {"keys": codec.page_means(k, format.page) if format.centered_keys else None, "values": None}
            mx.eval(*(mean for mean in means.values() if mean is not None))
        mine = encode(k, v, None, format, 0)
        mx.eval([a for regions in mine for a in regions if a is not None])
        with mx.stream(mx.cpu):
            theirs = [codec.quantise(x, format, kind, signs, means[kind]) for kind, x in pairs]
            for (kind, _), a, b in zip(pairs, mine, theirs, strict=True):
                got, want = (codec.decode_regions(regions, format, kind, 64, signs) for regions in (a, b))
                drift = (mx.linalg.norm(got - want) / mx.linalg.norm(want)).item()
                errors.append(0.0 if drift < 0.02 else drift)
            rows = [
                PackedRows(kind, format, 64, 0, mx.float32, regions, mx.contiguous(x[:, :, 50:61]), layout, 2)
                for (kind, x), regions in zip(pairs, theirs, strict=True)
            ]
            want = ops_attention(q, *rows, 0.125, None, None, None)
            mx.eval(want, [a for r in rows for a in (*r.regions, r.exact) if a is not None])
        got = {mx.float32: attend(q, *rows, 0.125, None, None, None)}
        if _has_mma(device):
            short = [_in_float16(r) for r in rows]
            got[mx.float16] = attend(q.astype(mx.float16), *short, 0.125, None, None, None).astype(mx.float32)
        mx.eval(*got.values())
        with mx.stream(mx.cpu):
            for dtype, out in got.items():
                error = mx.max(mx.abs(out - want)) / mx.max(mx.abs(want))
                errors.append(error.item() * (1 if dtype == mx.float32 else _SHORT_WEIGHT))
    return float(np.max(errors))  # NaN if any is


def _in_float16(rows: PackedRows) -> PackedRows:
    mean = rows.regions.mean
    regions = rows.regions if mean is None else rows.regions._replace(mean=mean.astype(mx.float16))
    return replace(rows, dtype=mx.float16, regions=regions, exact=rows.exact.astype(mx.float16))


# ------------------------------------------------------------------ launches

# All of a launch but its arrays is prepared once, for all layers of a model and for each step again. That also gives
# them one array of the numbers that change from step to step: on NVIDIA GPUs each new one that the processor writes
# costs a migration of its page.
_prepared_once = lru_cache(maxsize=512)


class _Launch(NamedTuple):
    """All of a launch but its inputs."""

    name: str
    template: tuple[tuple[str, int | bool | mx.Dtype], ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]
    grid: tuple[int, int, int]  # from `_grid`
    device: str


def _launch(launch: _Launch, inputs: Iterable[mx.array]) -> list[mx.array]:
    """Runs a kernel; returns its outputs."""
    return _kernel(launch.name, launch.device)(
        inputs=list(inputs),
        template=list(launch.template),
        grid=launch.grid,
        threadgroup=(NSG * 32, 1, 1),
        output_shapes=list(launch.shapes),
        output_dtypes=list(launch.dtypes),
    )


_last_stream: tuple[mx.Stream | None, str] = None, ""


def _stream() -> str:
    """Names the stream that MLX would run on now. Graphs keep theirs, so each stream has its own."""
    global _last_stream
    stream, (last, name) = mx.default_stream(mx.default_device()), _last_stream
    if last is None or stream != last:  # equal streams have unlike hashes, so the name is what is looked up
        name = repr(stream)
        _last_stream = stream, name
    return name


_serial = count()


def _graph(function):
    """`function` of arrays as a graph that MLX replays: building it anew would copy the kernels' text each time.

    MLX knows a compiled function by its address, also when it is gone: the number tells it from its successors.
    """
    return partial(mx.compile(lambda _, *arrays: function(*arrays)), next(_serial))


def _with_constants(launch: _Launch, given: tuple[str, ...], constants: dict[str, mx.array]):
    """A launch as a function of its inputs `given`; the others are the same in every call, which saves a call time."""

    def run(*arrays):
        inputs = constants | dict(zip(given, arrays, strict=True))
        inputs.setdefault("v_signs", inputs.get("k_signs"))  # not given where they are the keys'
        return _launch(launch, [inputs[name] for name in _INPUTS[launch.name].split()])

    return run


@_prepared_once
def _attend_graph(
    first: _Launch,
    second: _Launch,
    given: tuple[str, ...],
    pair: _Pair,
    scale: float,
    softcap: float | None,
    sinks: bool,
    stream: str,
):
    """Of the inputs `given`, params last, and of the sinks, if there are any."""
    constants = _constants(pair, second.dtypes * 2, scale, softcap)
    run = _with_constants(first, given, constants)

    def attend_and_merge(*arrays):
        arrays, sink = (arrays[:-1], arrays[-1]) if sinks else (arrays, _nothing())
        return _launch(second, [*run(*arrays), sink, arrays[-1], constants["consts"]])[0]

    return _graph(attend_and_merge)


def _grid(name: str, device: str, x: int, y: int, z: int) -> tuple[int, int, int]:
    """Threads of x * y * z simdgroups, x rounded up to threadgroups."""
    threads = -(-x // NSG) * NSG * 32
    if max(threads, y, z) >= 1 << 31:
        raise ValueError(f"{name}: the grid must stay below 2**31 threads, got {(x, y, z)}")
    if device == "cuda" and max(y, z) > 65535:
        raise ValueError(f"{name}: batch and n_kv_heads must stay below 65536 on CUDA, got {(y, z)}")
    return threads, y, z


def forget_launches() -> None:
    """Drops all that was prepared, for tests and tools that replace parts of this module."""
    prepared = _prepared_attend, _prepared_decode, _prepared_encode
    for function in (_kernel, _pair, _attend_graph, _decode_graph, *prepared):
        function.cache_clear()
    _last_calls.clear()


def _shape_template(format: TQFormat, dim: int, value_dim: int, **options) -> tuple:
    return (
        ("D", dim),
        ("DV", value_dim),
        ("KB", format.key_bits),
        ("VB", format.value_bits),
        ("LLOYD", format.codebook == "lloyd"),
        ("QJL", format.qjl),
        ("CENTERED", format.centered_keys),
        ("PAGE", format.page),
        ("NSG", NSG),
        *options.items(),
    )


def _whole_blocks(regions: Regions | None) -> Regions:
    """Regions with room for a multiple of ROW_BLOCK tokens, as caches and `encode_keys` make them anyway."""
    if regions is None:
        return Regions(None)
    spare = -regions.codes.shape[2] % ROW_BLOCK
    return codec.grow_regions(regions, spare) if spare else regions


@dataclass(eq=False)
class _Pair:
    """Keys and values but for their tokens and the contents of their arrays: what launches over them share.

    Raises ValueError unless everything is as the kernels take for granted.
    """

    device: str
    format: TQFormat
    batch: int
    n_kv_heads: int
    dim: int
    value_dim: int
    dtype: mx.Dtype
    value_dtype: mx.Dtype
    one_layer: bool  # whether one layer's signs rotate both
    shapes: tuple[tuple[int, ...] | None, ...]  # of the arrays in _ROWS

    def __post_init__(self):
        format, shapes = self.format, dict(zip(_ROWS.split(), self.shapes, strict=True))
        head = (self.batch, self.n_kv_heads)
        for name, shape in shapes.items():
            if shape is not None and (shape[:2] != head or 0 < prod(shape) < _MIN_ELEMENTS):
                raise ValueError(f"{name} must have shape {(*head, '...')}, got {shape}")
        room = {name: 0 if shape is None else shape[2] for name, shape in shapes.items()}
        # Strides of a head: tokens of the packed regions and of the exact rows, pages of the means.
        self.capacities = packed, exact, _ = room["k_codes"], room["k_exact"], room["k_mean"]
        if (room["v_codes"], room["v_exact"]) != (packed, exact):
            others = room["v_codes"], room["v_exact"]
            raise ValueError(f"keys and values must have equal capacities, got {(packed, exact)} and {others}")
        # A kernel is compiled again where the dtype of an input changes, so place-holders have the right one.
        dtypes = {"k_exact": self.dtype, "v_exact": self.value_dtype}
        for kind, dim, dtype in (("keys", self.dim, self.dtype), ("values", self.value_dim, self.value_dtype)):
            regions = region_shapes(format, kind, dim, dtype)
            dtypes |= {f"{kind[0]}_{name}": stored for name, (_, stored, _) in regions.items()}
        held = tuple(name for name, shape in shapes.items() if shape is not None and prod(shape))
        self.places = {name: dtypes.get(name, mx.uint32) for name in shapes if name not in held}
        # Inputs of a launch that each layer has its own of, those that change with each token last.
        alike, exact = self.one_layer and self.value_dim == self.dim, ("k_exact", "v_exact")
        signs = ("k_signs", *["k_jl_signs"] * format.qjl, *["v_signs"] * (not alike))
        self.given = (*(n for n in held if n not in exact), *signs, *(n for n in exact if n in held))

    def check(self, layout: Layout) -> None:
        """Raises ValueError unless the arrays have room for such tokens."""
        packed, exact, pages = self.capacities
        needed = max(layout.packed), max(map(add, layout.first, layout.recent))
        if needed[0] > packed or needed[1] > exact:
            raise ValueError(f"rows must hold the tokens of their layout {needed}, got capacities {(packed, exact)}")
        if self.format.centered_keys and pages * self.format.page < needed[0]:
            raise ValueError(f"keys must have a mean for each page of {needed[0]} tokens, got {pages}")
        most, widest = max(packed, exact, layout.length), max(self.dim, self.value_dim)
        if most * widest >= 1 << 31:
            raise ValueError(f"tokens times head_dim must stay below 2**31, got {most} * {widest}")


_pair = _prepared_once(_Pair)


class _Found(NamedTuple):
    """Inputs of two rows but for exact ones, kept with the keys: they stay the same until tokens are packed."""

    regions: tuple[Regions | None, Regions | None]
    of: tuple  # what else they depend on, see `_depends`
    pair: _Pair
    arrays: list[mx.array]

    def inputs(self, keys: PackedRows, values: PackedRows) -> tuple[PackedRows, _Pair, list[mx.array]]:
        """As `keys.inputs`."""
        exact = len(self.arrays) < len(self.pair.given)
        return values, self.pair, [*self.arrays, keys.exact, values.exact] if exact else self.arrays


def _depends(keys: PackedRows, values: PackedRows) -> tuple:
    """What the inputs of a launch depend on, besides the regions and what is the same for all rows of a cache."""
    k, v = keys.exact, values.exact
    return None if k is None else k.shape, None if v is None else v.shape, values.layer_index, values.dtype


def prepare_again(keys: PackedRows, values: PackedRows) -> bool:
    """`prepare` for the rows of a cache where only exact rows changed since the last time; whether it was so."""
    found = keys.memo.found
    if found is None or found.regions[0] is not keys.regions or found.regions[1] is not values.regions:
        return False
    if found.of != _depends(keys, values) or keys.fused == "never":
        return False
    keys.inputs = found.inputs(keys, values)
    return True


def prepare(keys: PackedRows, values: PackedRows) -> tuple[_Pair, list[mx.array]]:
    """What launches over these rows share, and the arrays in its `given`."""
    device = backend()
    if keys.memo is None:
        keys.memo = codec.Memo()
    known = (keys.inputs is not None and keys.inputs[0] is values) or prepare_again(keys, values)
    if known and keys.inputs[1].device == device:
        return keys.inputs[1:]
    found = _find_inputs(device, keys, values)
    inputs = found.inputs(keys, values)
    if found is keys.memo.found:
        keys.inputs = inputs
    return inputs[1:]


def _find_inputs(device: str, keys: PackedRows, values: PackedRows) -> _Found:
    k, v = _whole_blocks(keys.regions), _whole_blocks(values.regions)
    rows = dict(zip(_ROWS.split(), [*k, keys.exact, v.codes, v.plane, v.scale, values.exact], strict=True))
    pair = _pair(
        *(device, keys.format, len(keys.layout.pad), keys.n_kv_heads, keys.dim, values.dim, keys.dtype, values.dtype),
        keys.layer_index == values.layer_index,
        tuple([None if a is None else a.shape for a in rows.values()]),
    )
    signs = {"k_signs": keys.signs[0], "k_jl_signs": keys.signs[1], "v_signs": values.signs[0]}
    arrays = [(rows | signs)[name] for name in pair.given if not name.endswith("exact")]
    found = _Found((keys.regions, values.regions), _depends(keys, values), pair, arrays)
    padded = any(made is not rows.regions and made.codes is not None for made, rows in ((k, keys), (v, values)))
    if not padded:  # what is not evaluated yet belongs to this thread's stream
        keys.memo.found = found
    return found


def _constants(pair: _Pair, dtypes: tuple, scale: float = 1.0, softcap: float | None = None) -> dict[str, mx.array]:
    """Inputs that all layers and steps share; dtypes: of the results, see `_consts`."""
    return {
        **{name: _nothing(dtype) for name, dtype in pair.places.items()},
        **{"mask": _nothing(), "k_jl_signs": _nothing(mx.float32)},
        **_tables(pair.format, pair.dim, pair.value_dim, dtypes, scale, softcap),
    }


def _tables(
    format: TQFormat, dim: int, value_dim: int, dtypes: tuple, scale: float = 1.0, softcap: float | None = None
) -> dict[str, mx.array]:
    """Constants that launches over packed rows and those that make them share."""
    consts = _consts(format, dim, value_dim, dtypes, scale, softcap)
    return {"k_mix": mix_rows(dim), "v_mix": mix_rows(value_dim), "consts": consts}


def _rows_per_simdgroup(rows: int, dim: int, value_dim: int, format: TQFormat, device: str) -> int:
    """How many query rows share one decode: as many as registers, threadgroup memory and lanes carry."""
    widest, narrowest, most = max(dim, value_dim), min(dim, value_dim), 4
    if widest > 256:
        most = 1 if device == "metal" else 2
    while most > rows or 8 * most > narrowest or _threadgroup_bytes(most, widest, format) > _THREADGROUP_BYTES:
        most //= 2
    return most


def _threadgroup_bytes(rows: int, widest: int, format: TQFormat) -> int:
    """Threadgroup memory of attend.metal: queries, with QJL two or three rows for each, weights and levels."""
    copies = (2 + format.centered_keys) if format.qjl else 1
    return NSG * rows * (copies * widest + 32) * 4 + 128


@cache
def _has_mma(device: str) -> bool:
    """Whether the device has the instructions of attend_mma.metal: NVIDIA's since compute capability 8.0."""
    return device == "cuda" and mx.device_info()["compute_capability_major"] >= 8


def _one_short_dtype(*dtypes: mx.Dtype) -> bool:
    return set(dtypes) in ({mx.float16}, {mx.bfloat16})


def _takes_mma(pair: _Pair, dtype: mx.Dtype) -> bool:
    """Whether attend_mma.metal does these rows rather than attend.metal."""
    format = pair.format
    return (
        _one_short_dtype(dtype, pair.dtype, pair.value_dtype)
        and pair.dim in _MMA_RESIDENT
        and pair.value_dim in _MMA_RESIDENT
        and (format.codebook, format.qjl) == ("uniform", False)
        and RAW_BITS not in (format.key_bits, format.value_bits)
        and _has_mma(pair.device)
    )


def _launch_shape(pair: _Pair, layout: Layout, rows: int, mma: bool) -> tuple[int, int, int]:
    """Query rows of a simdgroup, tiles of query rows, and splits of the tokens."""
    resident = _MMA_RESIDENT[max(pair.dim, pair.value_dim)] if mma else ()
    if mma:
        per_item = 4 * min(-(-rows // 4), len(resident))
    else:
        per_item = _rows_per_simdgroup(rows, pair.dim, pair.value_dim, pair.format, pair.device)
    tiles = -(-rows // per_item)
    items = tiles * pair.n_kv_heads * pair.batch
    packed = -(-max(layout.packed) // ROW_BLOCK)
    exact = -(-max(map(add, layout.first, layout.recent)) // ROW_BLOCK)
    blocks = packed + exact
    # Packed and exact blocks go to different simdgroups. Few of them would be too uneven.
    least = 2 if packed and exact else 1
    # The simdgroups of a threadgroup share a split in attend_mma.metal; in attend.metal a simdgroup has its own.
    if mma:
        most = -(-_MULTIPROCESSORS // items)
        if blocks * items >= _MMA_MANY_BLOCKS:
            most = resident[per_item // 4 - 1] * _MULTIPROCESSORS // items
        most = min(most, -(-blocks // NSG))
        least = max(least, -(-(-(-packed // _MMA_SHARE) + (exact > 0)) // NSG))
    else:
        most = min(-(-_WANTED_ITEMS[pair.device] // items), -(-blocks // 2))
    return per_item, tiles, max(least, min(most, _MAX_SPLITS))


def by_query_rows(attend, q: mx.array, mask, most: int) -> mx.array:
    """Attention of at most `most` query rows at a time, one part after the other.

    attend(part, mask, behind) gets some rows of q `(B, n_heads, L, D)`, what the mask has for them (arrays with four
    dimensions), and how many query rows come behind.
    """
    length, is_array = q.shape[2], mask is not None and not isinstance(mask, str)
    if is_array:
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    if length <= most:
        return attend(q, mask, 0)
    parts = []
    for start in range(0, length, most):
        stop = min(start + most, length)
        part = q[:, :, start:stop]
        if parts:
            part = mx.depends(part, parts[-1])
        parts.append(attend(part, mask[:, :, start:stop] if is_array and mask.shape[2] > 1 else mask, length - stop))
    return mx.concatenate(parts, axis=2)


def attend(q, keys: PackedRows, values: PackedRows, scale, mask, sinks, softcap) -> mx.array:
    """Attention by the kernels, see `attention.attention`; `reason` must be None for these widths."""
    if _decodes_first(q, keys, values, mask, sinks, softcap):
        return _attend_decoded(q, keys, values, scale, mask)
    columns = keys.layout.length
    most = max(1, _MAX_SCORES // (q.shape[0] * q.shape[1] * max(1, columns)))
    return by_query_rows(
        lambda part, rows, behind: _attend_part(part, keys, values, scale, rows, sinks, softcap, columns - behind),
        *(q, mask, most),
    )


def _decodes_first(q, keys: PackedRows, values: PackedRows, mask, sinks, softcap) -> bool:
    """Whether so many query rows share a decode that MLX's own attention over decoded rows is faster."""
    length = q.shape[2]
    query_rows = q.shape[1] // keys.n_kv_heads * length
    return (
        query_rows >= _DENSE_ROWS
        and keys.layout.length > 0
        and (mask is None or (isinstance(mask, str) and length <= keys.layout.length))
        and sinks is None
        and softcap is None
        and not any(keys.layout.pad)
        and keys.dim == values.dim
        and keys.dim in _DENSE_DIMS
        and _one_short_dtype(q.dtype, keys.dtype, values.dtype)
        and query_rows * _heads_at_a_time(q, keys) >= _DENSE_QUERIES[backend()][0]
    )


def _some_heads(rows: PackedRows, batch_row: int, heads: slice, after: mx.array | None) -> PackedRows:
    """Some heads of one batch row, to be read once `after` is there."""

    def cut(array):
        if array is None:
            return None
        array = array[batch_row : batch_row + 1, heads]
        return array if after is None else mx.depends(array, after)

    layout = Layout(*((field[batch_row],) for field in rows.layout))
    regions = None if rows.regions is None else Regions(*map(cut, rows.regions))
    return replace(rows, regions=regions, exact=cut(rows.exact), layout=layout, n_kv_heads=heads.stop - heads.start)


def _heads_at_a_time(q, keys: PackedRows) -> int:
    """KV heads that `_attend_decoded` decodes at a time."""
    head_bytes = 2 * keys.layout.length * keys.dim * q.dtype.size
    few, many = (limit // head_bytes for limit in _DENSE_BYTES)
    query_rows = q.shape[1] // keys.n_kv_heads * q.shape[2]
    most = max(1, few, min(many, -(-_DENSE_QUERIES[backend()][1] // query_rows)))
    return -(-keys.n_kv_heads // -(-keys.n_kv_heads // most))  # as many parts, as even as can be


def _attend_decoded(q, keys: PackedRows, values: PackedRows, scale: float, mask) -> mx.array:
    """Attention by MLX over rows that are decoded for some heads at a time, so that few decoded rows exist at once.

    MLX gives back the rows of a part once it ran, so no more than two parts are on their way. Inside a function that
    MLX transforms nothing can run: then each part only waits for the one before.
    """
    batch, n_kv = q.shape[0], keys.n_kv_heads
    groups, step = q.shape[1] // n_kv, _heads_at_a_time(q, keys)
    several = batch * n_kv > step
    out, started, last = [], None, None
    for row in range(batch):
        parts = []
        for start in range(0, n_kv, step):
            heads = slice(start, min(start + step, n_kv))
            k, v = decode(*(_some_heads(rows, row, heads, last) for rows in (keys, values)))
            queries = q[row : row + 1, heads.start * groups : heads.stop * groups]
            part = mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale, mask=mask)
            parts.append(part)
            if last is None and several and _start(part):
                if started is not None:
                    mx.eval(started)
                started = part
            else:
                last = part
        out.append(mx.concatenate(parts, axis=1))
    return mx.concatenate(out, axis=0)


def _start(array: mx.array) -> bool:
    """Has MLX begin with an array; False inside a function that it transforms, where nothing can be evaluated."""
    try:
        mx.async_eval(array)
    except ValueError:
        return False
    return True


def _attend_part(q, keys: PackedRows, values: PackedRows, scale, mask, sinks, softcap, last: int) -> mx.array:
    """Attention of some query rows; a causal mask lets the last of them see `last` columns."""
    pair, rows = prepare(keys, values)
    kind, strides, more = 0, (0, 0, 0, 0), ()
    if isinstance(mask, str):
        kind = 1 if q.shape[2] > 1 or last < keys.layout.length else 0
    elif mask is not None:
        kind = 2 if mask.dtype == mx.bool_ else 3
        shape = mask.shape
        strides = tuple(prod(shape[i + 1 :]) if shape[i] > 1 else 0 for i in range(4))
        if max(strides) >= 1 << 31:
            raise ValueError(f"mask must have strides below 2**31 elements, got shape {mask.shape}")
        more = (_padded(mask),)
    test, stream = self_test(pair.device), _stream()
    graph, params = _prepared_attend(
        *(pair, keys.layout, test.denormal, test.mma and _takes_mma(pair, q.dtype), q.shape, q.dtype, kind, strides),
        *(last if kind == 1 else None, float(scale), None if softcap is None else float(softcap)),
        *(sinks is not None, stream),
    )
    bare = mask is None and sinks is None and softcap is None
    if bare and last == keys.layout.length and type(scale) is float:
        if len(_last_calls) > 256:
            _last_calls.clear()
        call = keys.layout, scale, q.shape, q.dtype, mx.default_stream(mx.default_device())
        _last_calls[pair] = call, graph, params
    return graph(q, *rows, *more, params, *(() if sinks is None else (_padded(sinks),)))


# What `attend_again` finds: the last call over each pair that went through all checks, its graph and its params.
_last_calls: dict[_Pair, tuple] = {}
_NO_CALL = None, None, None


def attend_again(
    q, keys: PackedRows, values: PackedRows, *, scale, mask=None, sinks=None, softcap=None, **other
) -> mx.array | None:
    """`attention.attention` where the last call like this was the same, without options, else None.

    The layers of a model make the same call one after the other, for each token. `inputs` of keys say that values with
    the same tokens go with them: only a cache that hands rows out and calls that were checked leave some.
    """
    if mask is not None or sinks is not None or softcap is not None or other or keys.inputs is None:
        return None
    given, pair, rows = keys.inputs
    if given is not values or type(scale) is not float or type(q) is not mx.array:
        return None
    call, graph, params = _last_calls.get(pair, _NO_CALL)
    if call != (keys.layout, scale, q.shape, q.dtype, mx.default_stream(mx.default_device())):
        return None
    return graph(q, *rows, params)


@_prepared_once
def _prepared_attend(
    pair: _Pair,
    layout: Layout,
    denormal: bool,
    mma: bool,
    shape: tuple[int, ...],
    dtype: mx.Dtype,
    kind: int,
    strides: tuple[int, ...],
    last: int | None,
    scale: float,
    softcap: float | None,
    sinks: bool,
    stream: str,
):
    """The graph of attention and merge, and its params."""
    pair.check(layout)
    batch, n_heads, length, dim = shape
    n_kv, value_dim, device = pair.n_kv_heads, pair.value_dim, pair.device
    groups = n_heads // n_kv
    rows = groups * length
    name = "attend_mma" if mma else "attend"
    per_item, tiles, splits = _launch_shape(pair, layout, rows, mma)
    options = {"T": dtype, "MASK": kind, "SOFTCAP": softcap is not None, "R": per_item}
    if not mma:
        options["DENORMAL"] = denormal
    first = _Launch(
        name,
        _shape_template(pair.format, dim, value_dim, **options),
        ((batch * n_kv * rows * splits, value_dim + 2),),
        (mx.float32,),
        _grid(name, device, tiles * splits * (NSG if mma else 1), n_kv, batch),
        device,
    )
    second = _Launch(
        "merge",
        (("T", dtype), ("DV", value_dim), ("SINKS", sinks), ("NSG", NSG)),
        ((batch, n_heads, length, value_dim),),
        (dtype,),
        _grid("merge", device, batch * n_heads * length * NSG, 1, 1),
        device,
    )
    params = _params(length == 1 and kind == 0, _attend_ints, layout, pair, shape, mma, strides, last)
    given = ("query", *pair.given, *["mask"] * (kind > 1), "params")
    return _attend_graph(first, second, given, pair, scale, softcap, sinks, stream), params


def _attend_ints(layout: Layout, pair: _Pair, shape, mma: bool, strides, last: int | None) -> list[int]:
    batch, n_heads, length, _ = shape
    groups = n_heads // pair.n_kv_heads
    packed, exact, pages = pair.capacities
    _, tiles, splits = _launch_shape(pair, layout, groups * length, mma)
    deal = (splits * NSG, _EXACT_COST["attend_mma"], _MMA_SHARE) if mma else (splits, _EXACT_COST["attend"], 1 << 31)
    return [
        *(groups, length, layout.length if last is None else last, packed, exact, splits, tiles, pages),
        *(*strides, pair.n_kv_heads, batch * n_heads * length, n_heads, 0),
        *_token_ints(layout, *deal),
    ]


def encode(
    keys: mx.array,
    values: mx.array,
    mean: mx.array | None,
    format: TQFormat,
    layer_index: int,
    tokens: tuple[int, int] | None = None,
) -> tuple[Regions, Regions]:
    """`codec.quantise` of the tokens [start, stop), or all, of keys and values `(B, n_kv_heads, L, D)`.

    mean: page means `(B, n_kv_heads, pages, D)` of centered keys; None makes those of whole pages. Keys and values must
    be of one dtype.
    """
    if keys.dtype != values.dtype:
        raise ValueError(f"keys and values must have one dtype, got {keys.dtype} and {values.dtype}")
    start, stop = tokens = tokens or (0, keys.shape[2])
    given = () if mean is None else (mean,)
    if format.centered_keys and not given and (stop - start) % format.page:
        raise ValueError(f"keys without a mean must be whole pages of {format.page} tokens, got {stop - start}")
    dim, value_dim = keys.shape[3], values.shape[3]
    graph, k_parts, v_parts, params = _prepared_encode(
        *(backend(), format, keys.shape[:3], tokens, dim, value_dim, keys.dtype),
        *(None if mean is None else mean.shape[2], _stream()),
    )
    k_signs, v_signs = (layer_signs(format.seed, layer_index, d) for d in (dim, value_dim))
    k_words, k_scales, v_words, v_scales, *made = graph(keys, values, *k_signs, v_signs[0], params, *given)
    (mean,) = given or made or (None,)
    return (
        _split_words(k_parts, k_words, k_scales, mean) if k_parts else Regions(keys[:, :, start:stop]),
        _split_words(v_parts, v_words, v_scales, None) if v_parts else Regions(values[:, :, start:stop]),
    )


@_prepared_once
def _prepared_encode(
    device: str,
    format: TQFormat,
    shape: tuple[int, int, int],
    tokens: tuple[int, int],
    dim: int,
    value_dim: int,
    dtype: mx.Dtype,
    pages: int | None,
    stream: str,
):
    """The graph, the words of a key and of a value, and its params."""
    batch, heads, room = shape
    length = tokens[1] - tokens[0]
    rows = batch, heads, length
    k_parts, v_parts = _word_parts(format, "keys", dim), _word_parts(format, "values", value_dim)
    shapes, scale = [], getattr(mx, format.scale_dtype)
    for parts, scales in ((k_parts, 1 + format.qjl), (v_parts, 1)):
        shapes += [(*rows, sum(parts.values())), (*rows, scales)] if parts else [(_MIN_ELEMENTS,)] * 2
    launch = _Launch(
        "encode",
        _shape_template(format, dim, value_dim, T=dtype, NORM=format.norm_correction, CHOICES=len(STEP_CHOICES)),
        tuple(shapes),
        (mx.uint32, scale) * 2,
        _grid("encode", device, prod(rows), 2, 1),
        device,
    )
    makes_means = format.centered_keys and pages is None
    pages = length // format.page if pages is None else pages
    params = mx.array([1, length, tokens[0], room, 0, 0, 0, pages, 0, 0, 0, 0, heads, prod(rows), 0, 0], mx.int32)
    constants = {
        **_tables(format, dim, value_dim, (dtype, dtype)),
        **{"k_table": code_table(format, "keys", dim), "v_table": code_table(format, "values", value_dim)},
        "k_mean": _nothing(dtype),
    }
    given = ("keys", "values", "k_signs", "k_jl_signs", "v_signs", "params")
    run = _with_constants(launch, (*given, *["k_mean"] * format.centered_keys), constants)
    if not makes_means:
        return _graph(run), k_parts, v_parts, params
    means = _Launch(
        "means",
        (("T", dtype), ("D", dim), ("PAGE", format.page), ("NSG", NSG)),
        ((batch, heads, pages, dim),),
        (dtype,),
        _grid("means", device, -(-batch * heads * pages * dim // 32), 1, 1),
        device,
    )

    def means_and_encode(keys, *others):
        (mean,) = _launch(means, [keys, others[-1]])
        return [*run(keys, *others, mean), mean]

    return _graph(means_and_encode), k_parts, v_parts, params


def _word_parts(format: TQFormat, kind: str, dim: int) -> dict[str, int]:
    """Words per row of the regions that `encode` writes one behind the other."""
    bits = format.bits(kind)
    if bits == RAW_BITS:
        return {}
    parts = {"codes": words(dim, field_width(bits))}
    if bits == 3:
        parts["plane"] = words(dim, 1)
    if kind == "keys" and format.qjl:
        parts["jl"] = words(dim, 1)
    return parts


def _split_words(parts: dict[str, int], packed: mx.array, scales: mx.array, mean: mx.array | None) -> Regions:
    out, start = {"scale": scales[..., 0], "mean": mean}, 0
    for name, width in parts.items():
        out[name] = packed[..., start : start + width]
        start += width
    if "jl" in parts:
        out["residual"] = scales[..., 1]
    return Regions(**out)


def decode(keys: PackedRows, values: PackedRows, step: int = 1) -> list[mx.array] | None:
    """`codec.decode_keys` and `codec.decode_values` of a cache's rows in one launch; None where they are too many.

    step: round memory up to a multiple of so many rows, so that MLX has one graph for as many lengths.
    """
    pair, rows = prepare(keys, values)
    length = keys.layout.length
    room = -(-length // step) * step
    prepared = _prepared_decode(pair, keys.layout, room, _stream())
    if prepared is None:
        return None
    graph, params, cuts = prepared
    dense = graph(*rows, params)
    # Takes half of the time that an index takes.
    return [mx.as_strided(array, *cut) for array, cut in zip(dense, cuts, strict=True)] if room > length else dense


@_prepared_once
def _prepared_decode(pair: _Pair, layout: Layout, room: int, stream: str):
    """The graph, its params, and shapes and strides of its results; None where one launch can't decode so many."""
    batch, heads = pair.batch, pair.n_kv_heads
    if not 0 < batch * heads * room < (1 << 26) - NSG:
        return None
    pair.check(layout)
    params = _params(True, _decode_ints, layout, pair, room)
    dims = pair.dim, pair.value_dim
    cuts = [((batch, heads, layout.length, dim), (heads * room * dim, room * dim, dim, 1)) for dim in dims]
    return _decode_graph(pair, room, stream), params, cuts


@_prepared_once
def _decode_graph(pair: _Pair, room: int, stream: str):
    format, dim, value_dim = pair.format, pair.dim, pair.value_dim
    batch, heads, dtypes = pair.batch, pair.n_kv_heads, (pair.dtype, pair.value_dtype)
    launch = _Launch(
        "decode",
        _shape_template(format, dim, value_dim, KT=pair.dtype, VT=pair.value_dtype),
        ((batch, heads, room, dim), (batch, heads, room, value_dim)),
        dtypes,
        _grid("decode", pair.device, batch * heads * room, 2, 1),
        pair.device,
    )
    return _graph(_with_constants(launch, (*pair.given, "params"), _constants(pair, dtypes)))


def _decode_ints(layout: Layout, pair: _Pair, room: int) -> list[int]:
    packed, exact, pages = pair.capacities
    rows = pair.batch * pair.n_kv_heads * room
    return [
        *(1, room, layout.length, packed, exact, 0, 0, pages, 0, 0, 0, 0, pair.n_kv_heads, rows, 0, 0),
        *_token_ints(layout, 1, 1, 1 << 31),
    ]
