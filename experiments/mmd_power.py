"""How many images does the MMD test need? Power against set size, with two null controls.

Sets of adversarial test images, and of clean ones, are tested against as many training images; the
second control tests training images against training images, where one in twenty should be
rejected at p < 0.05. Source images of the two sides never overlap.

python -m experiments.mmd_power --num_images=10000 --sizes=10,100,1000,10000
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from absl import flags

from experiments import common, evaluation, subject

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)
flags.FLAGS.set_default("defense", "mmd")
SIZES = flags.DEFINE_list(
    "sizes", ["10", "30", "100", "300", "1000"], "Images on each side, with commas."
)
DRAWS = flags.DEFINE_integer(
    "draws",
    20,
    "At most so many tests of each size up to 1,000, fewer of larger sets; no two share an image.",
    lower_bound=1,
)
_FULL = 1000  # images; above, the cost of a test grows with the square of the size


def disjoint(seed: int, images: np.ndarray, reference: np.ndarray, size: int, most: int):
    """Pairs of sets [size, D] to be tested, none of which shares a row with another.

    Args:
      seed: of the order in which they are taken.
      images, reference: [N, D] and [M, D] the two sides, at least `size` of each.
      size: of a set.
      most: pairs, where the size is at most 1,000; fewer of larger ones, since the cost of a test
        grows with the square of its size.
    """
    rng = np.random.RandomState(seed)
    rows, others = (rng.permutation(len(side)) for side in (images, reference))
    wanted = max(1, most * min(_FULL, size) // size)
    for number in range(min(wanted, len(images) // size, len(reference) // size)):
        part = slice(number * size, (number + 1) * size)
        yield images[rows[part]], reference[others[part]]


def main() -> None:
    """Runs all tests, prints a table, saves it as JSON."""
    import jax
    from tqdm import tqdm

    import advdet
    from advdet import detectors, results, sets
    from advdet.statistics import mmd_test_in_chunks
    from experiments import report

    settings = evaluation.settings()
    splits = common.splits()
    settings |= {"data": splits, "targets": settings["targets"] or "untargeted"}
    settings |= {"attack": settings["attack"] or "ddn"}
    detector = detectors.from_spec(subject.DEFENSE.value)
    command = evaluation.command("mmd_power")
    done = advdet.evaluate("none", command=command, **settings)
    ((_, arrays),) = done.arrays.items()
    flat = lambda images: np.asarray(images, np.float32).reshape(len(images), -1)
    train = flat(splits.train.images)
    half = len(train) // 2
    sides = {
        "adversarial": flat(arrays["image"][arrays["success"]]),
        "clean test": flat(done.clean.images),
        "training": train[:half],
    }
    reference = train[half:]
    found = []
    sizes = [int(size) for size in evaluation.numbers("sizes", SIZES.value)]
    jobs = [(size, name) for size in sizes for name in sides if len(sides[name]) >= size]
    for number, (size, name) in enumerate(tqdm(jobs, desc="sets", disable=None)):
        p_values = []
        for draw, (x, y) in enumerate(disjoint(number, sides[name], reference, size, DRAWS.value)):
            key = jax.random.fold_in(jax.random.key(settings["seed"]), 1000 * number + draw)
            test = mmd_test_in_chunks(key, x, y, detector.sigma2, detector.num_permutations)
            p_values.append(float(test.p_value))
        told = sets.told_of(np.array(p_values))
        found.append({"size": size, "side": name, "draws": told["sets"], **told})
    rows = [("set", "size", "tests", "rejected", "95 %", "median p")]
    for row in found:
        limits = report.span(row["interval"], lambda v: f"{100 * v:.0f}")
        rows.append(
            (
                row["side"],
                str(row["size"]),
                str(row["draws"]),
                report.sets_told(row),
                limits,
                report.number(row["median_p"]),
            )
        )
    print(
        "\n".join(
            [
                "",
                f"{subject.DEFENSE.value} on {splits.name}: p < {sets.LEVEL:g}",
                "",
                *report.aligned(rows),
                "",
            ]
        )
    )
    path = Path(evaluation.RESULTS_DIR.value, f"{splits.name}-mmd_power.json")
    results.write_json(
        path, {"schema": results.SCHEMA, "kind": "mmd_power", "command": command, "rows": found}
    )
    print(f"table {path}")


if __name__ == "__main__":
    common.run(main)
