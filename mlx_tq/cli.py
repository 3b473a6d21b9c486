"""The `mlx-tq` command: hands over to one module per subcommand."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from . import __version__
from .format import TQFormat
from .smollm2 import FetchError

COMMANDS = {
    "demo": "a small model over its own cache and over a compressed one, side by side",
    "generate": "text from your model over a compressed cache",
    "eval": "how much each format changes your model's predictions",
    "formats": "the named formats and their sizes",
    "doctor": "what this machine runs, and whether the kernels are right on it",
}
_MODULES = {"eval": "evaluate"}
_NEED_MLX_LM = ("demo", "eval", "generate")


def setup_arg_parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:10} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="mlx-tq",
        description="FlashAttention over a TurboQuant-compressed KV cache, for MLX and mlx-lm.",
        epilog=f"commands:\n{listed}\n\n`mlx-tq COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command's own")
    return parser


def formats(argv: list[str]) -> int:
    """Lists the presets; the sizes are those of packed rows, what stays exact comes on top."""
    parser = argparse.ArgumentParser(prog="mlx-tq formats", description=formats.__doc__)
    parser.add_argument("--head-dim", type=int, default=128, help="for the bits per element (default: 128)")
    args = parser.parse_args(argv)
    if args.head_dim < 1:
        parser.error(f"--head-dim must be at least 1, got {args.head_dim}")
    print(f"{'name':10} {'bits/element':>12} {'of 16-bit':>10}  contents")
    for name, format in TQFormat.presets().items():
        bits = format.bits_per_element(args.head_dim)
        print(f"{name:10} {bits:12.3f} {bits / 16:10.1%}  {format.describe()}")
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = setup_arg_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(argv)
    try:
        if args.command == "formats":
            return formats(args.arguments)
        return import_module(f"mlx_tq.{_MODULES.get(args.command, args.command)}").main(args.arguments)
    except ModuleNotFoundError as error:
        if args.command in _NEED_MLX_LM and error.name in ("mlx_lm", "tqdm"):
            sys.exit(f'error: mlx-tq {args.command} needs mlx-lm: pip install "mlx-tq[lm]"')
        raise
    except FetchError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
