"""FlashAttention over a TurboQuant-compressed KV cache, for MLX and mlx-lm."""

from .attention import attention, explain
from .cache import TQKVCache
from .codec import decode_keys, decode_values, encode_keys, encode_values
from .format import TQFormat
from .integrate import disable, enable, make_prompt_cache

__version__ = "0.1.0"

__all__ = [
    "TQFormat",
    "TQKVCache",
    "attention",
    "decode_keys",
    "decode_values",
    "disable",
    "enable",
    "encode_keys",
    "encode_values",
    "explain",
    "make_prompt_cache",
]
