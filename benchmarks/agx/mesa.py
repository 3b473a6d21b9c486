"""Compiles C++ for OpenCL with Mesa's AGX compiler and counts what the code costs on an Apple GPU.

The unit is the issue slot: one instruction of a simdgroup of 32 lanes. A core issues 4 slots a cycle. README.md says
what the model leaves out.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Slots of an instruction, from Mesa's agx_performance.c and published timings of the M1. Loads and stores wait in
# pipes of their own, control flow too: none.
_ONE = """ffma fadd fmul hfma hadd hmul bitop and or xor not mov nand nor andn1 andn2 orn1 orn2 xnor icmpsel fcmpsel
iadd mov_imm"""
_SLOTS = dict.fromkeys(_ONE.split(), 1)
_SLOTS |= dict.fromkeys(
    ("get_sr", "get_sr_barrier", "get_sr_coverage", "shuffle", "shuffle_xor", "icmp_ballot", "fcmp_ballot"), 2
)
_SLOTS |= dict.fromkeys(("simd_reduce", "quad_reduce", "simd_prefix", "quad_prefix"), 24)
# Cycles in the pipe for shifts, conversions and transcendental functions, beside one slot each.
_SIDE_CYCLES = dict.fromkeys(
    """imad bfi bfeil extr asr floor ceil trunc roundeven sin_pt_1 sin_pt_2 log2 exp2 convert popcount bitrev ffs
    intl""".split(),
    4,
)
_SIDE_CYCLES |= {"rcp": 6, "rsqrt": 8, "srsqrt": 8}
_SPILLS = ("stack_load", "stack_store")
_JUMP = 0xC000  # jmp_exec_any, which only loops use; the distance stands behind it

_SCRIPT = """set -e
cd "$1"
clang-19 -x clcpp -cl-std=CLC++2021 -target spir64-unknown-unknown -O0 -Xclang -disable-O0-optnone \
  -cl-kernel-arg-info -Xclang -finclude-default-header -I. -emit-llvm -S kernel.cl -o kernel.ll
# The SPIR-V translator knows OpenCL's functions only in modules that say OpenCL C.
sed -i -E '/^!opencl.(cxx|ocl|spir).version/d' kernel.ll
echo '!opencl.ocl.version = !{!9999}' >> kernel.ll
echo '!9999 = !{i32 2, i32 0}' >> kernel.ll
clang-19 -x ir -target spir64-unknown-unknown -O0 -emit-llvm -c kernel.ll -o kernel.bc
llvm-spirv-19 --spirv-max-version=1.4 kernel.bc -o part.spv
spirv-link --allow-partial-linkage part.spv -o kernel.spv
MESA_SHADER_CACHE_DISABLE=true AGX_MESA_DEBUG=shaders,shaderdb,internal \
  /src/mesa/build/src/asahi/clc/asahi_clc kernel.spv kernel.h kernel.c"""


@dataclass(frozen=True)
class Cost:
    """Slots, and cycles of the side pipe, which runs beside them."""

    issued: float = 0
    side: float = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.issued + other.issued, self.side + other.side)

    def __mul__(self, times: float) -> Cost:
        return Cost(self.issued * times, self.side * times)

    @property
    def slots(self) -> float:
        """What the slower of the two takes."""
        return max(self.issued, self.side)


@dataclass(frozen=True)
class Block:
    """A basic block: its instructions, and the places of its successors in the list of blocks."""

    lines: tuple[str, ...]
    next: tuple[int, ...]

    @property
    def ops(self) -> list[str]:
        return [re.match(r"(?:\S.*? = )?([a-z_0-9]+)\b", line).group(1) for line in self.lines]

    @property
    def cost(self) -> Cost:
        return Cost(
            sum(_SLOTS.get(op, op in _SIDE_CYCLES) for op in self.ops), sum(_SIDE_CYCLES.get(op, 0) for op in self.ops)
        )


@dataclass(frozen=True)
class Program:
    """A compiled kernel. `registers` are 16 bits wide, of 256; `spills` are loads and stores of spilled registers."""

    blocks: tuple[Block, ...]
    code_bytes: int
    threadgroup_bytes: int
    registers: int
    spills: int
    assembly: str
    jumps: tuple[int, ...] = ()  # bytes from the end of each loop back to its start, in the order of the ends

    def loops(self) -> list[range]:
        """The blocks of each loop, outer loops before the loops in them."""
        return sorted(
            (range(target, i + 1) for i, block in enumerate(self.blocks) for target in block.next if target <= i),
            key=lambda loop: (loop.start, -loop.stop),
        )

    def loop_bytes(self, loop: range) -> int:
        """Code bytes of one of `loops`."""
        ends = sorted(loop.stop for loop in self.loops())
        if len(ends) != len(self.jumps):
            raise RuntimeError(f"the code has {len(ends)} loops, its binary {len(self.jumps)}")
        return self.jumps[ends.index(loop.stop)]


def provenance(agx: Path) -> dict[str, str]:
    """Mesa's version, and the archive that the compiler was built from with the start of its SHA-256."""
    (archive,) = agx.glob("mesa_*.orig.tar.xz")
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    version = (agx / "root/src/mesa/VERSION").read_text().strip()
    return {"mesa": version, "archive": f"{archive.name} {digest[:16]}"}


