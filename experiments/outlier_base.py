"""What the paper's extra class costs beside a network that was trained like it.

`outlier_class` answers by a network of its own, and a ratio to the shipped classifier compares two
trainings. Here a network of K classes is trained on the clean images by the recipe and the epochs
of the network of K + 1 classes, and the paper's attack is run on both of them, and on the shipped
classifier. --crafted trains the extra class on so many distinct adversarial images, made by DDN,
in place of the 10,000 that are repeated until they are as many as the clean ones.

python -m experiments.outlier_base --num_images=100
python -m experiments.outlier_base --num_images=100 --crafted=55000
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from experiments import ablation, common, evaluation

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)
flags.FLAGS.set_default("defense", "outlier_class")
CRAFTED = flags.DEFINE_integer(
    "crafted", 0, "Distinct adversarial training images; 0 takes the usual fit.", lower_bound=0
)
CRAFT_STEPS = flags.DEFINE_integer(
    "craft_steps", 100, "DDN's steps for each of these.", lower_bound=1
)
_BASE = 0x4241


def trained_base(splits, detector, *, seed: int):
    """A classifier of K classes, by the recipe and epochs of the detector's network."""
    import jax

    from advdet import nets, training
    from advdet.detectors import learning
    from advdet.types import Classifier, FitData

    net = nets.net_for("", splits.num_classes, splits.image_shape)
    variables = learning.train_network(
        jax.random.fold_in(jax.random.key(seed), _BASE), "base", detector, net,
        training.ClassifierLoss(net), splits.train, FitData(splits.train, splits.select),
        learning.careful_recipe_for(net, detector.epochs),
    )  # fmt: skip
    return Classifier(variables, nets.NetApply(net))


def distinct_images(classifier, splits, count: int, steps: int, *, seed: int, path: Path):
    """Adversarial versions of the first `count` training images; kept beside `path`."""
    from advdet import cells
    from advdet.attacks import presets
    from advdet.attacks.objectives import Generic
    from advdet.defenses import undefended
    from advdet.types import Batch

    source = splits.train.take(slice(count))
    targets = cells.random_targets(seed, source.labels, source.ids, splits.num_classes)
    values = presets.settings("ddn", "fast", source.images.shape[-1], "none") | {"steps": steps}
    found = ablation.attacked(
        "training images by ddn", presets.make("ddn", values), Generic(), undefended(classifier),
        source, targets, seed=seed, path=path, resume=True,
    )  # fmt: skip
    return Batch(found.image, source.labels, source.ids).take(found.success & (found.distance > 0))


def main() -> None:
    """Trains the base, attacks all networks, prints, and saves the figures as JSON."""
    import jax

    from advdet import training, victims
    from advdet.attacks import presets
    from advdet.attacks.objectives import Generic, make
    from advdet.defenses import undefended, with_thresholds
    from advdet.types import FitData

    seed, whose = common.SEED.value, "the extra class is outlier_class's"
    detector, classifier, splits = ablation.prepared("OutlierClass", whose)
    folder = Path(evaluation.RESULTS_DIR.value)
    if CRAFTED.value:
        crafted = distinct_images(
            classifier, splits, CRAFTED.value, CRAFT_STEPS.value, seed=seed,
            path=folder / f"{splits.name}-distinct-{CRAFTED.value}-{CRAFT_STEPS.value}.json",
        )  # fmt: skip
        key_fit, key_score = jax.random.split(jax.random.key(seed))
        data = FitData(splits.train, splits.select, adversarial_train=crafted, progress=True)
        fitted = detector.fit(key_fit, classifier, data)
        victim = with_thresholds(key_score, detector, classifier, fitted, splits.threshold)
    else:
        victim = victims.defend(detector, classifier, splits, seed=seed)
    defense = victim.at("native")
    base = trained_base(splits, detector, seed=seed)

    clean, targets = ablation.paper_images(splits, seed)
    attack = ablation.paper_attack("outlier_class", clean.images.shape[-1])
    confidence = presets.PAPER_CONFIDENCE["outlier_class"]
    objective = make("paper", "outlier_class", seed=seed, targeted=True, confidence=confidence)
    run = lambda name, goal, shown: ablation.attacked(
        name, attack, goal, shown, clean, targets, seed=seed
    )
    on_base = run("base", Generic(), undefended(base))
    on_shipped = run("shipped", Generic(), undefended(classifier))
    found = run("outlier_class", objective, defense)
    predicted, scores = ablation.verdicts(defense, found.image, clean.ids, seed=seed)
    won = (predicted == targets) & (scores <= float(defense.threshold))
    rows = {
        "shipped classifier": ablation.figures(on_shipped.success, on_shipped.distance, on_base),
        "base": ablation.figures(on_base.success, on_base.distance, on_base),
        "extra class, to the base": ablation.figures(won, found.distance, on_base),
        "extra class, to the shipped": ablation.figures(won, found.distance, on_shipped),
    }
    accuracy = {
        "base": training.accuracy(base, splits.test),
        "shipped": training.accuracy(classifier, splits.test),
    }
    print(", ".join(f"{name} {share:.2%} right" for name, share in accuracy.items()))
    ablation.keep(
        "outlier_base", f"{splits.name}-outlier_base{'-distinct' if CRAFTED.value else ''}.json",
        attack, rows, accuracy=accuracy, epochs=detector.epochs,
        crafted=CRAFTED.value and {"wanted": CRAFTED.value, "changed": len(crafted.labels)},
    )  # fmt: skip


if __name__ == "__main__":
    common.run(main)
