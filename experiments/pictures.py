"""Pictures of results, as PNG files."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np


@contextlib.contextmanager
def saved(path: Path, rows: int = 1, columns: int = 1, pad: float = 1.08, **options):
    """A matplotlib figure with its axes, drawn without a screen and saved at the end.

    Args:
      path: of the PNG; equal pictures make equal files.
      rows, columns: of axes; one alone comes as itself, more as an array.
      pad: around axes, in font sizes.
      **options: of `matplotlib.pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, **options)
    try:
        yield axes
        figure.tight_layout(pad=pad)
        figure.savefig(path, dpi=110, metadata={"Software": None})
    finally:
        plt.close(figure)


def sheet(path: Path, clean, arrays, count: int = 10) -> None:
    """Saves a picture of the first images: originals, adversarials and their scaled difference.

    Args:
      path: of the PNG.
      clean: `Batch` of the originals.
      arrays: the per-image arrays of a record.
      count: how many.
    """

    count = min(count, len(arrays["image"]))
    grey = clean.images.shape[-1] == 1
    show = (lambda image: image[..., 0]) if grey else (lambda image: image)
    size = (1.3 * count, 4.6)
    with saved(path, 3, count, pad=0.4, figsize=size, squeeze=False) as axes:
        for k in range(count):
            original, image = np.asarray(clean.images[k]), arrays["image"][k]
            difference = image - original
            largest = np.abs(difference).max()
            scaled = 0.5 + 0.5 * difference / (largest if largest > 0 else 1.0)
            style = dict(cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes[0, k].imshow(show(original), **style)
            axes[1, k].imshow(show(image), **style)
            if grey:
                axes[2, k].imshow(
                    show(scaled), cmap="RdBu_r", vmin=0, vmax=1, interpolation="nearest"
                )
            else:
                axes[2, k].imshow(scaled, interpolation="nearest")
            share = arrays["judged_success"][k]
            label, target = int(arrays["label"][k]), int(arrays["target_class"][k])
            axes[0, k].set_title(f"{label}", fontsize=9)
            wanted = f"as {target}" if target != label else "as another"
            passes = {0: "fails", 1: "passes"}.get(share, f"passes {share:.0%}")
            axes[1, k].set_title(f"{wanted}: {passes}", fontsize=9)
            distance = arrays["distance"][k]
            found = f"L2 {distance:.2f}" if np.isfinite(distance) else "no success"
            axes[2, k].set_title(found, fontsize=9)
        for axis, row in zip(axes[:, 0], ("original", "adversarial", "difference, scaled")):
            axis.set_ylabel(row, fontsize=9)
        for axis in axes.flat:
            axis.set_xticks([])
            axis.set_yticks([])
