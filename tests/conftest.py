"""The ways to compute attention over packed rows. Every test that takes `path` runs on each of them."""

import os
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from unittest import mock

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # NVIDIA: float32 products of MLX ops as exact as elsewhere

import mlx.core as mx
import msl
import pytest

import mlx_tq
from mlx_tq import kernels


def ops(q, keys, values, **options):
    return fused(q, replace(keys, fused="never"), replace(values, fused="never"), **options)


def fused(q, keys, values, **options):
    """The kernels where they take these widths, else MLX ops; never MLX's own attention, even if nothing is packed."""
    with mock.patch.object(import_module("mlx_tq.attention"), "is_usual", lambda *_: False):
        return mlx_tq.attention(q, keys, values, **options)


PATHS = {"ops": ops, "kernels": fused}


def kernels_missing():
    """Why the kernels cannot be run here at all, or None: on the machine's own GPU, or else by the runner in msl."""
    if kernels.backend():
        return None
    ok, why = msl.available()
    return None if ok else why


@contextmanager
def running_kernels():
    """The project's own host code, with the machine's GPU or the runner in msl in place of Metal."""
    if kernels.backend():
        yield
        return
    found, real = kernels.backend, kernels.mx.fast.metal_kernel
    msl.install()
    mx.disable_compile()  # the runner needs numbers, not a graph
    kernels.backend = lambda: "metal"
    kernels._kernel.cache_clear()
    kernels._tests["metal"] = kernels.SelfTest(None, True, None)
    try:
        yield
    finally:
        kernels.backend = found
        kernels._kernel.cache_clear()
        kernels._tests.clear()
        mx.enable_compile()
        mx.fast.metal_kernel = real


@pytest.fixture
def fused_kernels():
    """Runs the test with kernels."""
    why = kernels_missing()
    if why:
        pytest.skip(why)
    with running_kernels():
        yield


@pytest.fixture(params=PATHS)
def path(request):
    if request.param == "kernels":
        request.getfixturevalue("fused_kernels")
    return PATHS[request.param]
