"""Checks kernel text with clang and builds it into shared objects, which are cached."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .lint import lint
from .problems import FILE, MSLError, Problem, fail
from .translate import translate

HERE = Path(__file__).resolve().parent
_UTILS = "mlx/backend/metal/kernels/utils.h"
_PREAMBLE = f"""#pragma once
#include <metal_stdlib>
#undef METAL_FUNC
#define METAL_FUNC MSL_TOUCH
#include "{_UTILS}"
#undef METAL_FUNC
#define METAL_FUNC inline __attribute__((always_inline))
using namespace metal;
"""
_FORWARDERS = (
    *("atomic", "common", "compute", "geometric", "integer", "limits", "math", "numeric", "relational", "simdgroup"),
    *("simdgroup_matrix", "type_traits", "types"),
)


def _flags(text: str) -> list[str]:
    return text.split()


_CODE = _flags("-std=c++17 -march=x86-64-v3 -fPIC -fvisibility=hidden -fno-exceptions -fno-rtti -fno-stack-protector")
_LANGUAGE = _CODE + _flags(
    "-nostdinc -fno-math-errno -Xclang -cl-single-precision-constant -Xclang -ffloat16-excess-precision=none "
    "-Wno-everything -fno-caret-diagnostics -fno-color-diagnostics"
)
_MATH = {"safe": ["-ffp-contract=on"], "fast": ["-ffast-math"]}
# The same for calls of a kernel's own helpers, and in the code generator: see MSL_MEET in metal_stdlib.
_ONE_CALL = _flags(
    "-fconvergent-functions -mllvm -disable-tail-duplicate -mllvm -disable-early-taildup "
    "-mllvm -tail-dup-placement=0 -mllvm -enable-tail-merge=0"
)
_CHECKED = _ONE_CALL + _flags(
    "-O1 -gdwarf-4 -gline-tables-only -fsanitize=thread -fno-vectorize -fno-slp-vectorize -fno-finite-loops "
    "-fsanitize=signed-integer-overflow,integer-divide-by-zero,shift,bounds,float-cast-overflow,bool,enum,return "
    "-fsanitize=unreachable -ftrivial-auto-var-init=pattern -mllvm -tsan-instrument-func-entry-exit=0 "
    "-mllvm -tsan-instrument-read-before-write=1 -mllvm -tsan-instrument-atomics=0 "
    "-mllvm -disable-vector-combine"  # which would split vector loads, so that their alignment is not seen
)
_MODES = {"strict": ["-DMSL_STRICT"], "checked": _CHECKED, "plain": [*_ONE_CALL, "-O2"]}
_WARNINGS = _flags(
    "-Wimplicit-float-conversion -Wno-implicit-int-float-conversion -Wuninitialized -Wsometimes-uninitialized "
    "-Wreturn-type -Wshift-count-overflow -Wdivision-by-zero -Warray-bounds -Winfinite-recursion"
)


@dataclass(frozen=True)
class Toolchain:
    """Commands of a clang with the ThreadSanitizer pass."""

    compiler: tuple[str, ...]
    linker: tuple[str, ...]
    runtime: tuple[str, ...]  # flags with which runtime.cpp finds the C library's headers
    version: str

    @classmethod
    def of(cls, compiler: list[str], linker: list[str], runtime: list[str]) -> Toolchain | None:
        """None where the compiler does not run or is too old: clang 17 was the first to calculate with bfloat."""
        try:
            version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            return None
        m = re.search(r"clang version (\d+)", version)
        return cls(tuple(compiler), tuple(linker), tuple(runtime), version) if m and int(m.group(1)) >= 17 else None


def _zig() -> Toolchain | None:
    """The clang and the linker inside the ziglang wheel, with the C headers it brings."""
    spec = importlib.util.find_spec("ziglang")
    if not spec or not spec.origin:
        return None
    folder = Path(spec.origin).parent
    libc = ("x86-linux-gnu", "generic-glibc", "x86-linux-any", "any-linux-any")
    headers = [folder / "lib/include", *(folder / "lib/libc/include" / name for name in libc)]
    runtime = [flag for path in headers for flag in ("-isystem", str(path))]
    # Clang itself rather than `zig c++`, which would first build a C++ library that is not needed.
    zig = str(folder / "zig")
    return Toolchain.of([zig, "clang"], [zig, "ld.lld", "-shared", "-Bsymbolic"], ["-nostdinc", *runtime])


@cache
def toolchain() -> Toolchain | None:
    """MSL_CXX, else the ziglang wheel, else a clang++ on PATH."""

    def clang(path: str) -> Toolchain | None:
        return Toolchain.of([path], [path, "-shared", "-nostdlib", "-Wl,-Bsymbolic"], [])

    if path := os.environ.get("MSL_CXX"):
        return clang(path)
    names = ["clang++", *(f"clang++-{n}" for n in range(30, 16, -1))]
    return _zig() or next(filter(None, (clang(p) for p in map(shutil.which, names) if p)), None)


@cache
def available() -> tuple[bool, str]:
    """Whether kernels can be run here, and why not."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return False, f"kernels are run on x86-64 Linux, this is {platform.machine()} {sys.platform}"
    missing = {"avx2", "f16c", "fma", "bmi2"} - set(Path("/proc/cpuinfo").read_text().split())
    if missing:
        return False, f"the processor lacks {', '.join(sorted(missing))}"
    if not _mlx_headers():
        return False, "the mlx wheel with its Metal headers is not installed"
    if not toolchain():
        return False, "no compiler: pip install ziglang, or set MSL_CXX to a clang++ of version 17 or newer"
    return True, ""


