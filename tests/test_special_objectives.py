"""Objectives made for one defence, against arithmetic by hand."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet import cells, runs, starts
from advdet.attacks import CarliniWagner
from advdet.attacks.ddn import DDN
from advdet.attacks.goals import Objective
from advdet.attacks.objectives import Generic, make, resolve
from advdet.attacks.special_objectives import (
    Combined,
    FrozenPixels,
    JointlyOverSet,
    Stages,
    TargetDensity,
    TwoStages,
)
from advdet.detectors import Detector, from_spec
from advdet.detectors.kernel_density import KernelDensity
from advdet.splits import Splits
from advdet.types import Batch, FitData, InputError, pytree


@dataclasses.dataclass(frozen=True)
class Given(Detector):
    """A detector whose margins are given, and whose logits are."""

    def logits(self, key, fitted, classifier, images):
        return jnp.broadcast_to(fitted["logits"][None], (len(images), toys.CLASSES))

    def margins(self, fitted, classifier, images):
        return jnp.broadcast_to(fitted["margins"][None], (len(images), 3))

    def score(self, key, fitted, classifier, images):
        return jnp.max(self.margins(fitted, classifier, images), axis=1)


def given(logits, margins, threshold=0.0, scale=1.0):
    fitted = {"logits": jnp.float32(logits), "margins": jnp.float32(margins)}
    return toys.guarded(toys.network(), Given(), fitted, threshold, scale)


IMAGE = jnp.zeros(toys.SHAPE, jnp.float32)


# ---- combined logits


def flagged_by(form, logits, score, scale=1.0):
    """Whether the extra class wins over the best of the others."""
    best = int(np.argmax(logits))
    goals = Combined(form=form)(
        jax.random.key(0), given(logits, [score] * 3, scale=scale), IMAGE, jnp.int32(best)
    )
    second = np.sort(logits)[-2] - np.max(logits)  # the margin where nothing is flagged
    return bool(goals.losses[0] > max(second, 0.0)), goals


@pytest.mark.parametrize("offset", [5.0, 0.0, -50.0])
@pytest.mark.parametrize("form", ["shift", "network"])
def test_shift_invariant_forms_flag_just_where_the_score_is_positive(form, offset, rng):
    """Also where all logits are negative, where the paper's form is the wrong way round."""
    for score in (-3.0, -0.01, 0.01, 2.0):
        logits = rng.randn(toys.CLASSES) + offset
        flagged, goals = flagged_by(form, logits, score, scale=0.5)
        assert flagged == (score > 0)
        assert bool(goals.met()) == (score <= 0)


def test_the_network_form_is_the_n_plus_1_network_itself(rng):
    logits, extra = rng.randn(toys.CLASSES), 0.7
    score = extra - logits.max()
    goals = Combined(form="network")(
        jax.random.key(0), given(logits, [score] * 3, scale=9.0), IMAGE, jnp.int32(4)
    )
    joined = np.append(logits, extra)
    wanted = np.delete(joined, 4).max() - logits[4]
    np.testing.assert_allclose(goals.losses, [wanted], rtol=1e-5)


@pytest.mark.parametrize("score, flagged", [(-0.6, False), (-0.4, True), (0.1, True)])
def test_the_released_code_s_form_flags_from_minus_a_half(score, flagged):
    logits = np.r_[3.0, np.zeros(toys.CLASSES - 1)]
    found, goals = flagged_by("code", logits, score)
    assert found == flagged
    assert bool(goals.met()) == (not flagged)  # its own success test, stricter than the defence's


def test_the_released_code_s_form_flags_all_where_logits_are_negative():
    assert flagged_by("code", np.r_[-1.0, -np.ones(toys.CLASSES - 1) * 3], -5.0)[0]


def test_the_paper_s_form_turns_round_where_logits_are_negative():
    logits = np.r_[-1.0, -np.ones(toys.CLASSES - 1) * 3]
    assert flagged_by("paper", logits, -0.5)[0]
    assert not flagged_by("paper", logits, 0.5)[0]


# ---- stages


