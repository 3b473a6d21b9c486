"""The slot counts for Apple GPUs in benchmarks/agx, as far as they need no compiler."""

import csv
import importlib
import re
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_tq import TQFormat, kernels

ROOT = Path(__file__).parents[1]


@pytest.fixture
def agx(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "agx")
    return importlib.import_module("agx")


def test_results_have_a_row_for_each_case(agx):
    with (ROOT / "benchmarks/results/agx.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == agx.FIELDS
    found = [agx.Case(r["kernel"], r["format"], int(r["head_dim"]), int(r["group"])) for r in rows]
    assert found == agx.cases()
    for row in rows:
        assert float(row["slots"]) > 0
        assert int(row["threadgroup_bytes"] or 0) <= 32 << 10
        assert int(row["registers"] or 0) <= 256


@pytest.mark.parametrize("kernel", ("attend", "attend_causal", "merge", "encode", "decode"))
@pytest.mark.parametrize("format", ("default", "tq3"))
def test_the_wrapper_declares_what_the_kernel_takes(agx, kernel, format):
    case = agx.Case(kernel, format, 128, 2 if kernel.startswith("attend") else 1)
    text, name = agx.kernel_text(case), kernel.removesuffix("_causal")
    signature = re.search(rf"void {name}\((.*?)\) \{{", text).group(1)
    names = [buffer.split("* ")[1] for buffer in signature.split(", ")]
    assert names == f"{kernels._INPUTS[name]} {kernels._OUTPUTS[name]}".split()
    shipped = re.sub(r"ROLLED\(([^;]*)\);", r"\1;", text)
    assert kernels.text(f"{name}.metal") in shipped and kernels.header(name) in shipped
    # Every capital name that the body uses is declared.
    declared = set(re.findall(r"^(?:typedef|constexpr) \w+ (\w+)", text.split("// Shared by all kernels")[0], re.M))
    body = re.sub(r"//.*", "", kernels.text(f"{name}.metal"))
    local = set(re.findall(r"\b(?:int|auto) (\w+) =|, (\w+) =", body))
    named = re.findall(r"(?:constexpr \w+|#define) (\w+)", kernels.header(name))
    ours = {n for pair in local for n in pair} | set(named)
    used = set(re.findall(r"\b[A-Z][A-Z_0-9]*\b", body)) - ours - {"INFINITY", "LOG2E", "LOWEST"}
    assert used <= declared, used - declared


def test_the_wrapper_has_the_parameters_of_the_case(agx):
    made = agx.launch(agx.Case("attend_causal", "compact", 64, 4))
    assert made.template.items() >= {"D": 64, "DV": 64, "KB": 3, "VB": 2, "R": 4, "MASK": 1, "CENTERED": True}.items()
    scale = kernels._INPUTS["attend"].split().index("k_scale")
    assert made.inputs[scale] == getattr(mx, TQFormat.preset("compact").scale_dtype)
    assert agx.launch(agx.Case("attend", "tq3", 64)).template["MASK"] == 0


@pytest.mark.parametrize("changes", ("PACKED", "NO_MEAN", "NO_RAISE"))
def test_attend_says_what_the_counts_replace(agx, changes):
    case, (change,) = agx.Case("attend", "default", 128), getattr(agx, changes).items()
    assert agx.kernel_text(case, dict([change])) == agx.kernel_text(case).replace(*change) != agx.kernel_text(case)
    with pytest.raises(RuntimeError, match="must say 'no such text' once, got 0 times"):
        agx.kernel_text(case, {"no such text": ""})


def log(*blocks):
    """What the compiler prints for a program of (instructions, successors)."""
    text = "".join(
        f"block{i} {{\n"
        + "".join(f"   {line}\n" for line in lines)
        + "} -> "
        + " ".join(f"block{n}" for n in to)
        + "\n\n"
        for i, (lines, to) in enumerate(blocks)
    )
    return f"shader: X\nshared_size: 512\n{text}{text}{text}", "SHADER-DB: 9 inst, 88 bytes, 40 regs, 0 uniforms"


def test_slots_of_a_loop(agx):
    program = importlib.import_module("mesa").parse(
        *log(
            (["r0 = mov_imm #0"], [1]),
            (["r1 = exp2 r0", "r1 = ffma r1, r1, r1", "if_icmp r1, #0", "jmp_exec_none #1"], [2, 3]),
            (["r2 = simd_reduce r1", "r3 = stack_load r2"], [4]),
            (["pop_exec #0"], [4]),
            (["r4 = shuffle_xor r1, #4", "r1 = convert r4", "while_icmp r1", "jmp_exec_any #2"], [1, 5]),
            (["stop"], []),
        )
    )
    assert (program.code_bytes, program.threadgroup_bytes, program.registers, program.spills) == (88, 512, 40, 1)
    assert program.loops() == [range(1, 5)]
    body = 1 + 1 + 24 + 2 + 1
    assert agx.block_cost(program).slots == body
    assert agx.total_cost(program, [3]).slots == 1 + 3 * body
    with pytest.raises(RuntimeError, match="expected 2 loops, the code has 1"):
        agx.total_cost(program, [3, 4])


def test_the_side_pipe_counts_where_it_is_slower(agx):
    assert agx.Cost(10, 4).slots == 10
    assert (agx.Cost(10, 4) + agx.Cost(2, 8) * 2).slots == 20


def test_budgets_scale_with_bytes(agx):
    assert [round(chip.slots(88)) for chip in agx.CHIPS] == [53, 36, 47, 41]
    assert [round(chip.slots(132)) for chip in agx.CHIPS] == [79, 53, 71, 61]
    sizes = [agx.row_bytes(agx.Case("attend", f, 128)) for f in ("tq3", "balanced", "k4v4", "default")]
    assert sizes[0] == 86 and all(a < b for a, b in pairwise(sizes))
