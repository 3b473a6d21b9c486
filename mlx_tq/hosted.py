"""mlx-lm's own commands over compressed caches: `mlx-tq generate`, `chat`, `serve`, `cache_prompt`, `evaluate`.

Each runs the `main` of its mlx-lm module, with all of its flags and ours beside them. Three names of the module are
replaced meanwhile: `argparse`, so that its parser learns our flags; `load` and `sharded_load`, so that every model it
loads is enabled. `generate` also checks caches that come from a file, and says afterwards what the cache held.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections import Counter
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx

from .attention import holds_latent
from .cache import TQKVCache
from .format import TQFormat
from .integrate import describe_latent, enable, leaves
from .loading import DEMO_MODEL, MODEL_HELP, add_format_argument, attention_path, load, model_path, new_file

# Our name of each command, and mlx-lm's module.
MODULES = {
    "generate": "generate",
    "chat": "chat",
    "serve": "server",
    "cache_prompt": "cache_prompt",
    "evaluate": "evaluate",
}
# Flags that would do nothing to our caches.
_REFUSED = {
    "max_kv_size": "--max-kv-size bounds mlx-lm's own cache only: leave it out, or add --tq-off",
    "kv_bits": "--kv-bits quantises mlx-lm's own cache only: choose a --tq-format instead, or add --tq-off",
}


def _parser_class(command: str, argv: list[str], ours: argparse.Namespace) -> type[argparse.ArgumentParser]:
    """A parser that mlx-lm's `main` fills and asks: adds our flags, keeps their values in `ours`, parses `argv`."""

    class Parser(argparse.ArgumentParser):
        def __init__(self, prog=None, description=None, **options):
            # evaluate gives its description for the program's name
            description = f"mlx_lm.{MODULES[command]} over a compressed cache. {description or prog}"
            super().__init__(f"mlx-tq {command}", description=description, **options)

        def add_argument(self, *names, **options):
            if "--model" in names:
                default = "" if options.get("required") else f" (default: {DEMO_MODEL})"
                options |= {"help": MODEL_HELP + default, "default": None}  # None: see _settle
            if any(f"--{name.replace('_', '-')}" in names for name in _REFUSED):
                options["help"] = f"{options.get('help', '')} (only with --tq-off)"
            if command == "cache_prompt" and "--prompt-cache-file" in names:
                options["type"] = new_file
            return super().add_argument(*names, **options)

        def parse_args(self, args=None, namespace=None):
            group = self.add_argument_group("compressed cache")
            add_format_argument(group)
            group.add_argument("--tq-off", action="store_true", help="use mlx-lm's own cache")
            args = super().parse_args(argv, namespace)
            ours.tq_off, ours.tq_format = args.tq_off, args.tq_format
            del args.tq_off, args.tq_format
            self._settle(args)
            return args

        def _settle(self, args: argparse.Namespace) -> None:
            if ours.tq_off and ours.tq_format:
                self.error("--tq-off and --tq-format exclude each other")
            for name, message in _REFUSED.items():
                if not ours.tq_off and getattr(args, name, None) is not None:
                    self.error(message)
            read = args.prompt_cache_file if command == "generate" else None
            if read is not None and not Path(read).is_file():
                self.error(f"--prompt-cache-file must be a file that exists, got {read!r}")
            ours.from_file = read is not None
            if command == "serve" and mx.distributed.init().rank() == 0:
                self._check_address(args.host, args.port)
            if args.model is None and not ours.from_file:  # else the file says which model
                args.model = DEMO_MODEL
            for name in (args.model, getattr(args, "draft_model", None)):
                if name is not None:
                    model_path(name)  # a mistake is named here rather than in the server's log

        def _check_address(self, host: str, port: int) -> None:
            """Ends where nothing can listen there: mlx-lm's server would fail with a thread left that never ends."""
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                socket.create_server((host, port), family=family).close()
            except (OSError, OverflowError) as error:
                self.error(f"--host and --port must be an address to listen on, got {host}:{port}: {error}")

    return Parser


def _enabling(loader, ours: argparse.Namespace):
    """`load` or `sharded_load` of mlx-lm, by any name `--model` takes, with the model enabled."""

    @wraps(loader)
    def wrapped(name, *args, **options):
        loaded = load(name, *args, loader=loader, **options)
        if not ours.tq_off:
            plan = enable(loaded[0], ours.tq_format)
            if not ours.from_file and mx.distributed.init().rank() == 0:
                print(f"{name}: {plan}", file=sys.stderr)
        return loaded

    return wrapped


