"""mx.fast.metal_kernel without Metal: calls run on the processor, under the checks."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from .compile import strict_check
from .library import Library, current_options

_real = mx.fast.metal_kernel
_MATH = {0: "safe", 1: "safe", 2: "fast"}


def _generated(kernel, inputs: list[mx.array], **call) -> list:
    """Arguments of the CustomKernel primitive that a call makes: name, full text, grid, threadgroup and so on."""
    traced = []
    example = [mx.zeros(x.shape, x.dtype) for x in inputs]
    mx.export_function(traced.append, lambda *arrays: kernel(inputs=list(arrays), **call), *example)
    return next(step["arguments"] for step in traced if step.get("name") == "CustomKernel")


def _to_numpy(x: mx.array) -> np.ndarray:
    """The values of x, bfloat16 as uint16; a view with x's strides where numpy can."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x, copy=False)


def _storage(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The memory that a strided view spans, flat, and its strides in elements."""
    if not a.size or any(s < 0 for s in a.strides):
        a = np.ascontiguousarray(a)
    span = sum((n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)) // a.itemsize + 1 if a.size else 0
    flat = np.lib.stride_tricks.as_strided(a, (span,), (a.itemsize,))
    return flat, np.array(a.strides, np.int64) // a.itemsize


def metal_kernel(name, input_names, output_names, source, header="", ensure_row_contiguous=True, atomic_outputs=False,
                 compile_options=None):  # fmt: skip
    """Takes and returns what mx.fast.metal_kernel does. Calls raise MSLError for every problem found."""
    given = {} if compile_options is None else {"compile_options": compile_options}
    real = _real(
        name=name,
        input_names=input_names,
        output_names=output_names,
        source=source,
        header=header,
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=atomic_outputs,
        **given,
    )
    libraries, traces = {}, {}

    def call(*, inputs, output_shapes, output_dtypes, grid, threadgroup, template=None, init_value=None, verbose=False,
             stream=None):  # fmt: skip
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        shapes = [tuple(s) for s in output_shapes]
        asked = {"output_shapes": shapes, "output_dtypes": output_dtypes, "grid": grid, "threadgroup": threadgroup}
        if template is not None:
            asked["template"] = template
        key = repr(([(x.shape, x.dtype) for x in arrays], asked))
        if key not in traces:
            traces[key] = _generated(real, arrays, **asked)
        made = traces[key]
        kernel_name, text, infos = made[0], made[1], made[8]
        if verbose:
            print(text)
        if not current_options().execute:
            strict_check(text)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(shapes, output_dtypes, strict=True)]
        checks = current_options().checks
        if (text, checks) not in libraries:
            math = _MATH[made[13]] if len(made) > 13 else "safe"
            libraries[text, checks] = Library(text, kernel_name, checks=checks, math=math)

        buffers, shift = [], []
        for x, (with_shape, with_strides, with_ndim) in zip(arrays, infos, strict=True):
            a = _to_numpy(x)
            flat, strides = _storage(np.ascontiguousarray(a) if ensure_row_contiguous else a)
            shift.append(len(buffers))
            buffers.append(flat)
            if x.ndim and with_shape:
                buffers.append(np.array(x.shape, np.int32))
            if x.ndim and with_strides:
                buffers.append(strides)
            if x.ndim and with_ndim:
                buffers.append(np.array([x.ndim], np.int32))
        n = len(buffers)
        for shape, dtype in zip(shapes, output_dtypes, strict=True):
            buffers.append(np.array(_to_numpy(mx.full(shape, init_value or 0, dtype))))
        unset = range(n, len(buffers)) if init_value is None else ()
        libraries[text, checks].run(buffers, grid, threadgroup, unset=unset, shift=shift)
        return [
            mx.array(b).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(b)
            for b, dtype in zip(buffers[n:], output_dtypes, strict=True)
        ]

    return call


def install():
    """Replace mx.fast.metal_kernel. Kernels that were made before are not affected."""
    mx.fast.metal_kernel = metal_kernel


def uninstall():
    """Put mx.fast.metal_kernel back."""
    mx.fast.metal_kernel = _real
