"""Runs built kernels under the checks of runtime.cpp."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from .compile import build, strict_check
from .lines import line_of
from .problems import FILE, MSLError, Problem, fail
from .translate import kernels


@dataclass(frozen=True)
class Options:
    """How kernels are run."""

    seed: int = 0  # order of threads: 0 is by index, others are random
    misalign: bool = False  # inputs start one element past an aligned address, as slices may
    checks: bool = True  # without: faster, and only results count
    timeout: float = 60.0  # seconds
    max_problems: int = 20
    partial_simd: bool = False  # lanes that have returned may be missing from simd functions
    threadgroup_limit: int = 32768  # bytes
    allow_unwritten: bool = False
    execute: bool = True  # without: metal_kernel only checks types, and returns zeros


@dataclass(frozen=True)
class Run:
    """Statistics of a run. Accesses are those to device and threadgroup memory."""

    name: str
    text: str = field(repr=False)
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]
    accesses: int
    barriers: int
    collectives: int
    threadgroup_bytes: int
    seconds: float
    compile_seconds: float


_options = Options()
_last: Run | None = None
_one_at_a_time = threading.RLock()  # the runtime's state is global, and it takes over signals


@contextmanager
def options(**changes) -> Iterator[Options]:
    """Change the fields of Options for all runs inside the block."""
    global _options
    before, _options = _options, replace(_options, **changes)
    try:
        yield _options
    finally:
        _options = before


def current_options() -> Options:
    """The options in force."""
    return _options


def last_run() -> Run | None:
    """Statistics of the run that ended last, with or without problems."""
    return _last


class _Buffer(ctypes.Structure):
    _fields_ = [
        *(("name", ctypes.c_char_p), ("data", ctypes.c_void_p)),
        *((n, ctypes.c_uint64) for n in ("size", "misalign", "unwritten", "first_unwritten")),
        *((n, ctypes.c_uint32) for n in ("kind", "granule")),
    ]


class _Options(ctypes.Structure):
    _names = ("seed", "max_problems", "allow_partial_simd", "timeout_ms", "threadgroup_limit")
    _fields_ = [(n, ctypes.c_uint32) for n in _names]


class _Stats(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_uint64) for n in ("accesses", "barriers", "collectives")),
        *(("seconds", ctypes.c_double), ("threadgroup_bytes", ctypes.c_uint32), ("problems", ctypes.c_uint32)),
    ]


_INPUT, _OUTPUT_UNSET, _OUTPUT_SET = range(3)
_POSITION = re.compile(r"(thread|threadgroup|simdgroup|quadgroup|dispatch|grid)\w*")


class Library:
    """A kernel function of some MSL text, checked and built.

    kernel: its name, by default that of the last one. instance: the template instance, such as "f<float, 4>", by
    default the one of the text's `[[host_name]]` line. strict: check the text as strict_check does. Raises MSLError.
    """

    def __init__(self, text: str, kernel: str | None = None, instance: str | None = None, *, checks: bool = True,
                 strict: bool = True, math: str = "safe"):  # fmt: skip
        self.text, self.checks = text, checks
        found = kernels(text)
        self.name = kernel or next(reversed(found), "")
        if self.name not in found:
            fail("syntax", f"the text has no kernel function {self.name!r}")
        self.parameters = found[self.name]
        if not instance:
            m = re.search(rf"template\s+\[\[\s*host_name.*?decltype\(({self.name}<.*?>)\)\s", text, re.S)
            instance = m.group(1) if m else self.name
        arguments = []
        for p in self.parameters:
            if p.index >= 0:
                arguments.append(f"_msl_driver::{'Reference' if p.reference else 'Pointer'}{{b[{p.index}]}}")
            elif _POSITION.fullmatch(p.attribute):
                arguments.append(f"_msl_driver::as<{p.type}>(t->{p.attribute})")
            else:
                fail("syntax", f"unknown attribute [[{p.attribute}]] of a kernel parameter")
        entry = "MSL_ENTRY void msl_entry(void* const* b, const _msl_driver::Builtins* t) { "
        entry += f"{instance}({', '.join(arguments)}); }}"
        start = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            check = pool.submit(strict_check, text) if strict else None
            path = pool.submit(build, text, entry, checks, math)
            if check:
                check.result()
        self.path, self.compile_seconds = str(path.result()), time.perf_counter() - start
        for name in ("libm.so.6", "libc.musl-x86_64.so.1"):  # a kernel's object names no libraries
            try:
                ctypes.CDLL(name, ctypes.RTLD_GLOBAL)
                break
            except OSError:
                continue
        self._object = ctypes.CDLL(self.path)

    def run(self, buffers: Sequence[np.ndarray], grid: Sequence[int], threadgroup: Sequence[int], *,
            unset: Sequence[int] = (), shift: Sequence[int] | None = None, **changes) -> Run:  # fmt: skip
        """Run over a grid of threads. Writable buffers are updated in place. Raises MSLError.

        buffers: contiguous arrays, by buffer index. unset: indices of those without contents. shift: indices of those
        that the misalign option may move, by default all inputs that are pointers. changes: fields of Options.
        """
        global _last
        opt = replace(_options, **changes)
        by_index = {p.index: p for p in self.parameters if p.index >= 0}
        if set(by_index) != set(range(len(buffers))):
            fail("arguments", f"{self.name} has buffers {sorted(by_index)}, got {len(buffers)} arrays")
        threads = int(np.prod(threadgroup))
        if not 0 < threads <= 1024:
            fail("arguments", f"{threads} threads in a threadgroup, Metal has 1 to 1024")
        if shift is None:
            shift = [i for i, p in by_index.items() if not p.writable and not p.reference]
        described = (_Buffer * len(buffers))()
        for i, a in enumerate(buffers):
            p = by_index[i]
            if not a.flags.c_contiguous or (p.writable and not a.flags.writeable):
                fail("arguments", f"buffer {p.name} is not a contiguous, writable array")
            kind = _INPUT if not p.writable else _OUTPUT_UNSET if i in unset else _OUTPUT_SET
            moved = a.itemsize if opt.misalign and i in shift and kind == _INPUT else 0
            granule = min(a.itemsize, 4)
            described[i] = _Buffer(p.name.encode(), a.ctypes.data, a.nbytes, moved, 0, 0, kind, granule)
        report, stats = ctypes.create_string_buffer(1 << 16), _Stats()
        asked = _Options(opt.seed, opt.max_problems, opt.partial_simd, int(opt.timeout * 1000), opt.threadgroup_limit)
        three = ctypes.c_uint32 * 3
        with _one_at_a_time:
            code = self._object.msl_run(
                *(self._object.msl_entry, described, len(buffers), three(*grid), three(*threadgroup)),
                *(ctypes.byref(asked), ctypes.byref(stats), report, ctypes.c_uint64(len(report))),
            )
        if code:
            fail("arguments", "no address space is left to run the kernel in")
        what = (self.name, self.text, tuple(grid), tuple(threadgroup))
        counts = (stats.accesses, stats.barriers, stats.collectives, stats.threadgroup_bytes, stats.seconds)
        _last = Run(*what, *counts, self.compile_seconds)
        problems = self._problems(report.value.decode())
        if self.checks and not problems and not opt.allow_unwritten:
            problems = [
                self._unwritten(by_index[i].name, buffers[i], b)
                for i, b in enumerate(described)
                if b.kind == _OUTPUT_UNSET and b.unwritten
            ]
        if problems:
            raise MSLError(problems)
        return _last

    @staticmethod
    def _unwritten(name: str, array: np.ndarray, b: _Buffer) -> Problem:
        count, first = b.unwritten * b.granule // array.itemsize, b.first_unwritten // array.itemsize
        message = f"{count} of {array.size} elements never written; first at element {first}"
        return Problem("unwritten-output", name, message)

    def _problems(self, report: str) -> list[Problem]:
        """The runtime's report with addresses made into source lines."""
        source = self.text.splitlines()

        def named(line: int | None) -> str:
            if line is None or not 0 < line <= len(source):
                return "at an unknown line"
            return f"at line {line} `{source[line - 1].strip()[:70]}`"

        problems = []
        for entry in report.splitlines():
            kind, where, message = entry.split("\t", 2)
            message = re.sub(r"@(0x[0-9a-f]+)", lambda m: named(line_of(self.path, int(m[1], 16), FILE)), message)
            problems.append(Problem(kind, where, re.sub(r"#(\d+)", lambda m: named(int(m[1])), message)))
        return problems
