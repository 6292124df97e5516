"""What experiments share that change one thing in a row of the paper's: attack, judge, compare."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments import common, evaluation, subject


def prepared(kind: str, whose: str):
    """What the flags name, with bad input refused before anything is run.

    Args:
      kind: name in `advdet.detectors` of the class that the experiment is about.
      whose: the message's beginning where the flags name another.

    Returns:
      (detector, classifier, splits).

    Raises:
      InputError: another detector, or a folder that cannot be written.
    """
    from advdet import detectors, results, training
    from advdet.types import InputError

    detector = detectors.from_spec(subject.DEFENSE.value)
    if not isinstance(detector, getattr(detectors, kind)):
        raise InputError(f"{whose}, not {subject.DEFENSE.value}'s")
    results.check_writable(evaluation.RESULTS_DIR.value)
    splits = common.splits()
    return detector, subject.classifier() or training.classifier_for(splits), splits


def keep(experiment: str, file: str, attack, rows: dict[str, dict], **more) -> None:
    """Prints the rows, and keeps them as JSON with the command that repeats them.

    Args:
      experiment: its module.
      file: the JSON's name in the results folder.
      attack: the attack that was run.
      rows: of `figures`, by name.
      **more: what else to keep.
    """
    import dataclasses

    from advdet import results

    print("\n".join(["", *lines(rows), ""]))
    command = evaluation.command(experiment)
    value = {"schema": results.SCHEMA, "kind": experiment, "command": command, **more}
    path = Path(evaluation.RESULTS_DIR.value, file)
    path.parent.mkdir(parents=True, exist_ok=True)
    results.write_json(path, value | {"attack": dataclasses.asdict(attack), "rows": rows})
    print(f"figures {path}")


def paper_attack(defense_name: str, channels: int):
    """C&W by the paper's row for a defence, with what the flags change in it."""
    from advdet.attacks import presets

    given = {
        "binary_search_steps": evaluation.BINARY_SEARCH_STEPS.value,
        "steps": evaluation.STEPS.value,
        "learning_rate": evaluation.LEARNING_RATE.value,
        "initial_const": evaluation.INITIAL_CONST.value,
    }
    values = presets.settings("carlini_wagner", "paper", channels, defense_name)
    changed = {name: value for name, value in given.items() if value is not None}
    return presets.make("carlini_wagner", values | changed)


def paper_images(splits, seed: int):
    """The test images to attack, as many as the flags say, and their random targets [N]."""
    from advdet import cells
    from advdet.attacks import presets

    count = evaluation.NUM_IMAGES.value or presets.NUM_IMAGES["paper"]
    clean = splits.test.take(slice(count))
    return clean, cells.random_targets(seed, clean.labels, clean.ids, splits.num_classes)


def attacked(name: str, attack, objective, shown, clean, targets, *, seed: int, **options):
    """The attack's results on clean images, NumPy [N, ...].

    Args:
      name: on the progress line.
      attack, objective: what to run.
      shown: the defence that the attacker is shown.
      clean: [N] images with their true labels.
      targets: [N] what the objective takes for them.
      seed: of the run.
      **options: of `cells.attack_images`.
    """
    from advdet import cells

    lanes = cells.default_lanes(len(targets))
    return cells.attack_images(
        name, attack, objective, shown, clean, targets, seed=seed, lanes=lanes, **options
    )[0]


def verdicts(defense, images, ids, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """What a defence without random draws says of images: labels [N] and scores [N]."""
    import jax

    from advdet.defenses import classify_images, score_images

    key_logits, key_score = jax.random.split(jax.random.key(seed))
    logits = classify_images(key_logits, defense, images, ids)
    return logits.argmax(axis=1), score_images(key_score, defense, images, ids)


def figures(success, distance, base) -> dict:
    """A row's figures as JSON.

    Args:
      success: [N] bool, of the attack on the defence.
      distance: [N] L2 of its images.
      base: the same attack's results on the network that the row is compared with.

    Returns:
      success_rate with its interval, mean_l2 over the successes, and the ratio of the two mean
      distances over the images on which both attacks succeed.
    """
    from advdet import metrics

    both = success & base.success
    return {
        "n": len(success),
        "success_rate": float(success.mean()),
        "interval": metrics.wilson(int(success.sum()), len(success)),
        "mean_l2": metrics.mean_or_none(distance[success]),
        "ratio": float(distance[both].mean() / base.distance[both].mean()) if both.any() else None,
    }


def lines(rows: dict[str, dict]) -> list[str]:
    """Figures as an aligned table, a row for each name."""
    from experiments import report

    table = [("", "n", "success", "95 %", "mean L2", "ratio")]
    for name, row in rows.items():
        limits = report.span(row["interval"], lambda v: f"{100 * v:.0f}")
        rate = report.percent(row["success_rate"])
        numbers = (report.number(row["mean_l2"]), report.number(row["ratio"]))
        table.append((name, str(row["n"]), rate, limits, *numbers))
    return list(report.aligned(table))
