"""What the checks report."""

from __future__ import annotations

from dataclasses import dataclass

FILE = "kernel.metal"  # name of the kernel's text in messages


@dataclass
class Problem:
    """One finding. `kind` is stable (README.md lists them), `message` is for people."""

    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"[{self.kind}] {self.where + ': ' if self.where else ''}{self.message}"


class MSLError(Exception):
    """Raised with the problems found while a kernel was checked, compiled or run."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(map(str, problems)))

    @property
    def kinds(self) -> set[str]:
        return {p.kind for p in self.problems}


def fail(kind: str, message: str, where: str = ""):
    """Raise one problem."""
    raise MSLError([Problem(kind, where, message)])
