"""Writes docs/architectures.md: `PYTHONPATH=tests python -m archs.table`. test_archs.py compares every row."""

from collections import Counter
from pathlib import Path

import mlx_lm
from tqdm import tqdm

import mlx_tq

from .configs import BROKEN, build, names
from .probe import FORMAT, classify, reads

PATH = Path(__file__).parents[2] / "docs" / "architectures.md"
HEAD = """# Architectures of mlx-lm

What a compressed cache does in each architecture of mlx-lm {version}, found by running a tiny model with random
weights. A name `model/variant` is another configuration of a model. {counts}.

- **fused**: all attention over compressed caches reads the packed rows.
- **mixed**: some of it reads packed rows, some computes with decoded ones, as the row says. With latent attention
  (MLA) a prompt expands the decoded latent; a token attends to the packed latent, and decodes only the rope key.
- **dense**: the model computes with the keys and values itself, so they are decoded each time: right, but slow.
- **none**: nothing is compressed.

The counts of caches are those of the tiny model. Some caches stay as they are: the last column says which, and why.
{broken}

Written by `PYTHONPATH=tests .venv/bin/python -m archs.table`; `make test-archs` checks every row.

| architecture | class | caches compressed | left as they are |
|---|---|---|---|
"""


def row(name, model):
    """The row of one architecture."""
    found = reads(model)
    kind = classify(found)
    if kind == "mixed":
        kind += ": a prompt reads {}, a token {}".format(*found)
    with mlx_tq.enable(model, FORMAT) as plan:
        left = Counter(f"{entry.cache}, {entry.reason}" for entry in plan if entry.format is None)
    compressed = len(plan) - left.total()
    why = "; ".join(f"{n} {reason}" for reason, n in left.items())
    return f"| {name} | {kind} | {compressed} of {len(plan)} | {why} |".replace("  ", " ")


def read():
    """The rows of the committed table, by name."""
    lines = PATH.read_text().splitlines()
    rows = [line for line in lines[lines.index("|---|---|---|---|") + 1 :] if line]
    return {line.split("|")[1].strip(): line for line in rows}


def main():
    rows = [row(name, build(name)) for name in tqdm(names())]
    kinds = Counter(line.split("|")[2].split(":")[0].strip() for line in rows)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in ("fused", "mixed", "dense", "none"))
    broken = "\n".join(f"`{name}` is missing: it {why}." for name, why in BROKEN.items())
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(HEAD.format(version=mlx_lm.__version__, counts=counts, broken=broken) + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
