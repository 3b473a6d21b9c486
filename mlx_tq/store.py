"""What the single and the batched cache share: where rows are kept, and how tokens enter, leave and are saved.

Every batch row holds its tokens in order: the first ones exact, then packed ones, then recent ones exact again. Rows
are left-aligned in their arrays: slot j of the packed regions is the row's j-th packed token, and the exact buffer has
the first tokens and then the recent ones. A number of tokens is given per batch row, or once where all rows are alike.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from . import kernels
from .codec import (
    FLOAT_DTYPES,
    Layout,
    Memo,
    PackedRows,
    check_array,
    check_shape,
    decode_regions,
    live_regions,
    page_means,
    quantise,
)
from .format import TQFormat
from .packing import Regions, region_shapes
from .rotation import layer_signs, to_dtype
from .view import TQView, keep_hook, takes_rows, views

STATE_VERSION = 2
FUSED = ("auto", "require", "never")
_MIN_CAPACITY = 256
# What an update returns: views, or the rows themselves where nothing but attention sees them.
Fetched = tuple[TQView, TQView] | tuple[PackedRows, PackedRows]


def _room(tokens: int) -> int:
    """Capacity for so many packed tokens."""
    return -(-tokens // _MIN_CAPACITY) * _MIN_CAPACITY


def write_rows(array: mx.array, starts: Sequence[int], new: mx.array, rows: Sequence[int] | None = None) -> mx.array:
    """`array` with new tokens at starts[i] of axis 2: a new array, in the same buffer unless others hold it.

    Shapes: array `(B, H, capacity, ...)`, new `(R, H, n, ...)` for the R batch rows `rows`, or for all.
    """
    count = new.shape[2]
    if rows is None and len(starts) > 1 and len(set(starts)) > 1:
        index = mx.array(np.array(starts, np.int32)[:, None, None] + np.arange(count, dtype=np.int32))
        return mx.put_along_axis(array, index.reshape(index.shape + (1,) * (array.ndim - 3)), new, axis=2)
    out = array.__copy__()  # mx.array(array) would be one more node of the graph
    if rows is None:
        out[:, :, starts[0] : starts[0] + count] = new
    else:
        for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
            out[row : row + 1, :, start : start + count] = new[i : i + 1]
    return out


def take_tokens(array: mx.array, spans: list[list[tuple[int, int]]]) -> mx.array:
    """Tokens of `array` `(B, H, L, D)` from the spans [start, stop) of each batch row, or from spans[0] of all.

    Rows that get fewer tokens end in any.
    """
    if len(spans) == 1:
        parts = [array[:, :, start:stop] for start, stop in _joined(spans[0])]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
    tokens = [np.concatenate([np.arange(*span) for span in row]) for row in spans]
    index = np.zeros((len(tokens), max(map(len, tokens))), np.int32)
    for row, taken in zip(index, tokens, strict=True):
        row[: len(taken)] = taken
    return mx.take_along_axis(array, mx.array(index)[:, None, :, None], axis=2)


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans that are not empty, or one that is; those that go on where another ends are one."""
    out = []
    for start, stop in spans:
        if out and start == out[-1][1]:
            out[-1] = (out[-1][0], stop)
        elif start < stop:
            out.append((start, stop))
    return out or spans[:1]


