"""What a model does with compressed caches: which attention reads packed rows, and which decoded ones."""

import copy
from contextlib import contextmanager
from unittest.mock import patch

import mlx.core as mx
import numpy as np

import mlx_tq
from mlx_tq import TQFormat, store, view
from mlx_tq.integrate import leaves

# A prompt of 100 tokens fills the packed rows and both kinds of exact ones.
FORMAT = TQFormat(centered_keys=True, window=32, page=32)
PROMPT, STEPS = 100, 5


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(1, 255, n).tolist()


def forward(model, caches, ids):
    """Float32 logits `(len(ids), vocabulary)` of one more piece of a sequence."""
    logits = model(mx.array([ids]), cache=caches)[0].astype(mx.float32)
    mx.eval(logits, [cache.state for cache in caches])
    return logits


@contextmanager
def recorded():
    """Yields two lists that grow: calls of attention as (inputs, options, result), and views as (rows, view)."""
    calls, decoded = [], []
    attention, views = view.attention, view.views

    def attend(*inputs, **options):
        calls.append((inputs, options, attention(*inputs, **options)))
        return calls[-1][2]

    def make(*rows):
        out = views(*rows)
        decoded.extend(zip(rows, out, strict=True))
        return out

    with patch.object(view, "attention", attend), patch.object(store, "views", make), _views_for_all():
        yield calls, decoded


@contextmanager
def decoding():
    """Attention decodes all rows and goes through MLX's own function."""
    attend = patch.object(view, "_attend", lambda original, q, k, v, *rows, **options: original(q, k, v, **options))
    with attend, patch.object(view, "only_attends", lambda frame: False):
        yield


@contextmanager
def poisoned():
    """Views are NaN, and no attention reads them: whatever else computes with them shows it."""

    def nan(self, array):
        mx.array.__init__(self, mx.full(array.shape, mx.nan, array.dtype))

    with patch.object(view.TQView, "__init__", nan), _views_for_all():
        yield


@contextmanager
def _views_for_all():
    """All of a model's calls go through `attention` with views, also while no token is packed."""
    with patch.object(view, "is_usual", lambda *call: False), patch.object(view, "only_attends", lambda frame: False):
        yield


def reads(model):
    """What attention over compressed caches reads: "packed" rows, "decoded" ones or both, for a prompt and for a token.

    None for a model of which nothing is compressed.
    """
    caches, spoiled = (mlx_tq.make_prompt_cache(model, FORMAT) for _ in range(2))
    if not any(isinstance(cache, store.StoredCache) for cache in leaves(caches)):
        return None
    out = []
    for ids in (tokens(PROMPT), tokens(1)):
        with recorded() as (calls, _):
            want = forward(model, caches, ids)
        twin = copy.deepcopy(spoiled)
        with poisoned():
            got = forward(model, twin, ids)
        forward(model, spoiled, ids)
        decoded = not mx.array_equal(got, want).item()
        out.append(" and ".join(["packed"] * bool(calls) + ["decoded"] * decoded))
    return tuple(out)


def classify(found):
    """The class of a model of which this is what it reads: "fused", "mixed", "dense" or "none"."""
    if found is None:
        return "none"
    return {("packed",) * 2: "fused", ("decoded",) * 2: "dense"}.get(found, "mixed")
