"""Plugs compressed caches into mlx-lm. The only file that knows mlx-lm's internals.

mlx-lm asks a model's `make_cache` for caches and saves and loads them by class name: `enable` overrides the first for
one model, importing this file registers our classes for the second.
"""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

from .batch import TQBatchKVCache
from .cache import TQKVCache
from .format import TQFormat
from .view import install_hook, remove_hook

try:
    from mlx_lm.models import cache as _mlx_lm_cache
except ModuleNotFoundError as error:
    if error.name not in ("mlx_lm", "mlx_lm.models"):
        raise
    _mlx_lm_cache = None
else:
    # load_prompt_cache looks classes up among the names of this module.
    _mlx_lm_cache.TQKVCache, _mlx_lm_cache.TQBatchKVCache = TQKVCache, TQBatchKVCache

# Why a cache of mlx-lm is left as it is, by class name.
_LEFT_ALONE = {
    "RotatingKVCache": "a sliding window, bounded already",
    "ChunkedKVCache": "chunked attention, bounded already",
    "ArraysCache": "recurrent state, no keys and values",
    "CacheList": "several caches in one",
}

# Enabled models by id: modules are dicts and cannot be hashed.
_enabled: dict[int, weakref.ref] = {}


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one cache of a model: `format` is None where it is left as it is, and `reason` says why."""

    index: int
    cache: str
    format: TQFormat | None
    reason: str = ""

    def describe(self) -> str:
        if self.format is None:
            return f"{self.cache}, left as it is: {self.reason}"
        return f"{self.cache}, compressed: {self.format.describe()}"


class Plan(tuple):
    """One LayerPlan per cache of the model. As a context manager it disables the model on leaving."""

    _model = None

    def __str__(self) -> str:
        lines, start = [], 0
        for i, entry in enumerate(self):
            if i + 1 < len(self) and self[i + 1].describe() == entry.describe():
                continue
            span = f"layer {start}" if start == i else f"layers {start}-{i}"
            lines.append(f"{span}: {entry.describe()}")
            start = i + 1
        return "\n".join(lines)

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *exc) -> None:
        if self._model is not None:
            disable(self._model)


def _need_mlx_lm() -> None:
    if _mlx_lm_cache is None:
        raise ImportError('this needs mlx-lm: pip install "mlx-tq[lm]"')


def _stock_caches(model) -> list:
    """The caches mlx-lm makes for a model that is not enabled."""
    override = model.__dict__.get("make_cache")
    if not isinstance(override, _MakeCache):
        return _mlx_lm_cache.make_prompt_cache(model)
    if override.previous is not None:
        return override.previous()
    if hasattr(type(model), "make_cache"):
        return type(model).make_cache(model)
    return _mlx_lm_cache.make_prompt_cache(SimpleNamespace(layers=model.layers))


def _take_override(model) -> _MakeCache | None:
    """Removes our `make_cache` from a model, which gets back the one it had of its own, and returns it."""
    override = getattr(model, "__dict__", {}).get("make_cache")
    if not isinstance(override, _MakeCache):
        return None
    del model.make_cache
    if override.previous is not None:
        model.make_cache = override.previous
    return override


def _compress(caches: list, format: TQFormat, fused: str) -> tuple[list, list[LayerPlan]]:
    out, plans = [], []
    for i, cache in enumerate(caches):
        name = type(cache).__name__
        if type(cache) is _mlx_lm_cache.KVCache:
            cache = TQKVCache(format, layer_index=i, fused=fused)
            plans.append(LayerPlan(i, name, format))
        else:
            plans.append(LayerPlan(i, name, None, _LEFT_ALONE.get(name, "not a plain KVCache")))
        out.append(cache)
    return out, plans


class _MakeCache:
    """The `make_cache` of an enabled model."""

    def __init__(self, model, format: TQFormat, fused: str):
        self.model, self.format, self.fused = weakref.ref(model), format, fused
        self.previous = model.__dict__.get("make_cache")

    def __deepcopy__(self, memo: dict) -> _MakeCache:
        """That of the copied model, which may outlive the one it was copied from."""
        twin, model = copy.copy(self), self.model()
        twin.model = weakref.ref(memo.get(id(model), model))
        twin.previous = copy.deepcopy(self.previous, memo)
        return twin

    def __call__(self) -> list:
        return _compress(_stock_caches(self.model()), self.format, self.fused)[0]


def enable(model, format: TQFormat | str | None = None, *, fused: str = "auto", verbose: bool = False) -> Plan:
    """Makes every mlx-lm entry point use compressed caches for `model`; returns the plan, layer by layer.

    Caches that are not plain KV caches (sliding windows, recurrent state) are left as they are; the plan says which.
    Usable as a context manager. Enabling again replaces the format.

    Args:
        model: a model loaded by mlx-lm.
        format: a TQFormat, a preset's name, or None for the default.
        fused: "auto" runs the kernels where they can run (see `explain`), "require" raises where they cannot, "never"
            uses MLX ops.
        verbose: prints the plan.

    Raises:
        ValueError: an unknown format or `fused`, or a model that makes no caches.
        ImportError: mlx-lm is not installed.
    """
    _need_mlx_lm()
    format = TQFormat.resolve(format)
    plan = Plan(_plan(model, format, fused))
    plan._model = model
    install_hook()
    _take_override(model)
    model.make_cache = _MakeCache(model, format, fused)
    key = id(model)
    _enabled[key] = weakref.ref(model, lambda _: _enabled.pop(key, None))
    if verbose:
        print(plan)
    return plan


def _plan(model, format: TQFormat, fused: str) -> list[LayerPlan]:
    if not hasattr(model, "layers") and not hasattr(model, "make_cache"):
        raise ValueError(f"model must be an mlx-lm language model, got {type(model).__name__}")
    return _compress(_stock_caches(model), format, fused)[1]


def disable(model) -> None:
    """Undoes `enable`; does nothing to a model that is not enabled. Caches made before stay usable."""
    _take_override(model)
    _enabled.pop(id(model), None)
    if not _enabled:
        remove_hook()


def make_prompt_cache(model, format: TQFormat | str | None = None, *, fused: str = "auto") -> list:
    """Compressed caches for one sequence, for those who pass `prompt_cache=` themselves; the model is not changed.

    Raises ValueError for an unknown format or a model that makes no caches, ImportError without mlx-lm.
    """
    _need_mlx_lm()
    format = TQFormat.resolve(format)
    _plan(model, format, fused)
    install_hook()
    return _compress(_stock_caches(model), format, fused)[0]
