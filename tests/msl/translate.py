"""Text edits that make Metal Shading Language into C++ for clang. Line numbers are kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .problems import FILE, fail

SPACE = r"(?:device|constant|threadgroup|thread)"
_KERNEL = r"(?:\bkernel\b|\[\[\s*kernel\b[^\]]*\]\])\s+void\s+(\w+)\s*\("


def blank(match: re.Match | str) -> str:
    """Spaces in place of a text; line ends stay."""
    return re.sub(r"[^\n]", " ", match if isinstance(match, str) else match.group(0))


def mask(text: str, directives: bool = False) -> str:
    """The text with comments, strings and, unless `directives`, preprocessor lines blanked. Positions are kept."""
    token = r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'"
    text = re.sub(token, blank, text, flags=re.S)
    return text if directives else re.sub(r"(?m)^[ \t]*#(?:[^\n\\]|\\\n|\\.)*", blank, text)


def plain_spaces(text: str) -> str:
    """The text with address spaces in place of the macros that stand for one: declarations are found by the word."""
    define = re.compile(rf"(?m)^[ \t]*#define (\w+) ({SPACE})$")
    names = dict(define.findall(text))
    text = define.sub(blank, text)
    return re.sub(rf"\b({'|'.join(names)})\b", lambda m: names[m[1]], text) if names else text


def closing(text: str, start: int, pair: str = "()") -> int:
    """Position of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    fail("syntax", f"no {pair[1]!r} for this {pair[0]!r}", at(text, start))


def at(text: str, position: int) -> str:
    """file:line of a position."""
    return f"{FILE}:{text.count(chr(10), 0, position) + 1}"


def split(text: str) -> list[str]:
    """Parts between commas that are outside all brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]] if text[start:].strip() else parts


@dataclass
class ThreadgroupVariables:
    """A declaration `threadgroup type a[n], b;` of the masked text, from `start` to `end`."""

    start: int
    end: int
    type: str
    declarators: list[str]


def threadgroup_variables(code: str) -> Iterator[ThreadgroupVariables]:
    """Declarations of threadgroup variables in masked text; not those of pointers and parameters."""
    qualifier = r"(?:const\s+|volatile\s+|typename\s+|alignas\([^)]*\)\s*|unsigned\s+|signed\s+)*"
    for m in re.finditer(r"\bthreadgroup\b", code):
        before, end = code[: m.start()].rstrip()[-1:], code.find(";", m.end())
        if (before and before not in "{};") or end < 0:
            continue
        declaration = code[m.end() : end]
        head = re.match(rf"\s*({qualifier}[A-Za-z_][\w:]*(\s*<)?)", declaration)
        if not head or "{" in declaration or "(" in declaration.split("[")[0].replace("alignas(", ""):
            continue
        type_end = closing(declaration, head.end() - 1, "<>") + 1 if head.group(2) else head.end()
        rest = declaration[type_end:]
        if not re.match(r"\s*(const\s*)?[*&]", rest):
            names = [part.strip() for part in split(rest)]
            yield ThreadgroupVariables(m.start(), end + 1, declaration[head.start(1) : type_end].strip(), names)


def _storage(variables: ThreadgroupVariables, code: str) -> str:
    """References to storage that the runtime watches."""
    out = []
    for declarator in variables.declarators:
        m = re.fullmatch(r"(\w+)\s*((?:\[.*\])?)", declarator, re.S)
        if not m:
            fail("syntax", f"threadgroup variable {declarator!r} has an initialiser", at(code, variables.start))
        name, extent = m.groups()
        out.append(f'auto& {name} = ::metal::_threadgroup_variable<{variables.type}{extent}>("{name}", __LINE__);')
    text = " ".join(out)
    return text + "\n" * (code.count("\n", variables.start, variables.end) - text.count("\n"))


def translate(text: str, strict: bool) -> str:
    """C++ of the same meaning. strict: address spaces stay, for a check of types only."""
    text = plain_spaces(text)
    code, full = mask(text), mask(text, directives=True)
    edits = []  # (start, end, replacement)
    for m in re.finditer(r"\[\[(?!maybe_unused|clang::|unroll)", full):
        end = full.find("]]", m.end()) + 2
        edits.append((m.start(), end, blank(text[m.start() : end])))
    if not strict:  # unrolled code takes twice as long to build, and changes nothing here
        edits += [(m.start(), m.end(), "") for m in re.finditer(r"(?m)^[ \t]*#pragma unroll.*", full)]
    variables = list(threadgroup_variables(code))
    for v in variables:
        edits.append((v.start, v.start, "static ") if strict else (v.start, v.end, _storage(v, code)))
    for m in re.finditer(r"\b(?:metal::)?vec\s*<", full):  # vec<T, 4>(...)
        end = closing(full, m.end() - 1, "<>") + 1
        if re.match(r"\s*\(", full[end:]):
            edits += [(m.start(), m.start(), "metal::_make_vec<"), (end, end, ">")]
    for m in re.finditer(r"\b(\d+\.?\d*(?:[eE][+-]?\d+)?)bf\b", full):
        edits.append((m.start(), m.end(), f"bfloat({m.group(1)}{'' if '.' in m.group(1) else '.0'}f)"))
    if strict:  # clang drops the address space of an array parameter
        parameter = rf"\b{SPACE}\b[^,;(){{}}\[\]*&]*?\s(\w+)\s*(\[[^\]]*\])(?=\s*[,)])"
        for m in re.finditer(parameter, code):
            if not any(v.start <= m.start() < v.end for v in variables):
                edits += [(m.start(1), m.start(1), "*"), (m.start(2), m.end(2), "")]
    for start, end, new in sorted(edits, key=lambda e: e[:2], reverse=True):
        text = text[:start] + new + text[end:]
    return text


@dataclass
class Parameter:
    """A parameter of a kernel function; `index` is that of its buffer, -1 where it is a thread position."""

    type: str
    name: str
    attribute: str
    index: int

    @property
    def reference(self) -> bool:
        return self.type.endswith("&")

    @property
    def writable(self) -> bool:
        return bool(re.search(r"\bdevice\b", self.type)) and "const" not in self.type


def kernels(text: str) -> dict[str, list[Parameter]]:
    """Parameters of every kernel function, by name."""
    code, out = mask(text), {}
    for m in re.finditer(_KERNEL, code):
        parameters = out[m.group(1)] = []
        for part in split(code[m.end() : closing(code, m.end() - 1)]):
            p = re.fullmatch(r"(.*?)(\w+)\s*\[\[\s*(\w+)\s*(?:\(\s*(\d+)\s*\))?\s*\]\]\s*", part, re.S)
            if not p:
                fail("syntax", f"kernel parameter without an attribute: {part.strip()!r}", at(code, m.start()))
            index = int(p.group(4)) if p.group(3) == "buffer" else -1
            if index > 30:
                fail("syntax", f"buffer({index}): Metal has 31 buffers", at(code, m.start()))
            parameters.append(Parameter(p.group(1).strip(), p.group(2), p.group(3), index))
    return out


def kernel_bodies(code: str) -> list[tuple[int, int]]:
    """Spans of the bodies of kernel functions in masked text."""
    spans = []
    for m in re.finditer(_KERNEL, code):
        start = code.find("{", closing(code, m.end() - 1))
        if start >= 0:
            spans.append((start, closing(code, start, "{}")))
    return spans