def _mlx_headers() -> Path | None:
    spec = importlib.util.find_spec("mlx")
    folders = [Path(p) / "include" for p in (spec.submodule_search_locations if spec else None) or ()]
    return next((f for f in folders if (f / _UTILS).is_file()), None)


def _digest(*values) -> str:
    return hashlib.sha256(repr(values).encode()).hexdigest()[:24]


@cache
def _home() -> Path:
    """Folder of everything built with this compiler, these headers and this runtime; made when first asked for."""
    ok, reason = available()
    if not ok:
        fail("toolchain", reason)
    mlx = _mlx_headers()
    # MLX's helpers, with the two array parameters whose address space clang would drop made pointers.
    utils = (mlx / _UTILS).read_text()
    utils = re.sub(r"constant const int64_t strides\[[23]\]", "constant const int64_t* strides", utils)
    files = {str(p.relative_to(HERE / "include")): p.read_text() for p in (HERE / "include").rglob("*") if p.is_file()}
    files |= {f"metal_{name}": "#pragma once\n#include <metal_stdlib>\n" for name in _FORWARDERS}
    files |= {_UTILS: utils, "preamble.h": _PREAMBLE, "runtime.cpp": (HERE / "runtime.cpp").read_text()}
    key = _digest(sorted(files.items()), _LANGUAGE, _MATH, _MODES, _WARNINGS, str(mlx), toolchain())
    cache_folder = Path(os.environ.get("MSL_CACHE") or Path.home() / ".cache" / "mlx-tq" / "msl")
    home = cache_folder / key
    if not home.is_dir():
        cache_folder.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(dir=cache_folder))
        for name, text in files.items():
            (part / "include" / name).parent.mkdir(parents=True, exist_ok=True)
            (part / "include" / name).write_text(text)
        try:
            part.rename(home)
        except OSError:  # another process was faster
            shutil.rmtree(part)
    return home


def _run(command: list[str], source: str | None = None) -> str:
    """Output of a compiler; MSLError where it fails without naming a line of the kernel."""
    r = subprocess.run(command, input=source, capture_output=True, text=True)
    if r.returncode and f"{FILE}:" not in r.stderr:
        fail("toolchain", f"{r.stderr.strip()[:2000]}\nfrom {' '.join(command)}")
    return r.stderr


def _built(path: Path, *commands: list[str], source: str | None = None) -> Path:
    """`path`, made where it does not exist: the first command gets the source, each the output of the one before."""
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = []
            for i, command in enumerate(commands):
                errors = _run([*command, *made, "-o", f"{folder}/{i}.o"], source)
                made = [f"{folder}/{i}.o"]
                if not Path(made[0]).exists():
                    raise MSLError(_diagnostics(errors))
            os.replace(made[0], path)  # other processes see all of it or nothing
    return path


def _compiler(mode: str, math: str) -> list[str]:
    """Compiler command for kernel text on standard input, with the Metal and MLX headers precompiled."""
    home = _home()
    command = [*toolchain().compiler, *_LANGUAGE, *_MATH[math], *_MODES[mode], "-Xclang", "-fno-pch-timestamp"]
    command += [f"-I{home}/include", f"-I{_mlx_headers()}"]
    header = [*command, "-Xclang", "-fpch-instantiate-templates", "-x", "c++-header", f"{home}/include/preamble.h"]
    precompiled = _built(home / f"{mode}-{math}.pch", header)
    return [*command, "-include-pch", str(precompiled), "-x", "c++", "-"]


def _diagnostics(text: str) -> list[Problem]:
    problems = []
    for line in text.splitlines():
        m = re.match(r"(\S+?:\d+:\d+|\S+):? (error|fatal error|warning|note): (.*)", line)
        if not m:
            continue
        where, severity, message = m.groups()
        if severity == "note":  # of an error in a header, the place in the kernel
            if problems and FILE not in problems[-1].where and where.startswith(FILE):
                problems[-1].where = where
        elif "implicit-float-conversion" not in message:
            problems.append(Problem("warning" if severity == "warning" else "type", where, message))
        elif re.search(r"to '(?:const )?(?:bfloat|__bf16)", message):
            # Metal converts nothing to bfloat by itself; the other conversions that lose precision are allowed.
            message = message.replace("loses floating-point precision", "must be explicit in MSL")
            problems.append(Problem("type", where, message))
    return problems


def strict_check(text: str, raise_: bool = True) -> list[Problem]:
    """Problems that a Metal compiler would report, and some it would not; MSLError where there are any."""
    marker = _home() / f"{_digest(text)}.ok"
    if marker.exists():
        return []
    source = f'#line 1 "{FILE}"\n{translate(text, strict=True)}\n'
    errors = _run([*_compiler("strict", "safe"), "-fsyntax-only", *_WARNINGS], source)
    problems = lint(text) + _diagnostics(errors)
    if problems and raise_:
        raise MSLError(problems)
    if not problems:
        marker.touch()
    return problems


def build(text: str, entry: str, checks: bool, math: str) -> Path:
    """Path of the shared object with the kernel's text, `entry` after it, and the runtime."""
    home, mode, tools = _home(), "checked" if checks else "plain", toolchain()
    library = home / f"{_digest(text, entry, mode, math)}.so"
    if not library.exists():
        runtime = [*tools.compiler, *_CODE, "-O2", *tools.runtime, "-c", f"{home}/include/runtime.cpp"]
        link = [*tools.linker, str(_built(home / "runtime.o", runtime))]
        source = f'#line 1 "{FILE}"\n{translate(text, strict=False)}\n#include "driver.h"\n{entry}\n'
        _built(library, [*_compiler(mode, math), "-c"], link, source=source)
    return library