def test_each_stage_is_a_goal_and_all_must_be_met():
    logits = np.r_[np.zeros(toys.CLASSES - 1), 2.0]
    last = jnp.int32(toys.CLASSES - 1)
    call = lambda margins: Stages(detector_margin=0.1)(
        jax.random.key(0), given(logits, margins, threshold=1.0, scale=0.5), IMAGE, last
    )
    goals = call([0.5, 1.5, 0.0])
    np.testing.assert_allclose(goals.detector, [-0.4, 0.6, -0.9], rtol=1e-5)
    np.testing.assert_allclose(goals.losses, [-2.0, -0.8, 1.2, -1.8], rtol=1e-5)
    assert not goals.met()
    assert call([0.5, 0.85, 0.0]).met()


# ---- frozen pixels


def test_pixels_below_the_cut_are_frozen_and_several_cuts_are_tried():
    std = np.linspace(0, 0.3, toys.PIXELS).reshape(toys.SHAPE).astype(np.float32)
    defense = toys.guarded(toys.network(), toys.LinearScore(), {"std": jnp.asarray(std)})
    one = FrozenPixels(cut=0.1, confidence=2.0)
    assert one.variants() == (one,)
    np.testing.assert_array_equal(one.free(defense), std >= np.float32(0.1))
    several = FrozenPixels(confidence=2.0).variants()
    assert [v.cut for v in several] == list(FrozenPixels.CUTS)
    assert all(v.confidence == 2.0 for v in several)


def test_of_several_variants_the_nearest_success_of_each_image_counts(tmp_path):
    net = toys.network()
    std = np.random.RandomState(0).uniform(0, 0.25, toys.SHAPE).astype(np.float32)
    defense = toys.guarded(net, toys.LinearScore(), {"std": jnp.asarray(std)}, np.inf)

    class Free(FrozenPixels):
        """No detector in the way."""

        def __call__(self, key, view, image, target):
            return super().__call__(key, toys.guarded(view.classifier, Bare()), image, target)

    @dataclasses.dataclass(frozen=True)
    class Bare(Detector):
        kind = "none"

    pytree(Free)
    images = toys.digits(count=8)
    labels = toys.predicted(net, images)
    batch = Batch(images, labels, np.arange(8, dtype=np.int32))
    targets = toys.wrong_targets(net, images)
    run = lambda objective, path=None: cells.attack_in_variants(
        "toy", CarliniWagner(3, 60, 0.1, 1.0), objective, defense, batch, targets,
        seed=0, lanes=4, progress=False, path=path,
    )[0]  # fmt: skip
    several = run(Free(), tmp_path / "record.json")
    parts = [run(Free(cut=cut)) for cut in FrozenPixels.CUTS]
    distances = np.stack([np.where(p.success, p.distance, np.inf) for p in parts])
    np.testing.assert_array_equal(
        np.where(several.success, several.distance, np.inf), distances.min(0)
    )
    np.testing.assert_array_equal(several.num_gradients, sum(p.num_gradients for p in parts))
    moved = np.abs(several.image - images).reshape(8, -1).max(0) > 0
    assert several.success.any() and not moved[std.ravel() < FrozenPixels.CUTS[0]].any()
    kept = [cells.results.partial_path(cells.variant_path(tmp_path / "record.json", k))
            for k in range(3)]  # fmt: skip
    assert all(path.exists() for path in kept)


def test_images_on_which_an_attack_fails_begin_anew_elsewhere():
    net = toys.network()
    images = toys.digits(count=6)
    batch = Batch(images, toys.predicted(net, images), np.arange(6, dtype=np.int32))
    targets = toys.wrong_targets(net, images)
    bare = toys.guarded(net, Plain())
    run = lambda attack, **more: cells.attack_in_variants(
        "toy", attack, Objective(), bare, batch, targets, seed=0, lanes=3, progress=False, **more
    )[0]  # fmt: skip
    far = run(DDN(steps=200))
    assert far.success.all()
    one_look = DDN(steps=1)
    assert not run(one_look).success.any()
    starts = np.where((np.arange(6) < 4)[:, None, None, None], far.image, images)
    asked = []
    only = np.arange(6) != 1
    found = run(one_look, only=only, elsewhere=lambda variant: asked.append(variant) or starts)
    np.testing.assert_array_equal(found.success, [True, False, True, True, False, False])
    np.testing.assert_array_equal(found.image[found.success], far.image[found.success])
    np.testing.assert_array_equal(found.image[4:], images[4:])
    np.testing.assert_array_equal(found.num_gradients, [2, 0, 2, 2, 1, 1])
    assert asked == [Objective()]
    whole = run(DDN(steps=200), elsewhere=lambda variant: pytest.fail("nothing was lost"))
    np.testing.assert_array_equal(whole.image, far.image)


