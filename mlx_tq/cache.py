"""`TQKVCache`: mlx-lm's cache protocol over packed rows."""

from __future__ import annotations

import mlx.core as mx

from .codec import Layout
from .format import TQFormat
from .store import Fetched, StoredCache, causal_mask


class TQKVCache(StoredCache):
    """A KV cache of one attention layer, compressed as a `TQFormat` says.

    Implements mlx-lm's cache protocol; use it through `mlx_tq.enable` or `mlx_tq.make_prompt_cache`. The first tokens
    and a window of the last ones stay exact; the others are packed. `offset` counts tokens.

    Args:
        format: a TQFormat, a preset's name, or None for the default.
        layer_index: selects the layer's rotation signs.
        fused: "auto" runs the kernels where they can run, "require" raises where they cannot, "never" uses MLX ops.

    Raises:
        ValueError: an unknown format or `fused`.
    """

    def __init__(self, format: TQFormat | str | None = None, layer_index: int = 0, *, fused: str = "auto"):
        super().__init__(format, layer_index, fused)

    def _reset(self) -> None:
        super()._reset()
        self._batch = 0
        self._first = self._packed = self._recent = 0

    def _layout(self) -> Layout:
        return Layout.uniform(self._batch, self._first, self._packed, self._recent)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Fetched:
        """Appends keys `(B, n_kv_heads, L, D)` and values `(B, n_kv_heads, L, Dv)`; returns all rows for attention.

        Those are arrays (`TQView`), but `PackedRows` for callers whose source shows that they only attend, see
        `callers.py`. Attention sees the appended rows exactly where the format has a window. Raises ValueError for
        shapes or dtypes that do not fit what the cache holds; then nothing has been stored.
        """
        self._accept(keys, values)
        self._batch, _, length, _ = keys.shape
        held, packed = self._first + self._recent, self._packed
        if held + length < self._keys.exact_capacity:  # as with nearly all tokens: the short way
            exacts, leaving = self._put(keys, values, [held]), 0
        else:
            exacts, (leaving,) = self._append(keys, values, [held], [packed], [length], [0])
        total = held + packed + length
        self._split(total, packed)
        # With a window, this call's attention sees the rows that are being packed as they came.
        layout = self._layout()
        if leaving:
            self._split(total, packed + leaving)
            layout = layout if self.format.paged else self._layout()
        return self._fetch(exacts, layout)

    def _split(self, tokens: int, packed: int) -> None:
        """Sets what becomes of so many tokens: all but the packed ones are exact."""
        self._first = min(self.format.sinks, tokens)
        self._packed, self._recent = packed, tokens - self._first - packed

    @property
    def offset(self) -> int:
        """Tokens held."""
        return self._first + self._packed + self._recent

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """The mask of the next N tokens: None, "causal" or a bool array, as mlx-lm's KVCache makes it."""
        if N == 1 and window_size is None:
            return None
        if window_size is None and not return_array:
            return "causal"
        return causal_mask(N, self.offset, window_size=window_size)

    def trim(self, n: int) -> int:
        """Drops the last n tokens (all, if fewer are held); returns how many.

        Raises ValueError unless n is an int of at least 0.
        """
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"n must be an int of at least 0, got {n!r}")
        n = min(n, self.offset)
        keep = self.offset - n
        (packed,) = self._cut([self._packed], [keep])
        self._split(keep, packed)
        return n

    @classmethod
    def merge(cls, caches: list[TQKVCache]):
        """A `TQBatchKVCache` with one batch row per cache, see there."""
        from .batch import TQBatchKVCache  # which takes single caches apart and makes them

        return TQBatchKVCache.merge(caches)

    # -------------------------------------------------------------- saving

    def _counts(self) -> dict:
        return {"tokens": [self._first, self._packed, self._recent]}

    def _set_counts(self, header: dict) -> None:
        self._first, self._packed, self._recent = tokens = header["tokens"]
        if header["rows"] is not None:
            self._batch = header["rows"][0][0]
        ints = all(isinstance(n, int) and n >= 0 for n in tokens)
        fits = ints and self._first == min(self.format.sinks, self.offset)
        fits = fits and self._first + self._recent <= self._keys.exact_capacity
        whole = self._packed % self.format.page == 0 if fits and self.format.paged else fits
        if not whole or (any(tokens) and not self._batch):
            raise ValueError(f"tokens must fit {self.format}, got {tokens}")