class CompilerCrash(Exception):
    """Mesa's compiler crashed."""


def compile_kernel(text: str, agx: Path) -> Program:
    """Compiles `text`, one kernel that may include msl.h.

    agx: the folder that build.sh filled.

    Raises:
        CompilerCrash: Mesa's compiler crashes, as it does on some kernels that need many spills.
        RuntimeError: a compiler refuses the text.
    """
    root = agx.resolve() / "root"
    with tempfile.TemporaryDirectory(dir=root / "tmp") as name:
        work = Path(name)
        shutil.copy(Path(__file__).with_name("msl.h"), work)
        (work / "kernel.cl").write_text(text)
        env = ["/usr/bin/env", "-i", "HOME=/root", "PATH=/usr/bin:/bin", "LC_ALL=C.UTF-8"]
        command = ["chroot", str(root), *env, "sh", "-c", _SCRIPT, "sh", f"/{work.relative_to(root)}"]
        done = subprocess.run(command, capture_output=True, text=True)
        binary = out.read_text() if (out := work / "kernel.c").exists() else ""
    if "Segmentation fault" in done.stderr:
        raise CompilerCrash(done.stderr)
    if done.returncode:
        raise RuntimeError(f"the kernel does not compile:\n{done.stderr}")
    return parse(done.stdout, done.stderr, binary)


def jumps_back(binary: str) -> tuple[int, ...]:
    """How far each loop of the first program in `binary`, arrays of words in C, jumps back."""
    words = re.findall(r"0x([0-9a-f]{8})", binary.partition("};")[0])
    code = b"".join(struct.pack("<I", int(word, 16)) for word in words)
    found = (struct.unpack_from("<Hi", code, at) for at in range(0, len(code) - 5, 2))
    return tuple(-distance for op, distance in found if op == _JUMP and -len(code) < distance < 0)


def parse(log: str, summary: str, binary: str = "") -> Program:
    """The program in what the compiler prints, its code and one line of figures, and writes, the binary."""
    # A program is printed as selected, as optimised and with its registers. The kernel comes before the program that
    # fills its uniform registers.
    assembly = re.split(r"(?m)^(?=block0 \{|shader: |SHADER-DB)", log[log.index("\nblock0 {") :])[3].rstrip()
    found = re.findall(r"(?m)^block(\d+) \{\n(.*?)^\}([^\n]*)", assembly, re.S)
    place = {number: i for i, (number, _, _) in enumerate(found)}
    blocks = tuple(
        Block(
            tuple(line.strip() for line in body.splitlines() if line.strip()),
            tuple(place[n] for n in re.findall(r"block(\d+)", tail.split("from")[0]) if n in place),
        )
        for _, body, tail in found
    )
    figures = re.search(r"SHADER-DB:.* (\d+) bytes, (\d+) regs", summary)
    return Program(
        blocks,
        code_bytes=int(figures[1]),
        threadgroup_bytes=int(m[1]) if (m := re.search(r"shared_size: (\d+)", log)) else 0,
        registers=int(figures[2]),
        spills=sum(op in _SPILLS for block in blocks for op in block.ops),
        assembly=assembly,
        jumps=jumps_back(binary),
    )