@dataclasses.dataclass(frozen=True)
class Plain(Detector):
    """Flags nothing."""

    kind = "none"


# ---- kernel density


@pytest.fixture(scope="module")
def density():
    net = toys.network()
    rng = np.random.RandomState(0)
    fitted = {
        "centres": jnp.asarray(rng.uniform(-1, 1, (60, toys.HIDDEN)), jnp.float32),
        "labels": jnp.asarray(np.repeat(np.arange(3), [30, 20, 10]), jnp.int32),
        "sigma": jnp.float32(0.7),
        "native": jnp.float32(1.0),
    }
    return toys.guarded(net, from_spec("kernel_density"), fitted, 1.5, 0.4)


def log_density(fitted, feature, label):
    own = np.asarray(fitted["centres"], np.float64)[np.asarray(fitted["labels"]) == label]
    squared = ((own - feature) ** 2).sum(1)
    return np.log(np.mean(np.exp(-squared / float(fitted["sigma"]))))


def test_the_goal_is_the_target_s_density_not_the_predicted_class_s(density):
    image = jnp.asarray(toys.digits(2, 1)[0])
    feature = np.asarray(density.classifier(image[None]).features["penultimate"][0], np.float64)
    for target in range(3):
        goals = TargetDensity()(jax.random.key(0), density, image, jnp.int32(target))
        wanted = -log_density(density.fitted, feature, target) - 1.5
        np.testing.assert_allclose(goals.detector, [wanted], rtol=1e-4)
        np.testing.assert_allclose(goals.losses[1], wanted / 0.4, rtol=1e-4)


def test_an_untargeted_goal_is_the_score_itself(density):
    image = jnp.asarray(toys.digits(2, 1)[0])
    goals = TargetDensity(targeted=False)(jax.random.key(0), density, image, jnp.int32(0))
    score = density.score(jax.random.key(0), image[None])[0]
    np.testing.assert_allclose(goals.detector, [score - 1.5], rtol=1e-5)


def test_two_stages_take_some_centres_of_each_class_and_one_constant(density):
    objective = TwoStages(num_centres=15, mask_seed=3)
    view = objective.view(density, None, np.zeros((0, *toys.SHAPE)))
    labels = np.asarray(view.fitted["labels"])
    assert [(labels == c).sum() for c in range(3)] == [15, 15, 10]
    all_rows = {tuple(row) for row in np.asarray(density.fitted["centres"])}
    assert all(tuple(row) in all_rows for row in np.asarray(view.fitted["centres"]))
    assert objective.begins == "undefended" and objective.variants() == (objective,)
    goals = objective(jax.random.key(0), view, jnp.asarray(toys.digits(2, 1)[0]), jnp.int32(1))
    np.testing.assert_array_equal(goals.losses, jnp.concatenate([goals.classifier, goals.detector]))
    other = TwoStages(num_centres=15, mask_seed=4).view(density, None, np.zeros((0, *toys.SHAPE)))
    assert (np.asarray(other.fitted["centres"]) != np.asarray(view.fitted["centres"])).any()


# ---- a set


def joint_scene():
    """A defence, the set that an attack without it found, all moved one way, and clean images."""
    rng = np.random.RandomState(0)
    reference = rng.rand(60, toys.PIXELS).astype(np.float32)
    clean = rng.rand(40, *toys.SHAPE).astype(np.float32)
    first = np.clip(clean + 0.1 + 0.1 * rng.randn(*clean.shape), 0, 1).astype(np.float32)
    detector = from_spec("mmd:sigma2=5.0,num_reference=60,set_size=40,num_permutations=199")
    fitted = {"reference": jnp.asarray(reference)}
    return toys.guarded(toys.network(), detector, fitted), first, clean


