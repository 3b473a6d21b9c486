"""Brings Mesa's AGX compiler nearer to Apple's: patch_mesa.py MESA_FOLDER

It uses the native shuffle_xor, which it otherwise emulates, and it unrolls every loop of up to 4 passes: `#pragma
unroll` is lost on the way to it, and loops over query rows that stay rolled would index their registers.

It also mends the register allocator. Where that moves a live value before phis, it looks for the phi that wrote the
value by its register alone, and may find one that is no longer used, of another size: a 32-bit value then gets an odd
16-bit register, and the packer stops at a swap.
"""

import sys
from pathlib import Path

CASE = """   case nir_intrinsic_shuffle_xor: {
      agx_index mask = agx_src_index(&instr->src[1]);
      if (nir_src_is_const(instr->src[1]))
         mask = agx_immediate(nir_src_as_uint(instr->src[1]));
      else
         b->shader->any_quad_divergent_shuffle |= b->shader->any_cf;
      return agx_shuffle_xor_to(b, dst, agx_src_index(&instr->src[0]), mask);
   }

"""


def replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    if text.count(old) != 1:
        sys.exit(f"error: {path} must have {old!r} once, got {text.count(old)} times: another version of Mesa?")
    path.write_text(text.replace(old, new))


compiler = Path(sys.argv[1]) / "src/asahi/compiler"
replace_once(
    compiler / "agx_nir_lower_subgroups.c", ".lower_relative_shuffle = true,", ".lower_relative_shuffle = false,"
)
test = "if (li->force_unroll && !li->guessed_trip_count"
replace_once(
    compiler.parents[1] / "compiler/nir/nir_opt_loop_unroll.c",
    test,
    test.replace("li->force_unroll", "(li->force_unroll || trip_count <= 4)"),
)
anchor = "   case nir_intrinsic_quad_broadcast:"
replace_once(compiler / "agx_compile.c", anchor, CASE + anchor)
anchor = "          !phi->dest[0].memory) {"
size = "          phi->dest[0].size == copy->src.size && !phi->dest[0].memory) {"
replace_once(compiler / "agx_register_allocate.c", anchor, size)