def _reading(load_prompt_cache):
    """mlx-lm's `load_prompt_cache`, which raises ValueError for a file that `cache_prompt` did not save."""

    @wraps(load_prompt_cache)
    def wrapped(path, **options):
        message = f"--prompt-cache-file must be one that cache_prompt saved, got {path!r}"
        try:
            caches, metadata = load_prompt_cache(path, **options)
        except Exception as error:  # other files end in errors of any kind
            raise ValueError(f"{message}: {type(error).__name__}: {error}") from error
        if not {"model", "tokenizer_config"} <= metadata.keys():
            raise ValueError(f"{message}, which does not name its model and tokenizer")
        return caches, metadata

    return wrapped


def _reporting(module, ours: argparse.Namespace):
    """mlx-lm's `generate`, which checks caches that come from a file and says afterwards what they hold."""
    generate, make_prompt_cache = module.generate, module.make_prompt_cache

    @wraps(generate)
    def wrapped(model, *args, prompt_cache=None, draft_model=None, max_kv_size=None, **options):
        if prompt_cache is not None:
            models = [model] if draft_model is None else [model, draft_model]
            _check_file(prompt_cache, [cache for each in models for cache in make_prompt_cache(each)], ours)
        elif draft_model is None:
            prompt_cache = make_prompt_cache(model, max_kv_size)
        text = generate(model, *args, prompt_cache=prompt_cache, draft_model=draft_model, **options)
        if prompt_cache is not None:  # with a draft model, mlx-lm makes the caches and keeps them
            held = sum(cache.nbytes for cache in prompt_cache)
            about = f"{_formats(prompt_cache)}; attention: {attention_path(prompt_cache)}"
            print(f"Cache: {held:,} bytes, {about}", file=sys.stderr)
        return text

    return wrapped


def _held(caches: list) -> list[TQFormat | None]:
    """The format of each cache, of those in lists too; None where it is mlx-lm's own."""
    return [cache.format if isinstance(cache, TQKVCache) else None for cache in leaves(caches)]


def _formats(caches: list) -> str:
    compressed = [cache for cache in leaves(caches) if isinstance(cache, TQKVCache)]
    texts = (describe_latent(c.format) if holds_latent(c) else c.format.describe() for c in compressed)
    return "; ".join(dict.fromkeys(texts)) or "not compressed"


def _kinds(caches: list) -> list[str]:
    """The class of each cache; one that is quantised or compressed counts as the KVCache it stands for."""
    out = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        name = type(cache).__name__ if inner is None else f"CacheList({', '.join(_kinds(inner))})"
        out.append("KVCache" if name in ("TQKVCache", "QuantizedKVCache") else name)
    return out


def _counted(kinds: list[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(kinds).items())


def _check_file(caches: list, wanted: list, ours: argparse.Namespace) -> None:
    """Raises ValueError where a prompt cache file holds other caches than those made for the model and the flags."""
    held, got, made = _held(caches), _kinds(caches), _kinds(wanted)
    if ours.tq_off and any(held):
        raise ValueError(f"--tq-off needs a --prompt-cache-file that is not compressed, got {_formats(caches)}")
    bounded = got == ["RotatingKVCache"] * len(made) and set(made) == {"KVCache"}  # by --max-kv-size
    if got != made and not bounded:
        raise ValueError(
            f"--prompt-cache-file must hold the caches of the model, {_counted(made)}, got {_counted(got)}"
        )
    if ours.tq_format and held != _held(wanted):
        raise ValueError(f"--tq-format must be that of --prompt-cache-file, {_formats(caches)}, got {ours.tq_format!r}")


@contextmanager
def _replaced(module, **names):
    """A module with some of its names replaced."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


def run(command: str, argv: list[str]) -> int:
    """Runs one of mlx-lm's commands. Raises what its `main` raises."""
    module = import_module(f"mlx_lm.{MODULES[command]}")
    ours = argparse.Namespace()
    parser = _parser_class(command, argv, ours)
    names = {"argparse": SimpleNamespace(**{**vars(argparse), "ArgumentParser": parser})}
    for name in ("load", "sharded_load"):
        if hasattr(module, name):
            names[name] = _enabling(getattr(module, name), ours)
    if command == "generate":
        names |= {"generate": _reporting(module, ours), "load_prompt_cache": _reading(module.load_prompt_cache)}
    with _replaced(module, **names):
        module.main()
    return 0
