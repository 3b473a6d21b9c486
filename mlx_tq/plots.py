"""Pictures of evaluation results: KL against bits per element, and the needle in a haystack."""

from __future__ import annotations

from pathlib import Path

import numpy as np

REFERENCE = "fp16"


def plot(rows: list[dict], folder: Path) -> list[Path]:
    """Draws KL against bits per element and, where it was measured, the needle; returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figures = {"kl.png": _kl(plt, rows)}
    if shown := [row for row in rows if row["needle"]]:
        figures["needle.png"] = _needle(plt, shown)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=150)
        plt.close(figure)
    return [folder / name for name in figures]


def _kl(plt, rows: list[dict]):
    """A point for each format that changes anything, and a line for the model's own cache run a second time."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    points = [row for row in rows if row["kl_mean"] > 0 and row["format"] != REFERENCE]
    for row in rows:
        if row["format"] == REFERENCE and row["kl_mean"] > 0:
            axes.axhline(row["kl_mean"], color="grey", linestyle=":", label="the same cache run twice")
    for ours, colour, label in ((True, "tab:blue", "mlx-tq"), (False, "tab:orange", "mlx-lm")):
        chosen = [row for row in points if row["format"].startswith("mlx-lm") != ours]
        x, y = [r["bits_per_element"] for r in chosen], [r["kl_mean"] for r in chosen]
        if chosen:
            axes.scatter(x, y, color=colour, label=label, zorder=3)
    axes.set_yscale("log")
    axes.margins(0.12, 0.12)
    axes.set_xlabel("stored bits per element of one more token")
    axes.set_ylabel("mean KL to the model's own cache (nats)")
    model = {row["model"] for row in rows}
    axes.set_title(f"{', '.join(sorted(model))}: {max(row['tokens'] for row in rows):,} predictions", fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    if points:
        axes.legend()
    _label(figure, axes, points)
    return figure


def _needle(plt, rows: list[dict]):
    """A heat map for the model's own cache and for each format."""
    panels = [(REFERENCE, [c | {"logprob": c["logprob_ref"], "found": c["found_ref"]} for c in rows[0]["needle"]])]
    panels += [(row["format"], row["needle"]) for row in rows if row["format"] != REFERENCE]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(3.6 * columns, 2.6 * lines + 0.6), squeeze=False, layout="constrained"
    )
    for axes, (name, cells) in zip(grid.flat, panels, strict=False):
        image = _heat_map(axes, name, cells)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    figure.colorbar(image, ax=grid, label="probability of the answer, per token")
    figure.suptitle("Needle in a haystack (✓: the whole answer is greedy)", fontsize=10)
    return figure


def _label(figure, axes, points: list[dict]) -> None:
    """Names the points, each where it covers no other name or point."""
    figure.draw_without_rendering()
    taken = []
    for row in points:
        x, y = axes.transData.transform((row["bits_per_element"], row["kl_mean"]))
        taken.append((x - 5, y - 5, x + 5, y + 5))
    renderer, limits = figure.canvas.get_renderer(), axes.get_window_extent()
    for row in points:
        text = None
        for dx, dy in ((7, -3), (7, 8), (7, -14), (-7, 8), (-7, -14), (-7, -3), (7, 20), (7, -26), (-7, 20), (-7, -26)):
            if text is not None:
                text.remove()
            text = axes.annotate(
                row["format"],
                (row["bits_per_element"], row["kl_mean"]),
                (dx, dy),
                textcoords="offset points",
                ha="left" if dx > 0 else "right",
                fontsize=8,
            )
            box = text.get_window_extent(renderer)
            inside = limits.x0 <= box.x0 and box.x1 <= limits.x1
            if inside and not any(box.x0 < c and a < box.x1 and box.y0 < d and b < box.y1 for a, b, c, d in taken):
                break
        taken.append((box.x0, box.y0, box.x1, box.y1))


def _heat_map(axes, name: str, cells: list[dict]):
    lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
    values = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        at = depths.index(cell["depth"]), lengths.index(cell["length"])
        values[at] = np.exp(cell["logprob"])
        axes.text(
            at[1],
            at[0],
            f"{values[at]:.2f}{' ✓' if cell['found'] else ''}",
            ha="center",
            va="center",
            fontsize=8,
            color="white" if values[at] < 0.6 else "black",
        )
    axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    axes.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth")
    axes.set_title(name, fontsize=9)
    return axes.imshow(values, vmin=0, vmax=1, aspect="auto", cmap="viridis")
