"""`TQBatchKVCache`: mlx-lm's batched cache protocol over packed rows."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .cache import TQKVCache
from .codec import Layout
from .format import TQFormat
from .store import Fetched, Store, StoredCache, causal_mask, most_exact


def _integers(name: str, values: Sequence[int] | mx.array, least: int | None = 0) -> tuple[int, ...]:
    """A list or array of integers as a tuple."""
    out = tuple(values.tolist() if isinstance(values, mx.array) else values)
    if any(not isinstance(n, int) or isinstance(n, bool) or (least is not None and n < least) for n in out):
        raise ValueError(f"{name} must be ints{'' if least is None else f' of at least {least}'}, got {values}")
    return out


class TQBatchKVCache(StoredCache):
    """The KV caches of several sequences as one batch, compressed row by row as `TQKVCache` compresses one of them.

    Batch row b has left_padding[b] columns of padding, which are never stored, then its tokens; all rows end at the
    same column. Each row packs what leaves its own window, so its packed words are those of the sequence alone.
    mlx-lm makes these caches with `TQKVCache.merge`.

    Args:
        left_padding: columns of left padding of each batch row, as many as there are rows.
        format: a TQFormat, a preset's name, or None for the default.
        layer_index: selects the layer's rotation signs.
        fused: "auto" runs the kernels where they can run, "require" raises where they cannot, "never" uses MLX ops.

    Raises:
        ValueError: an unknown format or `fused`, or bad padding.
    """

    def __init__(
        self,
        left_padding: Sequence[int],
        format: TQFormat | str | None = None,
        layer_index: int = 0,
        *,
        fused: str = "auto",
    ):
        left = _integers("left_padding", left_padding)
        if not left:
            raise ValueError("left_padding must have an entry per batch row, got none")
        super().__init__(format, layer_index, fused)
        self._left, self._packed = left, (0,) * len(left)

    def _reset(self) -> None:
        super()._reset()
        self._left = self._packed = ()
        self._columns = 0
        # Right padding under way: (columns of it, tokens or None) of each row since `prepare`, and columns so far.
        self._right: tuple[tuple[int, ...], tuple[int, ...] | None] | None = None
        self._arrived = 0

    @property
    def _batch(self) -> int:
        return len(self._left)

    def _tokens(self, columns: int) -> list[int]:
        """Tokens of each row when there are so many columns, right padding included."""
        return [max(0, columns - left) for left in self._left]

    def _layout(self) -> Layout:
        tokens = self._tokens(self._columns)
        first = tuple(min(self.format.sinks, n) for n in tokens)
        recent = tuple(n - f - p for n, f, p in zip(tokens, first, self._packed, strict=True))
        return Layout(tuple(min(left, self._columns) for left in self._left), first, self._packed, recent)

    # -------------------------------------------------------------- tokens in

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Fetched:
        """Appends keys `(B, n_kv_heads, L, D)` and values `(B, n_kv_heads, L, Dv)`; returns all rows for attention.

        Those are arrays (`TQView`), but `PackedRows` for callers whose source shows that they only attend, see
        `callers.py`. Attention sees the appended rows exactly where the format has a window. Raises ValueError for
        shapes or dtypes that do not fit what the cache holds; then nothing has been stored.
        """
        self._accept(keys, values)
        length, before = keys.shape[2], self._tokens(self._columns)
        after = self._tokens(self._columns + length)
        held = [n - packed for n, packed in zip(before, self._packed, strict=True)]
        new = [n - tokens for n, tokens in zip(after, before, strict=True)]
        counts = list(zip(held, self._packed, new, self._right_padding(self._arrived + length), strict=True))
        if len(set(counts)) == 1:
            counts = counts[:1]  # rows alike are moved in one piece
        exacts, leaving = self._append(keys, values, *(list(c) for c in zip(*counts, strict=True)))
        self._columns += length
        self._arrived += length
        layout = self._layout()
        if any(leaving):
            if len(leaving) == 1:
                leaving = leaving * self._batch
            self._packed = tuple(p + n for p, n in zip(self._packed, leaving, strict=True))
            # With a window, this call's attention sees the rows that are being packed as they came.
            layout = layout if self.format.paged else self._layout()
        return self._fetch(exacts, layout)

    def _right_padding(self, arrived: int) -> tuple[int, ...]:
        """Last tokens of each row that are right padding, or may be, of so many since `prepare`."""
        if self._right is None:
            return (0,) * self._batch
        padding, lengths = self._right
        if lengths is None:
            return tuple(min(n, arrived) for n in padding)
        return tuple(max(0, arrived - n) for n in lengths)

    def prepare(self, *, left_padding=None, lengths=None, right_padding=None) -> None:
        """Announces a padded prompt: left padding of an empty cache, or right padding that `finalize` takes out again.

        Args:
            left_padding: more columns of left padding per row.
            lengths: tokens of each row of the prompt. Without them, tokens that may be padding are packed late.
            right_padding: columns of right padding of each row of the prompt.

        Raises:
            ValueError: an entry is missing or negative, left padding of a cache that holds tokens, or a prompt that
                is not finalized.
        """
        left, lengths, right = (
            None if values is None else self._per_row(name, values)
            for name, values in (
                ("left_padding", left_padding),
                ("lengths", lengths),
                ("right_padding", right_padding),
            )
        )
        if left is not None and not self.empty():
            raise ValueError("left_padding must be given before the first tokens, got a cache that holds some")
        if right is not None and max(right) > 0:
            if self._right is not None and self._arrived:
                raise ValueError("prepare must follow finalize, got a prompt with right padding that is under way")
            if lengths is not None and len({n + r for n, r in zip(lengths, right, strict=True)}) > 1:
                raise ValueError(f"lengths and right_padding must add up alike, got {lengths} and {right}")
            self._right, self._arrived = (right, lengths), 0
        if left is not None:
            self._left = tuple(a + b for a, b in zip(self._left, left, strict=True))

    def _per_row(self, name: str, values: Sequence[int] | mx.array) -> tuple[int, ...]:
        out = _integers(name, values)
        if len(out) != self._batch:
            raise ValueError(f"{name} must have {self._batch} entries, one per batch row, got {values}")
        return out

    def finalize(self) -> None:
        """Turns the right padding of the prompt into left padding."""
        padding = self._right_padding(self._arrived)
        self._left = tuple(left + n for left, n in zip(self._left, padding, strict=True))
        self._right = None
        if not self.empty():
            held = most_exact(self._layout())
            for store in self._stores:
                store.reserve_exact(self._batch, held)

    def _need_finalized(self, name: str) -> None:
        if self._right is not None:
            raise ValueError(f"{name} must follow finalize, got a prompt with right padding that is under way")

    # -------------------------------------------------------------- tokens held

    @property
    def offset(self) -> mx.array:
        """Tokens of each batch row, int32 `(B,)`; a new array each time. Negative while left padding is to come."""
        return mx.array([self._columns - left for left in self._left])

    @property
    def left_padding(self) -> mx.array:
        """Columns of left padding of each batch row, int32 `(B,)`; a new array each time."""
        return mx.array(list(self._left))

    def size(self) -> int:
        """Columns of the attention matrix: padding and tokens."""
        return self._columns

    def make_mask(self, N: int, return_array: bool = False, **kwargs) -> mx.array:
        """The bool mask `(B, 1, N, columns)` of the next N columns, as mlx-lm's BatchKVCache makes it."""
        return causal_mask(N, self._columns, left_padding=self.left_padding, **kwargs)

    # -------------------------------------------------------------- tokens and rows out

    def trim(self, n: int) -> int:
        """Drops the last n columns (all, if there are fewer); returns how many.

        Raises ValueError unless n is an int of at least 0.
        """
        if not isinstance(n, int) or n < 0:
            raise ValueError(f"n must be an int of at least 0, got {n!r}")
        n = min(n, self._columns)
        keep = [max(0, self._columns - n - left) for left in self._left]
        self._packed = tuple(self._cut(list(self._packed), keep))
        self._columns -= n
        self._arrived = max(0, self._arrived - n)
        return n

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keeps these batch rows, in this order, and drops the padding they have in common.

        Raises ValueError for no row or one that does not exist.
        """
        rows = self._row_numbers(batch_indices)
        same = rows == list(range(self._batch))
        pick = lambda counts: tuple(counts[i] for i in rows)  # noqa: E731
        self._left, self._packed = pick(self._left), pick(self._packed)
        if self._right is not None:
            padding, lengths = self._right
            self._right = (pick(padding), None if lengths is None else pick(lengths))
        common = min(self._columns, *self._left)
        self._left = tuple(left - common for left in self._left)
        self._columns -= common
        if not self.empty() and not same:
            layout = self._layout()
            for store in self._stores:
                store.select(rows, max(layout.packed), most_exact(layout))

    def _row_numbers(self, indices: Sequence[int] | mx.array) -> list[int]:
        found = _integers("batch_indices", indices, None)
        if not found or any(not -self._batch <= i < self._batch for i in found):
            raise ValueError(f"batch_indices must be one or more rows of {self._batch}, got {indices}")
        return [i % self._batch for i in found]

    def extend(self, other: TQBatchKVCache) -> None:
        """Appends the batch rows of another cache, which stays as it is. Either may be empty.

        Raises ValueError where format, layer, heads, widths or dtypes differ, or for a prompt that is not finalized.
        """
        for cache in (self, other):
            if not isinstance(cache, TQBatchKVCache):
                raise ValueError(f"other must be a TQBatchKVCache, got {type(cache).__name__}")
            cache._need_finalized("extend")
        _check_alike("extend", [self, other])
        self._stack([self, other])

    def _stack(self, caches: list[StoredCache]) -> None:
        """Takes the batch rows of all caches, one of which may be this one."""
        columns = max(cache.size() for cache in caches)
        left, packed = [], []
        for cache in caches:
            mine = cache._left if isinstance(cache, TQBatchKVCache) else (0,)
            left += [n + columns - cache.size() for n in mine]
            packed += cache._packed if isinstance(cache, TQBatchKVCache) else (cache._packed,)
        batches = [max(1, cache._batch) for cache in caches]
        parts = [list(zip((cache._stores[i] for cache in caches), batches, strict=True)) for i in (0, 1)]
        self._left, self._packed, self._columns = tuple(left), tuple(packed), columns
        if all(cache.empty() for cache in caches):
            return
        layout = self._layout()
        for store, part in zip(self._stores, parts, strict=True):
            store.stack(part, max(layout.packed), most_exact(layout))

    def extract(self, idx: int) -> TQKVCache:
        """The cache of one batch row, in arrays of its own. Raises ValueError for a row that does not exist."""
        (row,) = self._row_numbers([idx])
        self._need_finalized("extract")
        cache = TQKVCache(self.format, self.layer_index, fused=self.fused)
        tokens, packed = self._tokens(self._columns)[row], self._packed[row]
        if tokens:
            cache._hold(*(store.extract(row, packed, tokens - packed) for store in self._stores))
            cache._batch = 1
            cache._split(tokens, packed)
        return cache

    @classmethod
    def merge(cls, caches: Sequence[TQKVCache]) -> TQBatchKVCache:
        """A batch of single sequences, padded on the left; any of them may be empty.

        Raises ValueError where one is not a TQKVCache of one batch row, or where they differ in format, layer, heads,
        widths or dtypes.
        """
        caches = list(caches)
        for cache in caches:
            if not isinstance(cache, TQKVCache) or cache._batch > 1:
                got = f"{cache._batch} batch rows" if isinstance(cache, TQKVCache) else type(cache).__name__
                raise ValueError(f"caches must be TQKVCaches of one batch row each, got {got}")
        if not caches:
            raise ValueError("caches must be one or more TQKVCaches, got none")
        _check_alike("merge", caches)
        out = cls([0] * len(caches), caches[0].format, caches[0].layer_index, fused=caches[0].fused)
        out._stack(caches)
        return out

    # -------------------------------------------------------------- saving

    def _counts(self) -> dict:
        return {
            "left_padding": self._left,
            "columns": self._columns,
            "packed": self._packed,
            "right_padding": None if self._right is None else [*self._right, self._arrived],
        }

    def _set_counts(self, header: dict) -> None:
        self._left = _integers("left_padding", header["left_padding"])
        self._packed = _integers("packed", header["packed"])
        (self._columns,) = _integers("columns", [header["columns"]])
        if header["right_padding"] is not None:
            padding, lengths, arrived = header["right_padding"]
            lengths = None if lengths is None else self._per_row("lengths", lengths)
            self._right = (self._per_row("right_padding", padding), lengths)
            (self._arrived,) = _integers("arrived", [arrived])
        layout, page = self._layout(), self.format.page
        if not self._left or any(n < 0 for n in layout.recent):
            raise ValueError(f"packed must be counts of tokens, got {self._packed} of {layout}")
        if self.format.paged and any(n % page for n in self._packed):
            raise ValueError(f"packed must be whole pages of {page} tokens, got {self._packed}")
        exact = zip(layout.first, layout.recent, self._right_padding(self._arrived), strict=True)
        room = self._keys.exact_capacity
        if any(f + r - d > room for f, r, d in exact):
            raise ValueError(f"exact tokens must be at most {room}, got {layout}")
        if header["rows"] is None:
            if self._columns:
                raise ValueError(f"columns must be 0 without rows, got {self._columns}")
        elif header["rows"][0][0] != self._batch:
            raise ValueError(f"rows must have {self._batch} batch rows, got {header['rows']}")


def _check_alike(what: str, caches: Sequence[StoredCache]) -> None:
    """Raises ValueError unless the rows of all caches may lie in one batch."""
    for name in ("format", "layer_index"):
        got = [getattr(cache, name) for cache in caches]
        if any(value != got[0] for value in got):
            raise ValueError(f"{what} needs caches of one {name}, got {got}")
    for i in (0, 1):
        stores: list[Store] = [cache._stores[i] for cache in caches if not cache.empty()]
        if len({store.described for store in stores}) > 1:
            got = [store.described for store in stores]
            raise ValueError(f"{what} needs {stores[0].kind} of one (n_kv_heads, head_dim, dtype), got {got}")