def test_the_joint_goal_is_the_witness_of_the_clean_original():
    defense, first, clean = joint_scene()
    view = JointlyOverSet().view(defense, first, clean)
    wide = lambda a: np.asarray(a, np.float64).reshape(len(a), -1)
    kernel = lambda a, b: np.exp(-((wide(a)[:, None] - wide(b)[None]) ** 2).sum(-1) / 5.0)
    witness = lambda a: kernel(a, first).mean(1) - kernel(a, defense.fitted["reference"]).mean(1)
    for row in (0, 7):
        for moved in (clean[row], first[row]):
            goals = JointlyOverSet(detector_margin=0.5)(
                jax.random.key(0), view, jnp.asarray(moved), jnp.int32(1)
            )
            wanted = witness(moved[None]) - witness(clean[row][None]) + 0.5
            np.testing.assert_allclose(goals.detector, wanted, rtol=1e-3, atol=1e-6)
            spread = witness(clean).std()
            np.testing.assert_allclose(goals.losses[1], wanted[0] / spread, rtol=1e-3, atol=1e-4)


def test_a_set_whose_images_reach_the_joint_goal_is_not_told_from_training_images():
    defense, first, clean = joint_scene()
    objective = JointlyOverSet()
    view = objective.view(defense, first, clean)
    excess = lambda x: objective(jax.random.key(0), view, x, jnp.int32(1)).detector[0]
    assert float(jnp.min(jax.vmap(excess)(jnp.asarray(first)))) > 0

    @jax.jit
    def moved(images):
        def step(_, x):
            values, slopes = jax.vmap(jax.value_and_grad(excess))(x)
            down = slopes / jnp.sqrt(jnp.sum(jnp.square(slopes), axis=(1, 2, 3), keepdims=True))
            return x - jnp.where(values[:, None, None, None] > 0, 0.02 * down, 0.0)

        return jax.lax.fori_loop(0, 300, step, images)

    found = np.asarray(moved(jnp.asarray(first)))
    p = lambda images: float(defense.detector.p_value(
        jax.random.key(1), defense.fitted, defense.classifier, jnp.asarray(images)
    ))  # fmt: skip
    assert p(first) == np.float32(1 / 200) and p(clean) > 0.1 and p(found) > 0.1
    # Far less is given up than what the attack was after.
    away = lambda a: np.sqrt(np.square(a - first).sum((1, 2, 3))).mean()
    assert away(found) < 0.9 * away(clean)


# ---- names


@pytest.mark.parametrize(
    "defense, auto",
    [("outlier_class", "both_sides"), ("input_pca", "frozen"), ("hidden_pca", "stages"),
     ("mmd", "jointly"), ("kernel_density", "density"), ("dropout", "quantile"),
     ("mean_blur", "generic")],
)  # fmt: skip
def test_auto_takes_the_strongest_objective_known(defense, auto):
    assert resolve("auto", defense, from_spec(defense)) == auto


@pytest.mark.parametrize(
    "name, form", [("combined", "paper"), ("combined_code", "code"), ("combined_shift", "shift"),
                   ("network", "network"), ("paper", "network")],
)  # fmt: skip
def test_forms_of_the_combined_logits_have_names(name, form):
    made = make(resolve(name, "outlier_class", from_spec("outlier_class")), "outlier_class",
                seed=0, targeted=True)  # fmt: skip
    assert made.form == form


@pytest.mark.parametrize(
    "name, defense", [("frozen", "kernel_density"), ("density", "input_pca"), ("jointly", "binary"),
                      ("network", "binary"), ("combined", "mean_blur")],
)  # fmt: skip
def test_objectives_of_other_defences_are_refused(name, defense):
    with pytest.raises(InputError, match=f"objective '{name}' is none for defence {defense}"):
        resolve(name, defense, from_spec(defense))


# ---- natural starts


