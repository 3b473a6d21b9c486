"""`TQKVCache`: mlx-lm's cache protocol over packed rows."""

from __future__ import annotations

import json

import mlx.core as mx

from . import kernels
from .codec import FLOAT_DTYPES, Layout, PackedRows, check_rows, dequantise, live_regions, page_means, quantise
from .format import TQFormat
from .packing import Regions, region_shapes
from .rotation import layer_signs, rotate, to_dtype
from .view import TQView, install_hook, views

STATE_VERSION = 1
FUSED = ("auto", "require", "never")
_MIN_CAPACITY = 256


def _write(array: mx.array, start: int, rows: mx.array) -> mx.array:
    """`array` with rows at [start, start + n) of axis 2: a new array, in the same buffer unless others hold it."""
    out = mx.array(array)
    out[:, :, start : start + rows.shape[2]] = rows
    return out


class _Store:
    """Keys or values of one layer: growing packed regions and a buffer of exact rows."""

    def __init__(self, kind: str, format: TQFormat, layer_index: int):
        self.kind, self.format, self.layer_index = kind, format, layer_index
        self.n_kv_heads = self.dim = self.dtype_name = None
        self.regions: Regions | None = None
        self.exact: mx.array | None = None

    @property
    def dtype(self) -> mx.Dtype:
        return getattr(mx, self.dtype_name)  # a name, because mx.Dtype cannot be deep-copied

    def describe(self, x: mx.array) -> None:
        """Takes heads, width and dtype from the first rows `(B, n_kv_heads, L, D)`."""
        self.n_kv_heads, self.dim = x.shape[1], x.shape[3]
        self.dtype_name = str(x.dtype).rpartition(".")[2]

    @property
    def exact_capacity(self) -> int:
        format = self.format
        return format.sinks + (format.window + format.page if format.paged else 0)

    @property
    def signs(self) -> tuple[mx.array, mx.array]:
        return layer_signs(self.format.seed, self.layer_index, self.dim)

    def append(self, new: Regions, used: int) -> None:
        """Puts packed rows behind `used` ones."""
        batch, _, count = new.codes.shape[:3]
        self.reserve(batch, used, used + count)
        written = {}
        for name, (_, _, span) in region_shapes(self.format, self.kind, self.dim, self.dtype).items():
            written[name] = _write(getattr(self.regions, name), used // span, getattr(new, name))
        self.regions = Regions(**written)

    def reserve(self, batch: int, used: int, needed: int) -> None:
        """Grows the regions by a quarter or more, so that copies stay a constant share of all work."""
        capacity = 0 if self.regions is None else self.regions.codes.shape[2]
        if needed <= capacity:
            return
        capacity = max(needed, capacity + capacity // 4)
        capacity = -(-capacity // _MIN_CAPACITY) * _MIN_CAPACITY
        grown = {}
        for name, (row, dtype, span) in region_shapes(self.format, self.kind, self.dim, self.dtype).items():
            array = mx.zeros((batch, self.n_kv_heads, capacity // span, *row), dtype)
            if used:
                array = _write(array, 0, getattr(self.regions, name)[:, :, : -(-used // span)])
            grown[name] = array
        self.regions = Regions(**grown)

    def put_exact(self, rows: mx.array, start: int) -> None:
        """Puts exact rows at [start, start + n); at 0 they replace all there are."""
        if not self.exact_capacity:
            return
        if not start:
            b, h, _, dim = rows.shape
            self.exact = mx.zeros((b, h, self.exact_capacity, dim), self.dtype)
        self.exact = _write(self.exact, start, rows)

    def snapshot(self, exact: mx.array | None, layout: Layout, fused: str) -> PackedRows:
        common = (self.format, self.dim, self.layer_index, self.dtype)
        return PackedRows(self.kind, *common, self.regions, exact, layout, self.n_kv_heads, fused)

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


class TQKVCache:
    """A KV cache of one attention layer, compressed as a `TQFormat` says.

    Implements mlx-lm's cache protocol; use it through `mlx_tq.enable` or `mlx_tq.make_prompt_cache`. The first tokens
    and a window of the last ones stay exact (both already rotated); the others are packed. `offset` counts tokens.

    Args:
        format: a TQFormat, a preset's name, or None for the default.
        layer_index: selects the layer's rotation signs.
        fused: "auto" runs the kernels where they can run, "require" raises where they cannot, "never" uses MLX ops.

    Raises:
        ValueError: an unknown format or `fused`.
    """

    def __init__(self, format: TQFormat | str | None = None, layer_index: int = 0, *, fused: str = "auto"):
        if fused not in FUSED:
            raise ValueError(f"fused must be one of {FUSED}, got {fused!r}")
        self.format = TQFormat.resolve(format)
        self.layer_index = layer_index
        self.fused = fused
        self._reset()

    def _reset(self) -> None:
        self._keys = _Store("keys", self.format, self.layer_index)
        self._values = _Store("values", self.format, self.layer_index)
        self._batch = 0
        self._first = self._packed = self._recent = 0

    # -------------------------------------------------------------- tokens in

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[TQView, TQView]:
        """Appends keys `(B, n_kv_heads, L, D)` and values `(B, n_kv_heads, L, Dv)`; returns views of all rows.

        The views attend to the appended rows exactly where the format has a window. Raises ValueError for shapes or
        dtypes that do not fit what the cache holds; then nothing has been stored.
        """
        self._check(keys, values)
        install_hook()
        if not self._batch:
            self._batch = keys.shape[0]
            for store, x in ((self._keys, keys), (self._values, values)):
                store.describe(x)
        held, new = self._first + self._recent, keys.shape[2]
        first = min(self.format.sinks, held + new) if not self._packed else self._first
        recent = held + new - first
        leaving = self._leaving(recent)
        before, stores = self._packed, (self._keys, self._values)
        if not self.format.paged and 0 < leaving == new:  # the exact rows stay as they are
            self._pack(keys, values, before, rotated=False)
            exacts = [store.exact for store in stores]
        elif held + new <= self._keys.exact_capacity and not leaving:
            for store, rows in zip(stores, self._rotate(keys, values), strict=True):
                store.put_exact(rows, held)
            exacts = [store.exact for store in stores]
        else:
            exacts = self._rotate(keys, values)
            if held:
                pairs = zip(stores, exacts, strict=True)
                exacts = [mx.concatenate([store.exact[:, :, :held], rows], axis=2) for store, rows in pairs]
            if leaving:
                self._pack(*(rows[:, :, first : first + leaving] for rows in exacts), before, rotated=True)
            for store, rows in zip(stores, exacts, strict=True):
                store.put_exact(mx.concatenate([rows[:, :, :first], rows[:, :, first + leaving :]], axis=2), 0)
        self._first, self._packed, self._recent = first, before + leaving, recent - leaving
        # With a window, this call's attention sees the rows that are being packed as they came.
        layout = Layout.uniform(self._batch, first, before, recent) if self.format.paged else self._layout()
        if not self.format.paged:
            exacts = [store.exact for store in stores]
        return views(*(store.snapshot(exact, layout, self.fused) for store, exact in zip(stores, exacts, strict=True)))

    def _kernels_run(self) -> bool:
        dtypes = self._keys.dtype_name == self._values.dtype_name
        return self.fused != "never" and dtypes and kernels.reason(self._keys.dim, self._values.dim) is None

    def _rotate(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        if self._kernels_run():
            return list(kernels.rotate_pair(keys, values, self.format, self.layer_index))
        return [rotate(x, store.signs[0]) for store, x in ((self._keys, keys), (self._values, values))]

    def _pack(self, keys: mx.array, values: mx.array, used: int, *, rotated: bool) -> None:
        """Packs rows `(B, H, n, D)` behind `used` ones; both are whole pages where rows are paged."""
        mean = page_means(keys, self.format.page) if self.format.centered_keys else None
        if self._kernels_run():
            regions = kernels.encode(keys, values, mean, self.format, self.layer_index, rotated=rotated)
        else:
            rows = (keys, values) if rotated else self._rotate(keys, values)
            pairs = ((self._keys, rows[0], mean), (self._values, rows[1], None))
            regions = [quantise(x, self.format, store.kind, store.signs[1], m) for store, x, m in pairs]
        for store, new in zip((self._keys, self._values), regions, strict=True):
            store.append(new, used)

    def _leaving(self, recent: int) -> int:
        """How many of `recent` exact tokens are to be packed now."""
        if not self.format.paged:
            return recent
        return max(0, recent - self.format.window) // self.format.page * self.format.page

    def _check(self, keys: mx.array, values: mx.array) -> None:
        check_rows("keys", keys)
        check_rows("values", values)
        if keys.shape[:3] != values.shape[:3]:
            raise ValueError(f"keys and values must agree in (B, n_kv_heads, L), got {keys.shape} and {values.shape}")
        why = kernels.reason(keys.shape[3], values.shape[3]) if self.fused == "require" else None
        if why is not None:
            raise ValueError(f'fused="require", but {why}')
        if not self._batch:
            return
        for name, x, store in (("keys", keys, self._keys), ("values", values, self._values)):
            want = (self._batch, store.n_kv_heads, x.shape[2], store.dim)
            if x.shape != want or x.dtype != store.dtype:
                raise ValueError(f"{name} must be {store.dtype} {want} like the rows held, got {x.dtype} {x.shape}")

    # -------------------------------------------------------------- tokens held

    def _layout(self) -> Layout:
        return Layout.uniform(self._batch, self._first, self._packed, self._recent)

    @property
    def rows(self) -> tuple[PackedRows, PackedRows]:
        """The packed keys and values, as `mlx_tq.attention` takes them. Raises ValueError when the cache is empty."""
        if not self._batch:
            raise ValueError("the cache must hold tokens, got an empty one")
        layout = self._layout()
        return tuple(store.snapshot(store.exact, layout, self.fused) for store in (self._keys, self._values))

    def keys_and_values(self) -> tuple[TQView, TQView]:
        """Views of all rows held."""
        return views(*self.rows)

    @property
    def offset(self) -> int:
        """Tokens held."""
        return self._first + self._packed + self._recent

    def size(self) -> int:
        """Tokens held."""
        return self.offset

    def empty(self) -> bool:
        """Whether no token was ever stored."""
        return not self._batch

    @property
    def nbytes(self) -> int:
        """Bytes held, spare capacity included."""
        return sum(a.nbytes for store in (self._keys, self._values) for a in store.arrays())

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """The mask of the next N tokens: None, "causal" or a bool array, as mlx-lm's KVCache makes it."""
        if N == 1 and window_size is None:
            return None
        if window_size is None and not return_array:
            return "causal"
        column = mx.arange(self.offset + N)[None]
        row = mx.arange(self.offset, self.offset + N)[:, None]
        mask = row >= column
        return mask if window_size is None else mask & (row < column + window_size)

    # -------------------------------------------------------------- tokens out

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drops the last n tokens (all, if fewer are held); returns how many. Raises ValueError for a negative n."""
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        n = min(n, self.offset)
        keep = self.offset - n
        if n <= self._recent:
            self._recent -= n
        elif keep <= self._first:
            self._first, self._packed, self._recent = keep, 0, 0
        else:
            self._unpack_tail(keep - self._first)
        return n

    def _unpack_tail(self, packed: int) -> None:
        """Cuts the packed tokens to `packed`; a page cut in two goes back among the exact rows, as it decodes."""
        whole = packed // self.format.page * self.format.page if self.format.paged else packed
        for store, rows in zip((self._keys, self._values), self.rows, strict=True):
            if packed > whole:
                cut = dequantise(live_regions(rows, whole, packed), self.format, store.kind, store.dim, rows.signs[1])
                store.put_exact(
                    mx.concatenate([rows.exact[:, :, : self._first], to_dtype(cut, store.dtype)], axis=2), 0
                )
        self._packed, self._recent = whole, packed - whole

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
        stores = (self._keys, self._values)
        header = {
            "version": STATE_VERSION,
            "format": self.format.as_dict(),
            "layer_index": self.layer_index,
            "tokens": [self._first, self._packed, self._recent],
            "rows": [[self._batch, s.n_kv_heads, s.dim, s.dtype_name] for s in stores] if self._batch else None,
        }
        arrays = []
        for store in stores if self._batch else ():
            for name, shape, _ in self._saved(store):
                array = store.exact if name == "exact" else getattr(store.regions, name)
                arrays.append(array[:, :, : shape[2]])
        return [json.dumps(header), *arrays]

    @state.setter
    def state(self, state: list) -> None:
        fresh = type(self).__new__(type(self))
        fresh.fused = getattr(self, "fused", "auto")
        fresh._load(*_read_header(state))
        self.__dict__.update(fresh.__dict__)  # all or, where the state is refused, nothing

    def _load(self, header: dict, arrays: list) -> None:
        try:
            self.format = TQFormat(**header["format"])
            self.layer_index = header["layer_index"]
            self._reset()
            self._first, self._packed, self._recent = header["tokens"]
            if header["rows"] is not None:
                for store, row in zip((self._keys, self._values), header["rows"], strict=True):
                    self._batch, store.n_kv_heads, store.dim, store.dtype_name = row
                self._check_rows(header["rows"])
            self._check_tokens()
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"state has a damaged header: {error}") from None
        for store in (self._keys, self._values) if self._batch else ():
            loaded = {}
            for name, shape, dtype in self._saved(store):
                array = arrays.pop(0) if arrays else None
                got = (array.shape, array.dtype) if isinstance(array, mx.array) else type(array).__name__
                if got != (shape, dtype):
                    raise ValueError(f"state's {store.kind}.{name} must be {dtype} {shape}, got {got}")
                loaded[name] = mx.contiguous(array)  # kernels take whole buffers
            exact = loaded.pop("exact", None)
            if exact is not None:
                store.put_exact(exact, 0)
            store.regions = Regions(**loaded) if loaded else None
        if arrays:
            raise ValueError(f"state must hold the arrays of its header and no more, got {len(arrays)} more")

    @classmethod
    def from_state(cls, state: list) -> TQKVCache:
        """A cache from `state`. Raises ValueError where the state is not one of ours, or is damaged."""
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def _saved(self, store: _Store) -> list[tuple[str, tuple[int, ...], mx.Dtype]]:
        """Name, shape and dtype of each array of a store that `state` holds."""
        out, head = [], (self._batch, store.n_kv_heads)
        if self._packed:
            for name, (row, dtype, span) in region_shapes(self.format, store.kind, store.dim, store.dtype).items():
                out.append((name, (*head, -(-self._packed // span), *row), dtype))
        if store.exact_capacity:
            out.append(("exact", (*head, self._first + self._recent, store.dim), store.dtype))
        return out

    def _check_rows(self, rows: list) -> None:
        for store in (self._keys, self._values):
            layer_signs(self.format.seed, self.layer_index, store.dim)
        counts = [n for row in rows for n in row[:2]]
        same = rows[0][:2] == rows[1][:2] and all(isinstance(n, int) and n > 0 for n in counts)
        if not same or any(store.dtype not in FLOAT_DTYPES for store in (self._keys, self._values)):
            raise ValueError(f"rows must be alike in batch and heads and of a float dtype, got {rows}")

    def _check_tokens(self) -> None:
        first, packed, recent = tokens = (self._first, self._packed, self._recent)
        fits = first + recent <= self._keys.exact_capacity and 0 <= first <= self.format.sinks
        whole = packed % self.format.page == 0 if self.format.paged else True
        ints = all(isinstance(n, int) and n >= 0 for n in tokens)
        if not (fits and whole and ints) or (any(tokens) and not self._batch):
            raise ValueError(f"tokens must fit {self.format}, got {tokens}")


def _read_header(state: list) -> tuple[dict, list]:
    try:
        header, *arrays = state
        header = json.loads(header)
        version = header["version"]
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"state must come from a TQKVCache, got something else ({error!r})") from None
    if version != STATE_VERSION:
        raise ValueError(f"state must have version {STATE_VERSION}, got {version!r}")
    return header, arrays
