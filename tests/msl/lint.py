"""What Metal rejects and clang accepts."""

from __future__ import annotations

import re

from .problems import Problem
from .translate import SPACE, at, blank, closing, kernel_bodies, mask, plain_spaces, threadgroup_variables

_FORBIDDEN = [
    (r"\bstd::", "std:: does not exist in MSL"),
    (r"\bdouble\b", "double does not exist in MSL"),
    (r"\b(?:goto|try|catch|throw|dynamic_cast|typeid|virtual|new|delete|thread_local)\b", "keyword not in MSL"),
    (r"(?<=[=(,{;:?&|+\-*/])\s*\[[&=\w\s,]*\]\s*\(", "no lambda expressions before Metal 3.2"),
    (r"\bprintf\s*\(", "printf does not exist in MSL"),
    (r"\basm\b", "no inline assembly in MSL"),
    (r"\b\d+\.\d*(?:[eE][+-]?\d+)?[lL]\b", "no long double literals in MSL"),
]
_TYPE = (
    r"(?:void|bool|char|uchar|short|ushort|int|uint|long|ulong|half|float|bfloat|size_t|u?int(?:8|16|32|64)_t|"
    r"bfloat16_t|float16_t|(?:u?char|u?short|u?int|u?long|half|bfloat|float|bool)[234])"
)
_POINTER = (
    rf"(?<![\w>])(?:(?:{SPACE}|const|volatile|static|constexpr)\s+)*({_TYPE}|[A-Z]\w*|[a-z]\w*_t)\s*"
    rf"(?:(?:{SPACE}|const|volatile)\s*)*([*&])(?![&=])\s*(?:(?:const|restrict|__restrict)\s+)*(\w+)?\s*(?=[,)=;\[])"
)
_GLOBAL = rf"(?:^|(?<=[;}}]))\s*((?:(?:static|constexpr|const|inline)\s+)+)({_TYPE})\s+(\w+)\s*(?:\[|=)"


def _without_templates(code: str) -> tuple[str, set[str]]:
    """Masked text with template parameter lists blanked, and the names of the type parameters."""
    names = set()
    for m in re.finditer(r"\btemplate\s*<", code):
        end = closing(code, m.end() - 1, "<>") + 1
        names |= set(re.findall(r"\b(?:typename|class)\s+(\w+)", code[m.start() : end]))
        code = code[: m.start()] + blank(code[m.start() : end]) + code[end:]
    return code, names


def _top_level(code: str) -> str:
    """Masked text with everything inside braces and parentheses blanked."""
    out, depth = [], 0
    for c in code:
        depth += c in "{("
        out.append(c if depth == 0 or c == "\n" else " ")
        depth -= c in "})"
        if depth == 0 and c == "}":
            out[-1] = c
    return "".join(out)


def lint(text: str) -> list[Problem]:
    """Problems of the text that need no compiler."""
    code, type_names = _without_templates(mask(plain_spaces(text)))
    problems = []

    def add(position: int, message: str):
        problems.append(Problem("msl-lint", at(code, position), message))

    for pattern, message in _FORBIDDEN:
        for m in re.finditer(pattern, code):
            add(m.start(), message)

    type_names |= set(re.findall(r"\b(?:struct|class|using)\s+(\w+)", code))
    for m in re.finditer(_POINTER, code):
        name, sign, variable = m.groups()
        before = code[: m.start()].rstrip()[-1:]
        # `(A * b)` may be a product: only with the name of a type is it a declaration.
        known = re.fullmatch(_TYPE, name) or name in type_names
        place = before in ("", "(", ",", ";", "{", "}") and (variable or before in ("(", ","))
        if known and place and not re.search(rf"\b{SPACE}\b", m.group(0)):
            what = "pointer" if sign == "*" else "reference"
            add(m.start(1), f"{what} without an address space: {' '.join(m.group(0).split())!r}")

    for m in re.finditer(_GLOBAL, _top_level(code), re.M):
        add(m.start(2), f"variable {m.group(3)} outside functions must be in constant address space")

    bodies = kernel_bodies(code)
    for v in threadgroup_variables(code):
        if not any(start < v.start < end for start, end in bodies):
            add(v.start, f"threadgroup variable {v.declarators[0]!r} outside a kernel function")
    return problems
