"""Plugs compressed caches into mlx-lm. The only file that knows mlx-lm's internals, but for its function of attention,
which `callers.py` knows.

mlx-lm asks a model's `make_cache` for caches and saves and loads them by class name: `enable` overrides the first for
one model, importing this file registers our classes for the second.
"""

from __future__ import annotations

import copy
import sys
import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace

from .attention import by_layers
from .batch import TQBatchKVCache
from .cache import TQKVCache
from .format import RAW_BITS, TQFormat
from .view import install_hook, release_hook

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
}
_NO_LIMIT = "compressed caches keep every token; leave it out, or call mlx_tq.disable(model)"

# Enabled models by id: modules are dicts and cannot be hashed.
_enabled: dict[int, weakref.ref] = {}


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one cache of a model.

    Attributes:
        index: the cache's place in the model's list; those of one CacheList share it.
        cache: class name of mlx-lm's cache.
        format: the TQFormat, or None where the cache is left as it is.
        reason: why it is left as it is.
        latent: whether the keys are the latent of multi-head latent attention, which are its values too.
    """

    index: int
    cache: str
    format: TQFormat | None
    reason: str = ""
    latent: bool = False

    def describe(self) -> str:
        """One line: the cache, and its format or the reason."""
        if self.format is None:
            return f"{self.cache}, left as it is: {self.reason}"
        if self.latent:
            return f"{self.cache}, {describe_latent(self.format)}"
        return f"{self.cache}, compressed: {self.format.describe()}"


class Plan(tuple):
    """One LayerPlan per cache. As a context manager it undoes its `enable` on leaving: an earlier one counts again."""

    _model = None
    _outer: _MakeCache | None = None

    def __str__(self) -> str:
        layers: dict[int, str] = {}
        for entry in self:
            layers[entry.index] = " + ".join(filter(None, (layers.get(entry.index), entry.describe())))
        return by_layers(list(layers.values()))

    def __enter__(self) -> Plan:
        return self

    def __exit__(self, *exc) -> None:
        if self._model is None or id(self._model) not in _enabled:
            return  # disabled in between
        disable(self._model)
        if self._outer is not None:
            _install(self._model, self._outer)


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


def _latent_format(format: TQFormat) -> TQFormat | None:
    """The format of a latent, which is key and value, with the rope key as values; None where one stays exact.

    It has the bits of whichever gets more, without what values cannot have: page means and the sign sketch.
    """
    if RAW_BITS in (format.key_bits, format.value_bits):
        return None
    bits = min(4, max(format.key_bits + format.qjl, format.value_bits))
    return replace(format, key_bits=bits, value_bits=RAW_BITS, qjl=False, centered_keys=False)


def describe_latent(format: TQFormat) -> str:
    """What the format of a latent means, on one line."""
    packed = replace(format, value_bits=format.key_bits).describe()
    return f"latent compressed once as key and value: {packed}; rope key not quantised"


def leaves(caches) -> list:
    """The caches among these and inside their CacheLists."""
    return [leaf for cache in caches for leaf in (leaves(cache.caches) if hasattr(cache, "caches") else [cache])]


def _has(module, prefix: str) -> bool:
    """Whether a module, or one in it, has a submodule whose name starts so."""
    return hasattr(module, "modules") and any(name.startswith(prefix) for m in module.modules() for name in m)


def _compress(model, caches: list, format: TQFormat, fused: str) -> tuple[list, list[LayerPlan]]:
    plans = []
    layers = list(getattr(model, "layers", None) or ())

    def owner(i: int):
        """What uses cache i, as far as is known: a layer, or else the model."""
        return layers[i] if len(layers) == len(caches) else model

    def compressed(i: int, cache, place: int = 0):
        name = type(cache).__name__
        if type(cache) is _mlx_lm_cache.CacheList:
            return type(cache)(*(compressed(i, inner, place) for place, inner in enumerate(cache.caches)))
        latent = _has(owner(i), "embed_q")
        mine = _latent_format(format) if latent else format
        reason = ""
        if type(cache) is not _mlx_lm_cache.KVCache:
            reason = _LEFT_ALONE.get(name, "not a plain KVCache")
        elif place and _has(owner(i), "index"):
            reason = "keys of an indexer, no values"
        elif mine is None:
            reason = "the latent is key and value, and the format keeps one of them exact"
        if reason:
            plans.append(LayerPlan(i, name, None, reason))
            return cache
        plans.append(LayerPlan(i, name, mine, latent=latent))
        return TQKVCache(mine, layer_index=i, fused=fused)

    return [compressed(i, cache) for i, cache in enumerate(caches)], plans


def _refuse_limit(max_kv_size: int | None) -> None:
    if max_kv_size is not None:
        raise ValueError(f"max_kv_size must be None, got {max_kv_size}: {_NO_LIMIT}")


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
        # mlx-lm drops max_kv_size for models that have a make_cache, as ours now does: read it where it was given.
        caller = sys._getframe(1)
        if caller.f_code is _mlx_lm_cache.make_prompt_cache.__code__:
            _refuse_limit(caller.f_locals["max_kv_size"])
        model = self.model()
        return _compress(model, _stock_caches(model), self.format, self.fused)[0]


def enable(model, format: TQFormat | str | None = None, *, fused: str = "auto", verbose: bool = False) -> Plan:
    """Makes every mlx-lm entry point use compressed caches for `model`; returns the plan, layer by layer.

    Caches that are not plain KV caches (sliding windows, recurrent state) are left as they are; the plan says which.
    Usable as a context manager. Enabling again replaces the format, until the inner context is left. mlx-lm's
    `max_kv_size` is refused with a ValueError while the model is enabled: these caches keep every token. Beside a draft
    model mlx-lm drops it itself, whatever the caches.

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
    plan._model, plan._outer = model, _take_override(model)
    _install(model, _MakeCache(model, format, fused))
    if verbose:
        print(plan)
    return plan


def _install(model, override: _MakeCache) -> None:
    install_hook()
    model.make_cache = override
    key = id(model)
    _enabled[key] = weakref.ref(model, lambda _: _enabled.pop(key, None))


def _plan(model, format: TQFormat, fused: str) -> list[LayerPlan]:
    if not hasattr(model, "layers") and not hasattr(model, "make_cache"):
        raise ValueError(f"model must be an mlx-lm language model, got {type(model).__name__}")
    return _compress(model, _stock_caches(model), format, fused)[1]


def disable(model) -> None:
    """Undoes `enable`; does nothing to a model that is not enabled. Caches made before stay usable."""
    _take_override(model)
    _enabled.pop(id(model), None)
    if not _enabled:
        release_hook()


def make_prompt_cache(
    model, format: TQFormat | str | None = None, *, max_kv_size: int | None = None, fused: str = "auto"
) -> list:
    """Compressed caches for one sequence, for those who pass `prompt_cache=` themselves; the model is not changed.

    Raises ValueError for an unknown format, a model that makes no caches or a max_kv_size, which mlx-lm's function has
    and compressed caches cannot honour; ImportError without mlx-lm.
    """
    _need_mlx_lm()
    _refuse_limit(max_kv_size)
    format = TQFormat.resolve(format)
    _plan(model, format, fused)
    install_hook()
    return _compress(model, _stock_caches(model), format, fused)[0]
