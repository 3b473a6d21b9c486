"""The `mlx-tq` command: hands over to one module per subcommand, or to mlx-lm's own commands."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from . import __version__, hosted
from .format import TQFormat
from .loading import ModelError, positive
from .smollm2 import FetchError

COMMANDS = {
    "demo": "a small model over its own cache and over a compressed one, side by side",
    "generate": "text from your model (mlx_lm.generate)",
    "chat": "a conversation with it (mlx_lm.chat)",
    "serve": "an HTTP server for it (mlx_lm.server)",
    "cache_prompt": "a prompt's cache in a file, for generate (mlx_lm.cache_prompt)",
    "evaluate": "tasks of lm-evaluation-harness (mlx_lm.evaluate)",
    "eval": "how much each format changes your model's predictions",
    "bench": "tokens per second and memory over several caches",
    "plan": "how many tokens fit in memory over each cache; loads no weights",
    "formats": "the named formats and their sizes",
    "doctor": "what this machine runs, and whether the kernels are right on it",
}
_MODULES = {"eval": "evaluate"}
_NEEDED = {"mlx_lm": 'mlx-lm: pip install "mlx-tq[lm]"', "lm_eval": "lm-evaluation-harness: pip install lm-eval"}
_NEEDED["tqdm"] = _NEEDED["mlx_lm"]


def setup_arg_parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:12} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="mlx-tq",
        description="FlashAttention over a TurboQuant-compressed KV cache, for MLX and mlx-lm.",
        epilog=f"commands:\n{listed}\n\n`mlx-tq COMMAND --help` says more.\n"
        "With MLX_TQ_DEBUG=1 in the environment, errors come with a traceback.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the command's own")
    return parser


def formats(argv: list[str]) -> int:
    """Lists the presets; the sizes are those of packed rows, what stays exact comes on top."""
    parser = argparse.ArgumentParser(prog="mlx-tq formats", description=formats.__doc__)
    parser.add_argument("--head-dim", type=positive, default=128, help="for the bits per element (default: 128)")
    args = parser.parse_args(argv)
    print(f"{'name':10} {'bits/element':>12} {'of 16-bit':>10}  contents (head_dim {args.head_dim})")
    for name, format in TQFormat.presets().items():
        bits = format.bits_per_element(args.head_dim)
        print(f"{name:10} {bits:12.3f} {bits / 16:10.1%}  {format.describe()}")
    return 0


def _run(command: str, argv: list[str]) -> int:
    if command == "formats":
        return formats(argv)
    if command in hosted.MODULES:
        return hosted.run(command, argv)
    return import_module(f"mlx_tq.{_MODULES.get(command, command)}").main(argv)


def main(argv: list[str] | None = None) -> int:
    parser = setup_arg_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(argv)
    try:
        code = _run(args.command, args.arguments)
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        if error.name in _NEEDED:
            sys.exit(f"error: mlx-tq {args.command} needs {_NEEDED[error.name]}")
        raise
    except BrokenPipeError:  # the reader of a pipe, such as head, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except EOFError:  # the end of what chat reads
        return 0
    except (FetchError, OSError, ValueError) as error:  # which is how mlx-lm reports what the user got wrong
        if os.environ.get("MLX_TQ_DEBUG"):
            raise
        ours = isinstance(error, FetchError | ModelError) and error.__cause__ is None  # others may be bugs
        sys.exit(f"error: {error}" + ("" if ours else "\n(MLX_TQ_DEBUG=1 shows where it was raised)"))


if __name__ == "__main__":
    sys.exit(main())
