"""Checks and runs Metal Shading Language kernels on an x86-64 processor. See README.md."""

from contextlib import suppress

from .compile import available, strict_check
from .library import Library, Options, Run, last_run, options
from .problems import MSLError, Problem

__all__ = [
    *("Library", "MSLError", "Options", "Problem", "Run", "available", "install", "last_run", "metal_kernel"),
    *("options", "strict_check", "uninstall"),
]

with suppress(ImportError):  # without mlx there is only available(), which says so
    from .metal_kernel import install, metal_kernel, uninstall
