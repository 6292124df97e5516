"""The true verdicts on given images: who is fooled, who is flagged at which threshold, how far."""

from __future__ import annotations

from typing import Any

import numpy as np

from advdet import metrics
from advdet.defenses import POINTS, FittedDefense, undefended
from advdet.given_images import Pair
from advdet.judge import judge_in_pieces, round_to_8_bit
from advdet.sets import assess_sets
from advdet.splits import Splits

_CONTROL_IMAGES = 2000


def judge_given(
    victim: FittedDefense, splits: Splits, pair: Pair, *, seed: int = 0, progress: bool = True
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Judges given images as those of an attack of ours are.

    Args:
      victim: the true defence with its thresholds.
      splits: the data; sets are compared with other test images.
      pair: clean and adversarial images.
      seed: of the judge's draws.
      progress: show bars on stderr.

    Returns:
      Figures and per-image arrays. Rates are over the images whose clean original the defence
      classifies rightly (`attacked`); a share of draws counts as such.
    """
    defense, clean = victim.defense, pair.clean
    labels, ids = np.asarray(clean.labels), np.asarray(clean.ids)

    def see(defense, images, targets=pair.goal, targeted=pair.targeted):
        return judge_in_pieces(
            defense, images, ids, targets, targeted=targeted, seed=seed, progress=progress
        )

    before = see(defense, clean.images, labels, True)
    after = see(defense, pair.adversarial)
    rounded = see(defense, round_to_8_bit(pair.adversarial))
    bare = see(undefended(defense.classifier), pair.adversarial)
    distance = metrics.l2(pair.adversarial, clean.images)
    attacked = before.wanted
    count = int(attacked.sum())

    def rate(shares, rows=attacked):
        value = metrics.mean_or_none(shares[rows])
        return {"rate": value, "n": int(rows.sum()),
                "interval": metrics.wilson(float(shares[rows].sum()), int(rows.sum()))}  # fmt: skip

    arrays = {
        "id": ids,
        "label": labels,
        "goal": np.asarray(pair.goal, np.int32),
        "predicted": after.logits.argmax(axis=1).astype(np.int32),
        "clean_correct": attacked,
        "fooled": after.wanted,
        "fooled_8bit": rounded.wanted,
        "fooled_classifier": bare.wanted,
        "l2": distance,
        "clean_score": before.scores,
        "score": after.scores,
    }
    figures: dict[str, Any] = {
        "kind": defense.detector.kind,
        "targeted": pair.targeted,
        "counts": {"images": len(ids), "attacked": count,
                   "unchanged": int((distance == 0).sum())},
        "fooled": rate(after.wanted),
        "fooled_8bit": rate(rounded.wanted),
        "fooled_classifier": rate(bare.wanted),
        "points": {},
        "correction": None,
        "sets": None,
    }  # fmt: skip
    for name in POINTS:
        threshold = victim.thresholds.get(name)
        if threshold is None:
            continue
        flagged = after.flagged(threshold).mean(axis=0)
        success, success_8bit = after.success(threshold), rounded.success(threshold)
        arrays |= {f"flagged_{name}": flagged, f"success_{name}": success,
                   f"success_8bit_{name}": success_8bit}  # fmt: skip
        figures["points"][name] = {
            "threshold": threshold,
            "clean_flagged": rate(before.flagged(threshold).mean(axis=0)),
            "flagged": rate(flagged, attacked & after.wanted),
            "success": rate(success),
            "success_8bit": rate(success_8bit),
            **_distances(distance, attacked, success > 0.5),
        }
    if not figures["points"]:
        figures |= _distances(distance, attacked, after.wanted)
    if defense.detector.kind == "corrector":
        reached = attacked & bare.wanted
        restored = after.logits.argmax(axis=1) == labels
        figures["correction"] = {
            "target_broken": rate(~after.wanted, reached), "label_restored": rate(restored, reached)
        }  # fmt: skip
    if defense.detector.kind == "set":
        others = ~np.isin(splits.test.ids, ids)
        control = splits.test.images[others][:_CONTROL_IMAGES]
        fooling = attacked & after.wanted
        figures["sets"] = assess_sets(
            seed, defense, pair.adversarial[fooling], control, clean.images[fooling]
        )
    return figures, arrays


def _distances(distance, attacked, succeeded) -> dict[str, float | None]:
    """Of the successes alone; the median counts a failure as infinitely far."""
    return {
        "mean_l2": metrics.mean_or_none(distance[attacked & succeeded]),
        "median_l2": metrics.median_l2(distance[attacked], succeeded[attacked]),
    }
