"""Which functions do nothing but attend to what a cache returns to them, told by their source.

What a cache returns are arrays, so a decode of all rows stands ready for models that compute with them. To prepare it
takes longer than to call attention, for each layer and token, and nearly all models drop it. MLX has no arrays that are
made when they are read; but where the source of a caller shows that nothing reads them, none is needed.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from types import CodeType, FrameType, FunctionType

_UPDATE, _ATTENTION = "update_and_fetch", "scaled_dot_product_attention"
# Calls that may read variables without their names in the source.
_HIDDEN_READS = {"eval", "exec", "locals", "vars"}
# By the id of a code object and the call that it is at; the code is kept, so that no other gets its id. To look it up
# by the code itself would hash all of it, for each layer and token.
_known: dict[tuple[int, int], tuple[CodeType, bool]] = {}
_known_attention: dict[int, tuple[CodeType, bool]] = {}  # likewise, of functions of attention


def only_attends(frame: FrameType) -> bool:
    """Whether the function that runs in `frame`, now in `update_and_fetch`, hands what it gets to attention alone.

    Attention is mlx-lm's function, if its own source shows that it hands keys and values to
    `mx.fast.scaled_dot_product_attention` and does nothing else with them.
    """
    code, at = frame.f_code, frame.f_lasti
    known = _known.get((id(code), at))
    if known is None:
        known = _known[id(code), at] = code, _attends(code, at)
    return known[1] and _is_mlx_lm(frame.f_globals.get(_ATTENTION))


def _is_mlx_lm(function) -> bool:
    if type(function) is not FunctionType:  # others may look like one and read what they get
        return False
    code = function.__code__
    known = _known_attention.get(id(code))
    if known is None:
        known = _known_attention[id(code)] = code, _hands_on(code)
    return known[1]


def _hands_on(code: CodeType) -> bool:
    """Whether this is the code of mlx-lm's attention, whose keys and values only MLX's functions of attention get."""
    base = sys.modules.get("mlx_lm.models.base")
    if base is None or (code.co_filename, code.co_name) != (base.__file__, _ATTENTION):
        return False
    function = _parsed(code)
    if function is None:
        return False
    names = [arg.arg for arg in function.args.args[1:3]]
    return _are_handed(names, function.body, {"mx.fast." + _ATTENTION, "quantized_" + _ATTENTION})


def _attends(code: CodeType, at: int) -> bool:
    """Whether the call at instruction `at` is the one update of a function, whose k and v only attention gets then.

    That is `k, v = cache.update_and_fetch(...)`, and afterwards k and v in calls of attention and nowhere else.
    """
    function = _parsed(code)
    hidden = code.co_flags & inspect.CO_GENERATOR or _HIDDEN_READS.intersection(code.co_names)
    if function is None or hidden or _ATTENTION in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
        return False
    everywhere = list(ast.walk(function))
    if any(isinstance(n, ast.Global) and _ATTENTION in n.names for n in everywhere):
        return False
    updates = [n for n in everywhere if isinstance(n, ast.Attribute) and n.attr == _UPDATE]
    calls = [n for n in everywhere if isinstance(n, ast.Call) and n.func in updates]
    if len(updates) != 1 or len(calls) != 1 or not _ends_at(calls[0], code, at):
        return False
    names, after = _after_update(function.body, updates[0]) or ((), ())
    if len(set(names)) != 2 or not set(names) <= set(code.co_varnames) - set(code.co_cellvars):
        return False
    return _are_handed(names, after, {_ATTENTION})


def _are_handed(names: Sequence[str], block: list[ast.stmt], functions: set[str]) -> bool:
    """Whether these names occur in a block only where calls of these functions have their keys and values."""
    nodes = [node for statement in block for node in ast.walk(statement)]
    calls = [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) in functions]
    handed = [id(arg) for call in calls for arg in _keys_and_values(call)]
    return all(id(n) in handed for n in nodes if isinstance(n, ast.Name) and n.id in names)


def _ends_at(call: ast.Call, code: CodeType, at: int) -> bool:
    """Whether the instruction at byte `at` is this call, told by its end: its start varies with Python."""
    _, line, _, column = next(islice(code.co_positions(), at // 2, None))
    return (line, column) == (call.end_lineno, call.end_col_offset)


def _after_update(block: list[ast.stmt], update: ast.Attribute) -> tuple[tuple[str, ...], list[ast.stmt]] | None:
    """The names an update is assigned to and the statements that run after it, where they run once and in order."""
    for i, statement in enumerate(block):
        match statement:
            case ast.Assign([ast.Tuple([ast.Name(k), ast.Name(v)])], ast.Call(func)) if func is update:
                return (k, v), block[i + 1 :]
            case ast.If(_, body, orelse):
                found = _after_update(body, update) or _after_update(orelse, update)
                if found is not None:
                    return found[0], found[1] + block[i + 1 :]
    return None


def _keys_and_values(call: ast.Call) -> list[ast.expr]:
    """The arguments that a call of attention has for keys and values."""
    return [*call.args[1:3], *(k.value for k in call.keywords if k.arg in ("keys", "values"))]


def _parsed(code: CodeType) -> ast.FunctionDef | None:
    """The source of a function, or None: also where the file is another by now."""
    try:
        tree = ast.parse("".join(inspect.findsource(code)[0]))
        if code not in _codes(compile(tree, code.co_filename, "exec", dont_inherit=True)):
            return None
    except Exception:  # of any kind: to find a source, Python asks all modules for their file
        return None
    for node in ast.walk(tree):
        named = isinstance(node, ast.FunctionDef) and node.name == code.co_name
        if named and code.co_firstlineno == min([node.lineno, *(each.lineno for each in node.decorator_list)]):
            return node
    return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and those inside."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)