def _fit(array: mx.array | None, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """The array cut or grown along axis 2 to `shape`; nothing becomes zeros."""
    if array is None:
        return mx.zeros(shape, dtype)
    array = array[:, :, : shape[2]]
    if array.shape == shape:
        return array
    return mx.pad(array, [(0, 0), (0, 0), (0, shape[2] - array.shape[2])] + [(0, 0)] * (array.ndim - 3))


def causal_mask(
    n: int,
    offset: int,
    *,
    window_size: int | None = None,
    right_padding: mx.array | None = None,
    left_padding: mx.array | None = None,
) -> mx.array:
    """Bool mask of n new tokens behind `offset` columns, `(n, columns)` or with padding `(B, 1, n, columns)`."""
    column = mx.arange(offset + n)[None]
    row = mx.arange(offset, offset + n)[:, None]
    mask = row >= column
    if window_size is not None:
        mask = mask & (row < column + window_size)
    if right_padding is not None:
        mask = mask & (column < mx.expand_dims(offset + n - right_padding, (1, 2, 3)))
    if left_padding is not None:
        mask = mask & (mx.expand_dims(left_padding, (1, 2, 3)) <= column)
    return mask


@lru_cache(maxsize=256)  # all layers of a model ask the same at each step
def _check_new(shape, value_shape, dtype: mx.Dtype, value_dtype: mx.Dtype, batch: int, held: tuple) -> None:
    """Raises ValueError where new rows are no rows, or do not go with what a cache holds: `Store.described`."""
    check_shape("keys", shape, dtype)
    check_shape("values", value_shape, value_dtype)
    if shape[:3] != value_shape[:3]:
        raise ValueError(f"keys and values must agree in (B, n_kv_heads, L), got {shape} and {value_shape}")
    if not held and batch not in (0, shape[0]):
        raise ValueError(f"keys must have {batch} batch rows like the cache, got {shape}")
    new = ("keys", shape, dtype), ("values", value_shape, value_dtype)
    for (kind, got, got_dtype), (heads, dim, name) in zip(new, held, strict=bool(held)):
        want, want_dtype = (batch, heads, shape[2], dim), getattr(mx, name)
        if got != want or got_dtype != want_dtype:
            raise ValueError(f"{kind} must be {want_dtype} {want} like the rows held, got {got_dtype} {got}")


class Store:
    """Keys or values of one layer: growing packed regions and a buffer of exact rows."""

    def __init__(self, kind: str, format: TQFormat, layer_index: int):
        self.kind, self.format, self.layer_index = kind, format, layer_index
        self.n_kv_heads = self.dim = self.dtype_name = None
        self.memo = Memo()
        self.regions: Regions | None = None
        self.exact: mx.array | None = None
        # Exact rows that a batch row without right padding has at most; while there are fewer, none is packed.
        self.exact_capacity = format.sinks + (format.window + format.page if format.paged else 0)

    @property
    def regions(self) -> Regions | None:
        """The packed rows."""
        return self._regions

    @regions.setter
    def regions(self, regions: Regions | None) -> None:
        self._regions = regions
        self.memo.found = None  # would keep the old ones alive, and updates in their buffers need them gone

    @property
    def dtype(self) -> mx.Dtype:
        return getattr(mx, self.dtype_name)  # a name, because mx.Dtype cannot be deep-copied

    def describe(self, x: mx.array) -> None:
        """Takes heads, width and dtype from the first rows `(B, n_kv_heads, L, D)`."""
        self.n_kv_heads, self.dim = x.shape[1], x.shape[3]
        self.dtype_name = str(x.dtype).rpartition(".")[2]

    @property
    def described(self) -> tuple[int | None, int | None, str | None]:
        """Heads, width and dtype, as `state` has them."""
        return self.n_kv_heads, self.dim, self.dtype_name

    @property
    def signs(self) -> tuple[mx.array, mx.array]:
        return layer_signs(self.format.seed, self.layer_index, self.dim)

    def append(self, batch: int, new: Regions, starts: Sequence[int], rows: Sequence[int] | None) -> None:
        """Puts packed rows at `starts` of the batch rows `rows`, or of all."""
        self._reserve(batch, max(starts) + new.codes.shape[2])
        written = {}
        for name, (_, _, span) in self._shapes().items():
            at = [start // span for start in starts]
            written[name] = write_rows(getattr(self.regions, name), at, getattr(new, name), rows)
        self.regions = Regions(**written)

    def _shapes(self) -> dict[str, tuple[tuple[int, ...], mx.Dtype, int]]:
        return region_shapes(self.format, self.kind, self.dim, self.dtype)

    def _reserve(self, batch: int, needed: int) -> None:
        """Grows the regions by a quarter or more, so that copies stay a constant share of all work."""
        capacity = 0 if self.regions is None else self.regions.codes.shape[2]
        if needed > capacity:
            capacity = _room(max(needed, capacity + capacity // 4))
            self.regions = self._fitted(batch, capacity)

    def _fitted(self, batch: int, capacity: int) -> Regions | None:
        """The regions with another capacity."""
        if not capacity:
            return None
        out = {}
        for name, (row, dtype, span) in self._shapes().items():
            held = None if self.regions is None else getattr(self.regions, name)
            out[name] = _fit(held, (batch, self.n_kv_heads, capacity // span, *row), dtype)
        return Regions(**out)

    def put_exact(self, rows: mx.array, starts: Sequence[int]) -> None:
        """Puts exact rows `(B, n_kv_heads, n, D)` at `starts` of the batch rows."""
        if self.exact is None:
            self.replace_exact(rows)
        else:
            self.exact = write_rows(self.exact, starts, rows)

    def replace_exact(self, rows: mx.array) -> None:
        """Makes these rows all exact ones there are."""
        batch, _, count, _ = rows.shape
        if self.exact is not None and self.exact.shape != self._exact_shape(batch, count):
            self.exact = None
        self.reserve_exact(batch, count)
        if self.exact is not None:
            self.exact = write_rows(self.exact, [0], rows)

    def keep_exact(self, rows: mx.array, first: list[int], recent: list[tuple[int, int]], firsts_held: bool) -> None:
        """Makes the first tokens of `rows` and the spans `recent` all exact rows; firsts_held: the first are there."""
        most = max(f + stop - start for f, (start, stop) in zip(first, recent, strict=True))
        if firsts_held and self.exact is not None and self.exact.shape == self._exact_shape(rows.shape[0], most):
            self.put_exact(take_tokens(rows, [[span] for span in recent]), first)
        else:
            spans = [[(0, f), span] for f, span in zip(first, recent, strict=True)]
            self.replace_exact(take_tokens(rows, spans))

    def reserve_exact(self, batch: int, held: int) -> None:
        """Gives the exact buffer its capacity, or room for `held` rows where they are more."""
        shape = self._exact_shape(batch, held)
        if not shape[2]:
            self.exact = None
        elif self.exact is None or self.exact.shape != shape:
            self.exact = mx.contiguous(_fit(self.exact, shape, self.dtype))

    def _exact_shape(self, batch: int, held: int) -> tuple[int, ...]:
        return (batch, self.n_kv_heads, max(self.exact_capacity, held), self.dim)

    def decode(self, start: int, stop: int, row: int | None) -> mx.array:
        """Packed tokens [start, stop) of one batch row, or of all, as rows in their dtype."""
        regions = live_regions(self.snapshot(None, None, "never"), start, stop)
        if row is not None:
            regions = Regions(*(a if a is None else a[row : row + 1] for a in regions))
        return to_dtype(decode_regions(regions, self.format, self.kind, self.dim, self.signs), self.dtype)

    def select(self, rows: list[int], packed: int, held: int) -> None:
        """Keeps these batch rows, in this order, and capacity for what they hold."""
        index = mx.array(np.array(rows, np.int32))
        pick = lambda a: None if a is None else mx.take(a, index, axis=0)  # noqa: E731
        if self.regions is not None:
            capacity = min(_room(packed), self.regions.codes.shape[2])
            fitted = self._fitted(self.regions.codes.shape[0], capacity)
            self.regions = None if fitted is None else Regions(*map(pick, fitted))
        if self.exact is not None:
            self.exact = pick(self.exact)
            self.reserve_exact(len(rows), held)

    def stack(self, parts: list[tuple[Store, int]], packed: int, held: int) -> None:
        """Takes the batch rows of several stores, given with their batch sizes; `packed` and `held` are the most."""
        self.n_kv_heads, self.dim, self.dtype_name = next(s.described for s, _ in parts if s.dim is not None)
        fitted, exacts = [], []
        capacity, exact = _room(packed), max(self.exact_capacity, held)
        for store, batch in parts:
            part = Store(self.kind, self.format, self.layer_index)
            part.n_kv_heads, part.dim, part.dtype_name = self.described
            part.regions = store.regions
            fitted.append(part._fitted(batch, capacity))
            exacts.append(_fit(store.exact, (batch, self.n_kv_heads, exact, self.dim), self.dtype))
        self.regions = None
        if capacity:
            fields = zip(*fitted, strict=True)
            self.regions = Regions(*(None if f[0] is None else mx.concatenate(f, axis=0) for f in fields))
        self.exact = mx.concatenate(exacts, axis=0) if exact else None

    def extract(self, row: int, packed: int, held: int) -> Store:
        """A store of one batch row alone, in arrays of its own."""
        out = Store(self.kind, self.format, self.layer_index)
        out.n_kv_heads, out.dim, out.dtype_name = self.described
        if packed:
            regions = self._fitted(self.regions.codes.shape[0], min(_room(packed), self.regions.codes.shape[2]))
            out.regions = Regions(*(a if a is None else mx.contiguous(a[row : row + 1]) for a in regions))
        if self.exact is not None:
            out.replace_exact(self.exact[row : row + 1, :, :held])
        return out

    def snapshot(self, exact: mx.array | None, layout: Layout, fused: str) -> PackedRows:
        rows = PackedRows(
            self.kind,
            self.format,
            self.dim,
            self.layer_index,
            self.dtype,
            self._regions,
            exact,
            layout,
            self.n_kv_heads,
            fused,
        )
        rows.memo = self.memo
        return rows

    def arrays(self) -> list[mx.array]:
        held = [a for a in (self.regions or ()) if a is not None]
        return held if self.exact is None else [*held, self.exact]

    def replace_arrays(self, arrays: list[mx.array]) -> None:
        """Takes back what `arrays` gave, in the same order and shapes."""
        got, want = [a.shape for a in arrays], [a.shape for a in self.arrays()]
        if got != want:
            raise ValueError(f"{self.kind} must be arrays of shapes {want}, got {got}")
        arrays = list(arrays)
        if self.exact is not None:
            self.exact = arrays.pop()
        if self.regions is not None:
            self.regions = Regions(*(None if a is None else arrays.pop(0) for a in self.regions))


class StoredCache:
    """Base of the caches: the part of mlx-lm's protocol that does not depend on how tokens are counted.

    A subclass has `_batch` (batch rows, or 0 where the first update decides), `_layout()` and, for `state`,
    `_counts()` and `_set_counts(header)`.
    """

    def __init__(self, format: TQFormat | str | None, layer_index: int, fused: str):
        if fused not in FUSED:
            raise ValueError(f"fused must be one of {FUSED}, got {fused!r}")
        self.format = TQFormat.resolve(format)
        self.layer_index = layer_index
        self.fused = fused
        self._reset()

    def _reset(self) -> None:
        self._hold(*(Store(kind, self.format, self.layer_index) for kind in ("keys", "values")))

    def _hold(self, keys: Store, values: Store) -> None:
        self._keys, self._values = keys, values
        values.memo = keys.memo  # new regions of either make it old
        keys.memo.accepted = None  # the stores may come from another cache

    @property
    def _stores(self) -> tuple[Store, Store]:
        return self._keys, self._values

    # -------------------------------------------------------------- tokens in

    def _accept(self, keys: mx.array, values: mx.array) -> None:
        """Checks new rows, but for those like the last ones; the first ones say what the cache holds."""
        check_array("keys", keys)
        check_array("values", values)
        rows = keys.shape, values.shape, keys.dtype, values.dtype, self._batch
        memo = self._keys.memo
        if rows == memo.accepted and self.fused != "require":
            return
        self._check(keys, values)
        keep_hook(memo)
        memo.accepted = rows
        if self.empty():
            for store, x in zip(self._stores, (keys, values), strict=True):
                store.describe(x)

    def _append(
        self, keys: mx.array, values: mx.array, held: list[int], packed: list[int], new: list[int], dropped: list[int]
    ) -> tuple[list[mx.array | None], list[int]]:
        """Stores the last new[i] of L rows `(B, H, L, D)` behind packed[i] packed and held[i] exact ones.

        The last dropped[i] of all these are right padding and never leave the exact rows. Returns the exact rows that
        this call's attention sees, and how many tokens of each row were packed.
        """
        length = keys.shape[2]
        if min(new) == length and max(held) + length < self._keys.exact_capacity:
            return self._put(keys, values, held), [0] * len(held)
        stores = self._stores
        paged = self.format.paged
        total = [h + n for h, n in zip(held, new, strict=True)]
        first = [min(self.format.sinks, p + t) for p, t in zip(packed, total, strict=True)]
        recent = [t - f for t, f in zip(total, first, strict=True)]
        leaving = [self._leaving(r - d) for r, d in zip(recent, dropped, strict=True)]
        if not paged and length and {*new, *recent, *leaving} == {length}:
            self._pack(keys, values, (0, length), packed, None)  # the exact rows stay as they are
        else:
            exacts = [keys, values]
            most = max(held)
            if most:
                pairs = zip(stores, exacts, strict=True)
                exacts = [mx.concatenate([store.exact[:, :, :most], rows], axis=2) for store, rows in pairs]
            end = most + length
            spans = [[(0, h), (end - n, end)] for h, n in zip(held, new, strict=True)]
            exacts = [take_tokens(rows, spans) for rows in exacts]
            for count in sorted(set(leaving) - {0}):
                rows = [i for i, gone in enumerate(leaving) if gone == count]
                self._pack_rows(exacts, first, packed, rows, count)
            recents = [(f + gone, t) for f, gone, t in zip(first, leaving, total, strict=True)]
            firsts_held = len(set(first)) == 1 and min(held) >= first[0]
            for store, rows in zip(stores, exacts, strict=True):
                store.keep_exact(rows, first, recents, firsts_held)
            if paged:
                return exacts, leaving
        return [store.exact for store in stores], leaving

    def _put(self, keys: mx.array, values: mx.array, held: list[int]) -> tuple[mx.array, mx.array]:
        """Stores rows `(B, H, L, D)` behind held[i] exact ones, which have room; returns all exact rows."""
        self._keys.put_exact(keys, held)
        self._values.put_exact(values, held)
        return self._keys.exact, self._values.exact

    def _pack_rows(self, exacts: list[mx.array], first: list[int], packed: list[int], rows: list[int], count: int):
        """Packs `count` exact tokens, behind the first ones, of the batch rows `rows`."""
        if len(rows) == len(first):
            rows = None
        else:
            first, packed = ([counts[i] for i in rows] for counts in (first, packed))
            index = mx.array(np.array(rows, np.int32))
            exacts = [mx.take(x, index, axis=0) for x in exacts]
        (start,) = set(first)  # a row packs once it has all its first tokens
        self._pack(*exacts, (start, start + count), packed, rows)

    def _kernels_run(self) -> bool:
        dtypes = self._keys.dtype_name == self._values.dtype_name
        return self.fused != "never" and dtypes and kernels.reason(self._keys.dim, self._values.dim) is None

    def _encode(self, keys: mx.array, values: mx.array, tokens: tuple[int, int]) -> Sequence[Regions]:
        """Tokens [start, stop), whole pages where the format is paged, of rows `(R, H, L, D)` in packed regions."""
        if self._kernels_run():
            return kernels.encode(keys, values, None, self.format, self.layer_index, tokens)
        keys, values = (x[:, :, tokens[0] : tokens[1]] for x in (keys, values))
        mean = page_means(keys, self.format.page) if self.format.centered_keys else None
        pairs = ((self._keys, keys, mean), (self._values, values, None))
        return [quantise(x, self.format, store.kind, store.signs, m) for store, x, m in pairs]

    def _pack(
        self,
        keys: mx.array,
        values: mx.array,
        tokens: tuple[int, int],
        starts: list[int],
        rows: list[int] | None,
    ) -> None:
        """Packs tokens [start, stop) of `(R, H, L, D)` rows at `starts` of batch rows `rows`, or all; paged: pages."""
        for store, new in zip(self._stores, self._encode(keys, values, tokens), strict=True):
            store.append(self._batch, new, starts, rows)

    def _leaving(self, recent: int) -> int:
        """How many of `recent` exact tokens are to be packed now."""
        if not self.format.paged:
            return max(0, recent)
        return max(0, recent - self.format.window) // self.format.page * self.format.page

    def _check(self, keys: mx.array, values: mx.array) -> None:
        held = () if self.empty() else (self._keys.described, self._values.described)
        _check_new(keys.shape, values.shape, keys.dtype, values.dtype, self._batch, held)
        why = kernels.reason(keys.shape[3], values.shape[3]) if self.fused == "require" else None
        if why is not None:
            raise ValueError(f'fused="require", but {why}')

    # -------------------------------------------------------------- tokens held

    def _fetch(self, exacts: Sequence[mx.array | None], layout: Layout) -> Fetched:
        """What `update_and_fetch`, which calls this, returns to its caller: see there."""
        keys = self._keys.snapshot(exacts[0], layout, self.fused)
        values = self._values.snapshot(exacts[1], layout, self.fused)
        if not takes_rows(sys._getframe(2)):
            return views(keys, values)
        kernels.prepare_again(keys, values)  # now, for all that attend to these rows
        return keys, values

    @property
    def rows(self) -> tuple[PackedRows, PackedRows]:
        """The packed keys and values, as `mlx_tq.attention` takes them. Raises ValueError when the cache is empty."""
        if self.empty():
            raise ValueError("the cache must hold tokens, got an empty one")
        layout = self._layout()
        return tuple(store.snapshot(store.exact, layout, self.fused) for store in self._stores)

    def keys_and_values(self) -> tuple[TQView, TQView]:
        """Views of all rows held."""
        return views(*self.rows)

    def empty(self) -> bool:
        """Whether no token was ever stored."""
        return self._keys.dim is None

    @property
    def nbytes(self) -> int:
        """Bytes held, spare capacity included."""
        return sum(a.nbytes for store in self._stores for a in store.arrays())

    # -------------------------------------------------------------- tokens out

    def is_trimmable(self) -> bool:
        return True

    def _cut(self, packed: list[int], keep: list[int]) -> list[int]:
        """Drops all but the first keep[i] tokens of each batch row; returns how many of them are still packed.

        A page cut in two goes back among the exact rows, as it decodes.
        """
        out = []
        for i, (count, kept) in enumerate(zip(packed, keep, strict=True)):
            most = max(0, kept - self.format.sinks)
            whole = most // self.format.page * self.format.page if self.format.paged else most
            if count > most > whole:
                rows = None if len(packed) == 1 else [i]
                for store in self._stores:
                    cut = store.decode(whole, most, None if rows is None else i)
                    store.exact = write_rows(store.exact, [self.format.sinks], cut, rows)
            out.append(whole if count > most else count)
        return out

    # -------------------------------------------------------------- saving

    @property
    def keys(self) -> list[mx.array]:
        """The arrays that hold the keys, for code that ties them into a graph; assignable."""
        return self._keys.arrays()

    @keys.setter
    def keys(self, arrays: list[mx.array]) -> None:
        self._keys.replace_arrays(arrays)

    @property
    def values(self) -> list[mx.array]:
        """The arrays that hold the values; assignable."""
        return self._values.arrays()

    @values.setter
    def values(self, arrays: list[mx.array]) -> None:
        self._values.replace_arrays(arrays)

    @property
    def state(self) -> list:
        """Everything needed to restore the cache: a JSON header, then the live part of every array."""
        empty = self.empty()
        header = {
            "version": STATE_VERSION,
            "format": self.format.as_dict(),
            "layer_index": self.layer_index,
            **self._counts(),
            "rows": None if empty else [[self._batch, *store.described] for store in self._stores],
        }
        arrays = []
        for store in () if empty else self._stores:
            for name, shape, _ in self._saved(store):
                array = store.exact if name == "exact" else getattr(store.regions, name)
                arrays.append(array[:, :, : shape[2]])
        return [json.dumps(header), *arrays]

    @state.setter
    def state(self, state: list) -> None:
        fresh = type(self).__new__(type(self))
        fresh.fused = getattr(self, "fused", "auto")
        fresh._load(*_read_header(type(self).__name__, state))
        self.__dict__.update(fresh.__dict__)  # all or, where the state is refused, nothing

    @classmethod
    def from_state(cls, state: list):
        """A cache from `state`. Raises ValueError where the state is not one of ours, or is damaged."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def _load(self, header: dict, arrays: list) -> None:
        try:
            self.format = TQFormat(**header["format"])
            self.layer_index = header["layer_index"]
            self._reset()
            rows = header["rows"]
            if rows is not None:
                for store, row in zip(self._stores, rows, strict=True):
                    _, store.n_kv_heads, store.dim, store.dtype_name = row
                self._check_rows(rows)
            self._set_counts(header)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"state has a damaged header: {error}") from None
        for store in () if self.empty() else self._stores:
            loaded = {}
            for name, shape, dtype in self._saved(store):
                array = arrays.pop(0) if arrays else None
                got = (array.shape, array.dtype) if isinstance(array, mx.array) else type(array).__name__
                if got != (shape, dtype):
                    raise ValueError(f"state's {store.kind}.{name} must be {dtype} {shape}, got {got}")
                loaded[name] = mx.contiguous(array)  # kernels take whole buffers
            exact = loaded.pop("exact", None)
            if exact is not None:
                store.replace_exact(exact)
            store.regions = Regions(**loaded) if loaded else None
        if arrays:
            raise ValueError(f"state must hold the arrays of its header and no more, got {len(arrays)} more")

    def _saved(self, store: Store) -> list[tuple[str, tuple[int, ...], mx.Dtype]]:
        """Name, shape and dtype of each array of a store that `state` holds."""
        layout, out, head = self._layout(), [], (self._batch, store.n_kv_heads)
        packed, held = max(layout.packed), most_exact(layout)
        if packed:
            for name, (row, dtype, span) in region_shapes(self.format, store.kind, store.dim, store.dtype).items():
                out.append((name, (*head, -(-packed // span), *row), dtype))
        if max(held, store.exact_capacity):
            out.append(("exact", (*head, held, store.dim), store.dtype))
        return out

    def _check_rows(self, rows: list) -> None:
        for store in self._stores:
            layer_signs(self.format.seed, self.layer_index, store.dim)
        counts = [n for row in rows for n in row[:2]]
        same = rows[0][:2] == rows[1][:2] and all(isinstance(n, int) and n > 0 for n in counts)
        if not same or any(store.dtype not in FLOAT_DTYPES for store in self._stores):
            raise ValueError(f"rows must be alike in batch and heads and of a float dtype, got {rows}")


def most_exact(layout: Layout) -> int:
    """Exact tokens of the batch row that has the most."""
    return max(f + r for f, r in zip(layout.first, layout.recent, strict=True))


def _read_header(name: str, state: list) -> tuple[dict, list]:
    try:
        header, *arrays = state
        header = json.loads(header)
        version = header["version"]
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"state must come from a {name}, got something else ({error!r})") from None
    if version != STATE_VERSION:
        raise ValueError(f"state must have version {STATE_VERSION}, got {version!r}")
    return header, arrays