@pytest.mark.parametrize("targeted", [True, False])
def test_a_natural_start_is_the_nearest_image_that_reaches_the_goals(density, targeted):
    known = Batch(toys.digits(8, 40), np.arange(40, dtype=np.int32) % 3, np.arange(40))
    logits = np.asarray(density.classifier(jnp.asarray(known.images)).logits)
    known = known._replace(labels=logits.argmax(1).astype(np.int32))
    clean = Batch(toys.digits(9, 6), np.zeros(6, np.int32), np.arange(100, 106))
    present = np.unique(known.labels)
    goal = np.resize(present, 6).astype(np.int32)
    scores = np.asarray(density.score(jax.random.key(0), jnp.asarray(known.images)))
    view = density.at(float(np.median(scores)))
    objective = TargetDensity(targeted=targeted, detector_margin=0.01)
    found = starts.natural(objective, view, known, clean, goal)
    reached = scores + 0.01 <= np.median(scores)
    for image, wanted, start in zip(clean.images, goal, found):
        rows = reached & ((known.labels == wanted) if targeted else (known.labels != wanted))
        distances = np.square(known.images - image).sum((1, 2, 3))
        nearest = known.images[np.where(rows, distances, np.inf).argmin()] if rows.any() else image
        np.testing.assert_array_equal(start, nearest)
    nothing = starts.natural(TargetDensity(confidence=1e6), view, known, clean, goal)
    np.testing.assert_array_equal(nothing, clean.images)


def splits_with_training_images():
    """Toy digits, with training images."""
    draw = lambda seed, count: (toys.digits(seed, count), np.arange(count) % toys.CLASSES)
    return Splits.from_arrays(train=draw(1, 60), clean=draw(2, 80), test=draw(3, 12))


@pytest.mark.parametrize("limited", [True, False])
def test_natural_images_are_none_that_a_detector_keeps(limited):
    splits = splits_with_training_images()
    known = starts.held_out(splits, limited)
    half = splits.half("attacker") if limited else splits
    for split in (splits.train, splits.test):
        assert not np.isin(known.ids, split.ids).any()
    wanted = np.concatenate([half.select.ids, half.threshold.ids])
    np.testing.assert_array_equal(known.ids, wanted)
    assert len(known.images) == len(known.labels) == len(wanted) > 0


def test_a_run_starts_at_no_centre_of_the_density():
    """A centre has its full height at itself, and nothing near it need have any."""
    net, splits = toys.network(), splits_with_training_images()
    fitted = from_spec("kernel_density:sigma=0.01").fit(
        jax.random.key(0), net, FitData(splits.train, splits.select)
    )
    view = toys.guarded(net, KernelDensity(sigma=0.01), fitted, 1e6)
    clean = splits.test
    step = SimpleNamespace(
        case=SimpleNamespace(splits=splits, threat_model="perfect_knowledge"), view=view,
        done=SimpleNamespace(clean=clean), goal=np.asarray(clean.labels),
    )  # fmt: skip
    found = runs._natural(step, TargetDensity(targeted=False))
    moved = (found != clean.images).any(axis=(1, 2, 3))
    assert moved.any()
    for start in found[moved]:
        assert not (start == splits.train.images).all(axis=(1, 2, 3)).any()


def test_where_natural_images_come_from_is_part_of_what_was_run():
    ask = starts.looks_for_natural
    plain, density = Generic(), TargetDensity()
    assert ask("perfect_knowledge", density, True) and ask("perfect_knowledge", density, False)
    assert ask("limited_knowledge", plain, True) and not ask("limited_knowledge", plain, False)
    assert not ask("perfect_knowledge", plain, True)


def test_the_density_is_attacked_from_both_sides_and_the_nearest_success_counts(density):
    one, other = TargetDensity(confidence=1.0, detector_margin=0.5).variants()
    assert (one.begins, other.begins) == ("image", "natural")
    assert dataclasses.replace(other, natural=0) == one
    assert one.variants() == (one,) and other.variants() == (other,)


def test_any_objective_can_begin_at_natural_images_too():
    for name, defense in (("generic", "binary"), ("quantile", "dropout"), ("stages", "hidden_pca")):
        made = make(name, defense, seed=0, targeted=True, natural=1, confidence=2.0)
        assert [variant.begins for variant in made.variants()] == ["image", "natural"]
        assert {variant.confidence for variant in made.variants()} == {2.0}
    cuts = make("frozen", "input_pca", seed=0, targeted=True, natural=1).variants()
    assert len(cuts) == 6 and {cut.begins for cut in cuts} == {"image", "natural"}
    with pytest.raises(InputError, match="natural must be 0"):
        make("jointly", "mmd", seed=0, targeted=True, natural=1)
    with pytest.raises(InputError, match="natural must be 0, 1 or 2, not 3"):
        make("generic", "binary", seed=0, targeted=True, natural=3)
