"""What the kernels cost on an Apple GPU, counted on code of Mesa's compiler; needs no Mac. See README.md.

sudo python benchmarks/agx/agx.py --agx FOLDER --out benchmarks/results/agx.csv
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from pathlib import Path
from unittest import mock

import mlx.core as mx
from mesa import CompilerCrash, Cost, Program, compile_kernel, provenance

from mlx_tq import TQFormat, kernels
from mlx_tq.codec import ROW_BLOCK, Layout, PackedRows

SIZES = "code_bytes threadgroup_bytes registers spills".split()
FIELDS = ["kernel", "format", "head_dim", "group", "slots", "loop_bytes", *SIZES, "mesa", "archive"]
FORMATS = ("default", "balanced", "compact", "k4v4", "tq3")
DTYPE = mx.float16
# Changes to attend.metal that leave out the code for exact rows, which packed blocks jump over, and the mean of a page.
PACKED = {"const bool coded = blocks.coded;": "const bool coded = true;"}
# The raise of the maximum, whose condition is still worked out.
NO_RAISE = {"const bool raise = simd_any(above);": "const bool raise = false;\nif (simd_any(above)) top += 1.0f;"}
NO_MEAN = {"if (CENTERED && (mean_score == LOWEST || start % PAGE == 0))": "if (false)"}
_TYPES = {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t", mx.float32: "float", mx.int32: "int", mx.uint32: "uint"}


@dataclass(frozen=True)
class Case:
    """One row of the results: a kernel for a format and a head_dim, `group` query rows to a decode."""

    kernel: str
    format: str
    head_dim: int
    group: int = 1

    @property
    def causal(self) -> bool:
        return self.kernel == "attend_causal"


def cases() -> list[Case]:
    attend = [Case("attend", f, d, g) for f in FORMATS for d in (64, 128, 256) for g in (1, 2, 4)]
    causal = [Case("attend_causal", "default", 128, g) for g in (1, 2, 4)]
    return attend + causal + [Case(name, "default", 128) for name in ("encode", "merge", "decode")]


# ------------------------------------------------------------------ the shipped text, as one kernel


@dataclass(frozen=True)
class Launch:
    """What mlx_tq gives a kernel: template parameters, and the dtypes of its buffers."""

    template: dict[str, object]
    inputs: tuple[mx.Dtype, ...]
    outputs: tuple[mx.Dtype, ...]


def launch(case: Case) -> Launch:
    """The launch that mlx_tq makes for `case`, taken from its own host code; nothing runs."""
    made = {}

    def record(launch, inputs):
        made[launch.name] = Launch(dict(launch.template), tuple(x.dtype for x in inputs), launch.dtypes)
        return [mx.zeros(shape, dtype) for shape, dtype in zip(launch.shapes, launch.dtypes, strict=True)]

    format, dim, length = TQFormat.preset(case.format), case.head_dim, 2 if case.causal else 1
    row = mx.zeros((1, 1, length, dim), DTYPE)
    layout = Layout.uniform(1, 0, 0, length)
    rows = [PackedRows(kind, format, dim, 0, DTYPE, None, row, layout, 1) for kind in ("keys", "values")]
    kernels.forget_launches()  # what is prepared was made for another group, or for nothing to run
    with mock.patch.multiple(
        kernels,
        _launch=record,
        _rows_per_simdgroup=lambda *_: case.group,
        backend=lambda: "metal",
        self_test=lambda _: kernels.SelfTest(None, True, None),
    ):
        kernels.attend(mx.zeros((1, case.group, length, dim), DTYPE), *rows, 1.0, "causal", None, None)
        kernels.decode(*rows)
        kernels.encode(row, row, row if format.centered_keys else None, format, 0)
    kernels.forget_launches()
    return made[case.kernel.removesuffix("_causal")]


def kernel_text(case: Case, changes: dict[str, str] | None = None) -> str:
    """The kernel of `case` in C++ for OpenCL: its template parameters and its signature around the shipped text.

    changes: parts of the text, and what is to stand in their place.
    """
    name, made = case.kernel.removesuffix("_causal"), launch(case)
    lines = ['#include "msl.h"']
    for key, value in made.template.items():
        if isinstance(value, mx.Dtype):
            lines.append(f"typedef {_TYPES[value]} {key};")
        else:
            lines.append(f"constexpr {type(value).__name__} {key} = {str(value).lower()};")
    inputs = zip(kernels._INPUTS[name].split(), made.inputs, strict=True)
    outputs = zip(kernels._OUTPUTS[name].split(), made.outputs, strict=True)
    buffers = [f"device const {_TYPES[dtype]}* {buffer}" for buffer, dtype in inputs]
    buffers += [f"device {_TYPES[dtype]}* {buffer}" for buffer, dtype in outputs]
    place = ", ".join(f"(uint)get_group_id({axis})" for axis in range(3))
    source = kernels.text(f"{name}.metal")
    for old, new in (changes or {}).items():
        if source.count(old) != 1:
            raise RuntimeError(f"{name}.metal must say {old!r} once, got {source.count(old)} times")
        source = source.replace(old, new)
    # Mesa unrolls short loops; one that must not be gets a bound that Mesa does not know.
    rolled = r"(#pragma unroll 1\n *for \(int \w+ = \w+; \w+ < )([^;]*);"
    header, source = (re.sub(rolled, r"\1ROLLED(\2);", part) for part in (kernels.header(name), source))
    lines += [
        header,
        f"kernel __attribute__((reqd_work_group_size({kernels.NSG * 32}, 1, 1))) void {name}({', '.join(buffers)}) {{",
        f"const uint3 threadgroup_position_in_grid = (uint3)({place});",
        "const uint thread_index_in_simdgroup = get_sub_group_local_id();",
        "const uint simdgroup_index_in_threadgroup = get_sub_group_id();",
        source,
        "}\n",
    ]
    return "\n".join(lines)


# ------------------------------------------------------------------ slots


def token_loop(program: Program) -> range:
    """The loop over tokens, ROW_BLOCK of them a pass: the innermost one with exponentials."""
    return min((loop for loop in program.loops() if any("exp2" in program.blocks[i].ops for i in loop)), key=len)


def passes(case: Case, changes: dict[str, str]) -> list[int]:
    """How often each loop in the loop over tokens runs: over sketches, keys, the mean of a page, and values."""
    format = TQFormat.preset(case.format)
    lanes = case.head_dim // (8 if case.group > 2 else 16)
    mean = format.centered_keys and changes != PACKED | NO_MEAN
    keys = [case.group] * (1 + format.qjl)
    loops = *keys, case.head_dim // 32 if mean else 1, lanes // min(lanes, 16 // case.group)
    return [n for n in loops if n > 1]


def block_cost(program: Program, passes: Sequence[int] = ()) -> Cost:
    """One pass of the loop over tokens, of whose loops each runs as often as `passes` says."""
    body = token_loop(program)
    inner = [loop for loop in program.loops() if loop != body and loop.start in body]
    if len(inner) != len(passes):
        raise RuntimeError(f"expected {len(passes)} loops in the loop over tokens, the code has {len(inner)}")
    total = Cost()
    for i in body:
        total += program.blocks[i].cost * prod(n for loop, n in zip(inner, passes, strict=True) if i in loop)
    return total


def trips(case: Case) -> list[float]:
    """How often each loop of a kernel other than attend runs, in the order of its text.

    Per key and value; of merge per query row, for the simdgroup that does most, with a split for each.
    """
    row = ceil(case.head_dim / 32)
    # Encoding packs words in loops, one pass each; Mesa unrolls all else.
    return {"merge": [1, 1, 1, row, row, row], "encode": [1, 1], "decode": []}[case.kernel]


def total_cost(program: Program, counts: list[float]) -> Cost:
    """The whole program, each loop as often as `counts` says."""
    loops = program.loops()
    if len(loops) != len(counts):
        raise RuntimeError(f"expected {len(counts)} loops, the code has {len(loops)}: has the kernel changed?")
    total = Cost()
    for i, block in enumerate(program.blocks):
        times = 1.0
        for loop, count in zip(loops, counts, strict=True):
            times *= count if i in loop else 1
        total += block.cost * times
    return total


def measure(case: Case, agx: Path) -> tuple[dict, Program]:
    """The row of results for `case`, and the program that `slots` counts. Sizes are "" if Mesa crashes on the whole."""
    try:
        program = compile_kernel(kernel_text(case), agx)
    except CompilerCrash:
        program = None
    if case.kernel.startswith("attend"):
        format = TQFormat.preset(case.format)
        counted = compile_kernel(kernel_text(case, PACKED), agx)
        slots = whole = block_cost(counted, passes(case, PACKED)).slots
        # What does not run with every block, and after how many blocks it does.
        renew = int(re.search(r"RENEW = (\d+)", kernels.text("attend.metal"))[1])
        rare = [(NO_RAISE, renew)] + [(NO_MEAN, format.page // ROW_BLOCK)] * format.centered_keys
        for changes, blocks in rare:
            changes = PACKED | changes
            without = block_cost(compile_kernel(kernel_text(case, changes), agx), passes(case, changes)).slots
            slots -= (whole - without) * (1 - 1 / blocks)
        slots /= ROW_BLOCK * case.group
        loop_bytes = counted.loop_bytes(token_loop(counted))
    else:
        counted, loop_bytes = program, ""
        slots = total_cost(program, trips(case)).slots
    sizes = {name: getattr(program, name, "") for name in SIZES}
    return asdict(case) | {"slots": round(slots, 2), "loop_bytes": loop_bytes} | sizes | provenance(agx), counted


# ------------------------------------------------------------------ chips


@dataclass(frozen=True)
class Chip:
    name: str
    cores: int
    gigahertz: float
    gigabytes_per_s: float

    def slots(self, row_bytes: float) -> float:
        """Slots that all cores issue while DRAM streams so many bytes."""
        return 4 * self.cores * self.gigahertz * row_bytes / self.gigabytes_per_s


CHIPS = (
    Chip("M1", 8, 1.278, 68.3),
    Chip("M1 Max", 32, 1.296, 409.6),
    Chip("M3 Max", 40, 1.38, 409.6),
    Chip("M4 Max", 40, 1.578, 546.1),
)


def row_bytes(case: Case) -> float:
    """Bytes of one packed key and value."""
    return TQFormat.preset(case.format).bits_per_element(case.head_dim) * case.head_dim * 2 / 8


def print_table(rows: list[dict]) -> None:
    """The results, and for attend what bounds each chip: the slots of all `group` rows beside the chip's budget."""
    head = ("kernel", "format", "dim", "group", "slots", "loop B", "code B", "tg B", "regs", "spills")
    line = "{:<14}{:<9}{:>4}{:>6}{:>9}{:>7}{:>7}{:>6}{:>5}{:>7}".format
    print(line(*head) + "".join(f"{chip.name:>12}" for chip in CHIPS))
    for row in rows:
        case, bounds = Case(*(row[name] for name in FIELDS[:4])), ""
        if case.kernel == "attend":
            for budget in (chip.slots(row_bytes(case)) for chip in CHIPS):
                bounds += f"{'memory' if row['slots'] * case.group <= budget else 'ALU':>8}{budget:4.0f}"
        print(line(*row.values()) + bounds)
    print("\nA number beside memory or ALU: slots that the chip has for one key and value while DRAM streams it.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agx", type=Path, required=True, help="the folder that build.sh filled")
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument(
        "--only",
        nargs=4,
        metavar=("KERNEL", "FORMAT", "HEAD_DIM", "GROUP"),
        help="one row, and its code",
    )
    args = parser.parse_args()
    if args.only:
        kernel, format, dim, group = args.only
        row, program = measure(Case(kernel, format, int(dim), int(group)), args.agx)
        print(program.assembly)
        print_table([row])
        return
    rows = [measure(case, args.agx)[0] for case in cases()]
    print_table(rows)
    if args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
