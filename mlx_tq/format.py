"""What a compressed row looks like: `TQFormat` and its named presets."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import pi, sqrt

RAW_BITS = 16

_CODED = (2, 3, 4)
_CHOICES = {
    "key_bits": (*_CODED, RAW_BITS),
    "value_bits": (*_CODED, RAW_BITS),
    "codebook": ("uniform", "lloyd"),
    "kappa": ("mmse", "unbiased", "reference"),
    "scale_dtype": ("bfloat16", "float16"),
}


@dataclass(frozen=True)
class TQFormat:
    """How keys and values are quantised (arXiv 2504.19874) and what stays exact.

    Bits are per coordinate; `window`, `sinks` and `page` are in tokens.

    Args:
        key_bits: 2, 3 or 4; 16 keeps keys in the model's dtype.
        value_bits: 2, 3 or 4; 16 keeps values in the model's dtype.
        codebook: "uniform" (step chosen per vector) or "lloyd" (Lloyd-Max levels of the sphere's marginal).
        qjl: adds one sign bit per key coordinate, the QJL sketch of the residual.
        kappa: constant of the QJL term: "mmse", "unbiased" or "reference" (see `kappa_value`).
        norm_correction: decoded rows have the norm of the rows they stand for. Keys with QJL keep the plain norm,
            since there the residual term makes up the difference.
        centered_keys: subtracts the mean of each page of keys before quantising; scores get it back exactly.
        window: at least this many of the last tokens stay exact, in the model's dtype.
        sinks: this many of the first tokens stay exact.
        page: rows leave the exact window in pages of this many tokens; also the page of `centered_keys`.
        scale_dtype: 16-bit type of the stored scales. bfloat16 has no overflow; the reference layout has float16.
        seed: seed of the rotation signs.

    Raises:
        ValueError: a field has a value outside its rule.
    """

    key_bits: int = 4
    value_bits: int = 4
    codebook: str = "uniform"
    qjl: bool = False
    kappa: str = "mmse"
    norm_correction: bool = True
    centered_keys: bool = False
    window: int = 128
    sinks: int = 4
    page: int = 128
    scale_dtype: str = "bfloat16"
    seed: int = 42

    def __post_init__(self):
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name in ("qjl", "norm_correction", "centered_keys"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, got {getattr(self, name)!r}")
        for name in ("window", "sinks", "page", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be an int >= 0, got {value!r}")
        if self.seed >= 1 << 64:
            raise ValueError(f"seed must be below 2**64, got {self.seed}")
        if self.page < 32 or self.page & (self.page - 1):
            raise ValueError(f"page must be a power of two of at least 32, got {self.page}")
        if self.key_bits == RAW_BITS and (self.qjl or self.centered_keys):
            raise ValueError("qjl and centered_keys need coded keys (key_bits 2, 3 or 4), got key_bits=16")
        if self.key_bits == RAW_BITS and self.value_bits == RAW_BITS:
            raise ValueError("key_bits and value_bits are both 16: nothing is compressed, use mlx-lm's own cache")

    @classmethod
    def presets(cls) -> dict[str, TQFormat]:
        """Every named format, by name."""
        return dict(_PRESETS)

    @classmethod
    def preset(cls, name: str, **changes) -> TQFormat:
        """The named format, with fields replaced by `changes`. Raises ValueError for an unknown name."""
        if name not in _PRESETS:
            raise ValueError(f"format must be one of {sorted(_PRESETS)}, got {name!r}")
        return replace(_PRESETS[name], **changes)

    @classmethod
    def resolve(cls, format: TQFormat | str | None) -> TQFormat:
        """A format from itself, a preset's name, or None for the default."""
        if format is None:
            return _PRESETS["default"]
        if isinstance(format, str):
            return cls.preset(format)
        if not isinstance(format, cls):
            raise ValueError(f"format must be a TQFormat, a preset's name or None, got {format!r}")
        return format

    def bits(self, kind: str) -> int:
        """Bits per coordinate of the codes of `kind`, "keys" or "values"."""
        return self.key_bits if kind == "keys" else self.value_bits

    @property
    def paged(self) -> bool:
        """Whether rows are packed a page at a time rather than at once."""
        return self.window > 0 or self.centered_keys

    def bits_per_element(self, head_dim: int, value_dim: int | None = None) -> float:
        """Stored bits per coordinate of a packed key and value, scales and means included.

        The exact rows (`window`, `sinks`) come on top: a constant number of bytes per sequence. Raises ValueError for a
        width that is not an int of at least 1.
        """
        value_dim = head_dim if value_dim is None else value_dim
        for name, width in (("head_dim", head_dim), ("value_dim", value_dim)):
            if not isinstance(width, int) or width < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {width!r}")
        key = self.key_bits * head_dim
        if self.key_bits != RAW_BITS:
            key += 16 + self.qjl * (head_dim + 16) + self.centered_keys * 16 * head_dim / self.page
        value = self.value_bits * value_dim + 16 * (self.value_bits != RAW_BITS)
        return (key + value) / (head_dim + value_dim)

    def kappa_value(self, head_dim: int) -> float:
        """Weight of the QJL term for a sketch made with the normalised transform.

        sqrt(pi/2)/sqrt(d) makes the estimate unbiased, sqrt(2/pi)/sqrt(d) minimises its squared error;
        "reference" is sqrt(pi/2)/d, which is sqrt(d) too small for a normalised sketch.
        """
        return {
            "unbiased": sqrt(pi / 2 / head_dim),
            "mmse": sqrt(2 / pi / head_dim),
            "reference": sqrt(pi / 2) / head_dim,
        }[self.kappa]

    def describe(self) -> str:
        """One line: bits, options and what stays exact."""
        parts = [f"K{self.key_bits}/V{self.value_bits} {self.codebook}"]
        parts += ["QJL " + self.kappa] * self.qjl + ["centered keys"] * self.centered_keys
        parts += [f"last {self.window} and first {self.sinks} tokens exact"] * bool(self.window or self.sinks)
        return ", ".join(parts)

    def as_dict(self) -> dict:
        """Field names and values, for files and tables."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


_PRESETS = {
    "default": TQFormat(window=256, centered_keys=True),
    "balanced": TQFormat(4, 2, centered_keys=True),
    "compact": TQFormat(3, 2, centered_keys=True),
    "k4v4": TQFormat(window=0, sinks=0),
    "tq3": TQFormat(
        key_bits=2,
        value_bits=2,
        codebook="lloyd",
        qjl=True,
        norm_correction=False,
        window=0,
        sinks=0,
        scale_dtype="float16",
    ),
}
