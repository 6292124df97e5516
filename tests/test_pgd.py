"""PGD in its three forms: closed forms, plain loops, balls, and the toy of two bumps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

from advdet.attacks import PGD, OrthogonalPGD, SelectivePGD, Square, balls, presets
from advdet.attacks.goals import Goals, Objective
from advdet.attacks.objectives import Generic
from advdet.attacks.pgd import without
from advdet.defenses import undefended
from advdet.types import InputError, pytree

KINDS = {"pgd": PGD, "selective_pgd": SelectivePGD, "orthogonal_pgd": OrthogonalPGD}
by_kind = pytest.mark.parametrize("kind", KINDS)
by_norm = pytest.mark.parametrize("norm", balls.NORMS)
OUT_OF_REACH = Generic(confidence=1e4)


def size(moves, norm):
    """[N] norms, in float64."""
    flat = np.asarray(moves, np.float64).reshape(len(moves), -1)
    return np.abs(flat).max(1) if norm == "linf" else np.linalg.norm(flat, axis=1)


def begin(attack, images, targets, start=None, free=None):
    """States of all images, with keys made from their rows."""
    rows = jnp.arange(len(images), dtype=jnp.int32)
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(9), i))(rows)
    start = images if start is None else start
    free = np.ones(images.shape, bool) if free is None else free
    given = map(jnp.asarray, (images, targets, start, free))
    return keys, jax.vmap(attack.init)(keys, rows, *given)


@jax.jit
def look(attack, objective, defense, keys, states):
    """One step of each image that is not over."""

    def one(key, state):
        after, over = attack.step(key, objective, defense, state), attack.done(state)
        return jax.tree.map(lambda new, old: jnp.where(over, old, new), after, state)

    return jax.vmap(one)(keys, states)


def final(attack, objective, defense, images, targets, **options):
    """The last states."""
    keys, states = begin(attack, images, targets, **options)
    for _ in range(attack.max_steps()):
        states = look(attack, objective, defense, keys, states)
    assert np.asarray(attack.done(states)).all()
    return states


def run(*arguments, **options):
    """The results, with the arguments of `final`."""
    states = final(*arguments, **options)
    return jax.tree.map(np.asarray, jax.vmap(arguments[0].result)(states))


def two_classes(rng):
    """A linear classifier of two classes, images far from the box, labels, dual norms."""
    skip = 0.1 * rng.randn(toys.PIXELS, 2)
    net = toys.classifier(skip=skip, classes=2)
    images = rng.uniform(0.35, 0.65, (toys.ROWS, *toys.SHAPE)).astype(np.float32)
    slope = skip[:, 0] - skip[:, 1]
    return net, images, toys.predicted(net, images), {"linf": np.abs(slope).sum(),
                                                      "l2": np.linalg.norm(slope)}  # fmt: skip


# ---- the optimum of a linear classifier


@by_norm
@pytest.mark.parametrize("random_start", [True, False])
def test_on_a_linear_classifier_the_margin_falls_by_epsilon_times_the_dual_norm(
    rng, norm, random_start
):
    net, images, labels, dual = two_classes(rng)
    epsilon = 0.2 if norm == "linf" else 0.9
    attack = PGD(epsilon, 60, norm=norm, random_start=random_start)
    states = final(attack, OUT_OF_REACH, undefended(net), images, 1 - labels)
    before = toys.margins(net, images, 1 - labels)
    after = toys.margins(net, np.asarray(states.walk.current), 1 - labels)
    np.testing.assert_allclose(before - after, epsilon * dual[norm], rtol=1e-4)


@by_norm
@pytest.mark.parametrize("targeted", [True, False])
def test_on_a_linear_classifier_success_is_where_the_radius_suffices(rng, norm, targeted):
    net, images, labels, dual = two_classes(rng)
    gaps = -toys.margins(net, images, labels)
    epsilon = float(np.median(gaps)) / dual[norm]
    attack = PGD(epsilon, 60, norm=norm)
    wanted = 1 - labels if targeted else labels
    found = run(attack, Generic(targeted=targeted), undefended(net), images, wanted)
    clear = np.abs(gaps / (epsilon * dual[norm]) - 1) > 1e-3
    np.testing.assert_array_equal(found.success[clear], (gaps < epsilon * dual[norm])[clear])
    assert 0 < found.success.sum() < toys.ROWS


# ---- plain loops


def plain(kind, goals, image, attack):
    """The attack for one image from the image itself, in float64; the last image."""
    clean = image.astype(np.float64)
    now = clean.copy()
    unit = lambda v: v / np.linalg.norm(v)
    for _ in range(attack.steps):
        found = goals(now)
        losses, slopes = zip(*found)
        if kind == "pgd":
            followed = [s for value, s in found if value > 0] or list(slopes)
            slope = sum(followed)
        else:
            waiting = [k for k, value in enumerate(losses) if value > -attack.slack]
            chosen = waiting[0] if waiting else int(np.argmax(losses))
            slope = unit(slopes[chosen])
            if kind == "orthogonal_pgd":
                others = np.stack([s.ravel() for k, s in enumerate(slopes) if k != chosen], 1)
                along = np.linalg.lstsq(others, slope.ravel(), rcond=None)[0]
                slope = slope - (others @ along).reshape(slope.shape)
        direction = np.sign(slope) if attack.norm == "linf" else unit(slope)
        move = now - attack.travel * attack.epsilon / attack.steps * direction - clean
        if attack.norm == "linf":
            move = np.clip(move, -attack.epsilon, attack.epsilon)
        else:
            move *= min(1.0, attack.epsilon / np.linalg.norm(move))
        now = np.clip(clean + move, *attack.bounds)
    return now


@pytest.fixture(scope="module")
def guarded():
    """A network with a linear detector that most images are far above the threshold of."""
    net = toys.network()
    images = toys.digits(11)
    direction = np.random.RandomState(5).randn(toys.PIXELS).astype(np.float32)
    threshold = float(np.median(images.reshape(toys.ROWS, -1) @ direction)) - 1.0
    defense = toys.guarded(net, toys.LinearScore(), jnp.asarray(direction), threshold, 0.25)
    return defense, images, toys.wrong_targets(net, images)


@by_kind
@by_norm
def test_a_plain_loop_walks_the_same_way(guarded, kind, norm):
    defense, images, targets = guarded
    direction, scale = np.asarray(defense.fitted, np.float64), float(defense.scale)
    epsilon = 0.1 if norm == "linf" else 0.6
    attack = KINDS[kind](epsilon, 10, 4.0, norm, random_start=False)
    # Out of reach at once: no success ends a walk, and the goals still take turns.
    objective = Generic(detector_margin=1e3 * scale)
    threshold = float(defense.threshold) - 1e3 * scale
    near = dataclasses.replace(defense, threshold=defense.threshold + 1e3 * scale)
    for defended, objective, level in (
        (defense, objective, threshold), (near, Generic(confidence=50.0), threshold + 2e3 * scale)
    ):  # fmt: skip
        states = final(attack, objective, defended, images, targets)

        def goals(image, target, level=level, objective=objective):
            value, slope = toys.margin64(defense.classifier.variables, image, target)
            excess = (image.ravel() @ direction - level) / scale
            return [
                (value + objective.confidence, slope),
                (excess, direction.reshape(toys.SHAPE) / scale),
            ]

        for row, (image, target) in enumerate(zip(images, targets)):
            wanted = plain(kind, lambda x: goals(x, target), image, attack)  # noqa: B023
            np.testing.assert_allclose(states.walk.current[row], wanted, atol=2e-5)


# ---- which goal, and what is left of its gradient


def test_what_is_left_is_orthogonal_to_all_others_and_the_same_as_by_least_squares(rng):
    unit = lambda v: v / np.linalg.norm(v, axis=-1, keepdims=True)
    for count in (1, 2, 4):
        direction, others = unit(rng.randn(12)), unit(rng.randn(count, 12))
        rest = np.asarray(without(jnp.float32(direction), jnp.float32(others)))
        wanted = direction - others.T @ np.linalg.lstsq(others.T, direction, rcond=None)[0]
        np.testing.assert_allclose(rest, wanted, atol=1e-6)
        assert np.abs(others @ rest).max() < 1e-5


def test_a_direction_within_the_span_of_the_others_is_kept_and_missing_ones_do_nothing(rng):
    unit = lambda v: np.float32(v / np.linalg.norm(v))
    first, second = unit(rng.randn(12)), unit(rng.randn(12))
    for direction in (first, -first, unit(first + 2 * second)):
        others = jnp.asarray(np.stack([first, second, first, np.zeros(12, np.float32)]))
        np.testing.assert_array_equal(without(jnp.asarray(direction), others), direction)
    np.testing.assert_array_equal(without(jnp.asarray(first), jnp.zeros((3, 12))), first)
    nothing = without(jnp.zeros(12), jnp.asarray(first)[None])
    np.testing.assert_array_equal(nothing, 0.0)


@pytest.mark.parametrize("kind", ["selective_pgd", "orthogonal_pgd"])
@pytest.mark.parametrize("targeted", [True, False])
def test_a_step_serves_the_classifier_until_it_is_wrong_and_then_lowers_the_score(
    guarded, kind, targeted
):
    """Target 0 too: a class number is no truth value. All images are flagged throughout."""
    defense = dataclasses.replace(guarded[0], threshold=jnp.float32(-100.0))
    images = np.random.RandomState(3).uniform(0.35, 0.65, (toys.ROWS, *toys.SHAPE))
    images = images.astype(np.float32)  # no step meets the box
    labels = toys.predicted(defense.classifier, images)
    wanted = np.where(labels == 0, 1, 0).astype(np.int32) if targeted else labels
    attack = KINDS[kind](0.5, 100, 2.0, "l2", random_start=False)  # short steps
    objective = Generic(targeted=targeted)

    def seen(states):
        """Margins, the classes next to the wanted one, and scores."""
        current = states.walk.current
        logits = np.array(defense.classifier(current).logits)
        logits[np.arange(len(wanted)), wanted] = -np.inf
        margins = toys.margins(defense.classifier, current, wanted, targeted)
        return margins, logits.argmax(1), np.asarray(defense.score(jax.random.key(0), current))

    keys, states = begin(attack, images, wanted)
    now, turns = seen(states), set()
    for _ in range(30):
        margins, rivals, scores = now
        states = look(attack, objective, defense, keys, states)
        now = later, new_rivals, lower = seen(states)
        waiting = margins > -attack.slack
        smooth = waiting & (rivals == new_rivals)  # no kink on the way
        assert (later < margins)[smooth].all()
        assert (lower < scores)[~waiting].all()
        if kind == "orthogonal_pgd":  # and the other goal stays as it is, to first order
            assert np.abs(lower - scores)[waiting].max(initial=0) < 1e-4
        turns |= set(waiting)
    assert turns == {True, False}


@jax.jit
def one_step(attack, objective, state):
    return attack.step(jax.random.key(0), objective, None, state)


@pytree
@dataclasses.dataclass(frozen=True)
class Given(Objective):
    """Losses that are linear in the image, with slopes and levels given."""

    levels: tuple = (1.0, 1.0, 1.0)

    def __call__(self, key, defense, image, target):
        losses = jnp.stack([jnp.float32(level) + image[0, k, 0]
                            for k, level in enumerate(self.levels)])  # fmt: skip
        return Goals(losses[:1], losses[1:], losses)

    def is_random(self, defense):
        return False


@pytest.mark.parametrize(
    ("levels", "joint", "single"),
    [
        ((1.0, 1.0, 1.0), (1, 1, 1), 0),
        ((-1.0, 1.0, 1.0), (0, 1, 1), 1),
        ((-1.0, -1.0, 1.0), (0, 0, 1), 2),
        ((-0.02, -1.0, 1.0), (0, 0, 1), 0),  # within the slack: not yet done with
        ((0.0, -0.3, -0.2), (1, 1, 1), 0),  # a tie is no success, and nothing is above 0
    ],
)
def test_with_several_goals_the_joint_loss_is_of_the_open_ones_and_turns_go_in_order(
    levels, joint, single
):
    image = jnp.zeros((1, 3, 1))
    free = jnp.ones(image.shape, bool)
    moves = {}
    for kind in KINDS:
        attack = KINDS[kind](1.0, 10, 1.0, random_start=False, bounds=(-1.0, 1.0))
        state = attack.init(jax.random.key(0), jnp.int32(0), image, jnp.int32(0), image, free)
        state = one_step(attack, Given(levels=levels), state)
        moves[kind] = -10 * np.asarray(state.walk.current).ravel()
    np.testing.assert_allclose(moves["pgd"], joint, rtol=1e-5)
    np.testing.assert_allclose(moves["selective_pgd"], np.arange(3) == single, rtol=1e-5)
    np.testing.assert_allclose(moves["orthogonal_pgd"], np.arange(3) == single, rtol=1e-5)


def test_with_one_goal_all_three_are_the_same():
    net = toys.network()
    images = toys.digits(11)
    targets = toys.wrong_targets(net, images)
    one, *others = [
        run(KINDS[kind](0.15, 40), Generic(), undefended(net), images, targets) for kind in KINDS
    ]
    assert 0 < one.success.mean()
    for other in others:
        np.testing.assert_array_equal(one.success, other.success)
        np.testing.assert_allclose(one.image, other.image, atol=1e-5)


# ---- the toy of two bumps


@pytree
@dataclasses.dataclass(frozen=True)
class Bumps(Objective):
    """Two goals in a square, f = 10 (0.35 - bump at A), g = 10 (0.35 - bump at B), bumps Gaussian.

    Each is reached in a disc; the discs overlap in a small lens between the two. But A and B are
    2.5 standard deviations apart, so f + weight g has its minima near A and near B, whatever the
    weight, and none in the lens.
    """

    weight: float = 1.0
    joint: bool = dataclasses.field(default=False, metadata={"static": True})

    A, B, SIGMA = (0.25, 0.6), (0.75, 0.6), 0.2

    def values(self, image):
        flat = image.reshape(-1)
        square = lambda c: (flat[0] - c[0]) ** 2 + (flat[1] - c[1]) ** 2
        return [10 * (0.35 - jnp.exp(-square(c) / (2 * self.SIGMA**2))) for c in (self.A, self.B)]

    def __call__(self, key, defense, image, target):
        f, g = self.values(image)
        losses = [f + self.weight * g] if self.joint else [f, g]
        return Goals(f[None], g[None], jnp.stack(losses))

    def is_random(self, defense):
        return False


WEIGHTS = np.logspace(-4, 4, 161).astype(np.float32)


@jax.jit
def on_bumps(attack, objective, start):
    """The result from one start, in the whole square."""
    image = start.reshape(1, 2, 1)
    key, free = jax.random.key(0), jnp.ones(image.shape, bool)
    first = attack.init(key, jnp.int32(0), image, jnp.int32(0), image, free)
    step = lambda state: attack.step(jax.random.key(1), objective, None, state)
    last = jax.lax.while_loop(lambda state: ~attack.done(state), step, first)
    return attack.result(last), last.walk.current.reshape(-1)


def test_no_weight_puts_a_minimum_of_the_joint_loss_where_both_goals_are_reached():
    axis = np.linspace(0, 1, 401).astype(np.float32)
    points = jnp.asarray(np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2))
    f, g = map(np.asarray, jax.vmap(Bumps().values)(points))
    both = (f < 0) & (g <= 0)
    assert 100 < both.sum() < 0.03 * len(points)
    for weight in WEIGHTS:
        joint = (f + weight * g).reshape(401, 401)
        inner = joint[1:-1, 1:-1]
        neighbours = [joint[1 + i : 400 + i, 1 + j : 400 + j]
                      for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]  # fmt: skip
        minima = np.all([inner < other for other in neighbours], axis=0)
        assert minima.any() and not minima[both.reshape(401, 401)[1:-1, 1:-1]].any()


@by_norm
def test_on_two_bumps_the_joint_loss_fails_at_all_weights_and_taking_turns_does_not(norm):
    start = jnp.asarray([0.6, 0.95])
    settings = dict(epsilon=1.0, steps=400, norm=norm, random_start=False)
    attack = PGD(**settings)
    one = lambda weight: on_bumps(attack, Bumps(weight=weight, joint=True), start)
    found, last = jax.vmap(one)(jnp.asarray(WEIGHTS))
    success = np.asarray(found.success)
    if norm == "linf":
        assert not success.any()
    else:  # where A and B pull alike a walk passes through the lens on its way to one of them
        assert success.mean() < 0.06
    f, g = map(np.asarray, jax.vmap(Bumps().values)(last))
    assert ((f < 0) ^ (g <= 0))[~success].all()  # at the bottom of one of them
    for kind in (SelectivePGD, OrthogonalPGD):
        result, _ = on_bumps(kind(**settings), Bumps(), start)
        f, g = Bumps().values(result.image)
        assert result.success and f < 0 and g <= 0, kind


def test_on_two_bumps_hinges_take_turns_by_themselves():
    """A goal that is met adds nothing to the sum of hinges, so `pgd` itself is not fooled here."""
    attack = PGD(1.0, 400, random_start=False)
    assert on_bumps(attack, Bumps(), jnp.asarray([0.6, 0.95]))[0].success


@pytest.mark.parametrize("start", [(0.5, 0.05), (0.45, 0.05), (0.4, 0.1), (0.5, 0.3), (0.05, 0.9)])
def test_on_two_bumps_taking_turns_reaches_the_lens_from_many_starts(start):
    for kind, norm in ((SelectivePGD, "linf"), (SelectivePGD, "l2"), (OrthogonalPGD, "l2")):
        attack = kind(1.0, 400, norm=norm, random_start=False)
        assert on_bumps(attack, Bumps(), jnp.asarray(start))[0].success, (kind, norm)


# ---- balls


@by_norm
def test_draws_fill_the_ball_uniformly(norm):
    free = jnp.asarray([True, True, False, True]).reshape(1, 4, 1)
    keys = jax.random.split(jax.random.key(0), 4000)
    moves = jax.vmap(lambda k: balls.draw(k, free, norm=norm, epsilon=0.5))(keys)
    moves = np.asarray(moves).reshape(len(moves), -1)
    assert (moves[:, 2] == 0).all()
    lengths = size(moves, norm) / 0.5
    assert lengths.max() <= 1 + 1e-6
    # The share of the volume within a length: uniform. Means of 4,000 stray by 0.005.
    volume = lengths**3
    assert abs(volume.mean() - 0.5) < 0.02 and abs(np.mean(volume < 0.2) - 0.2) < 0.03
    assert np.abs(moves.mean(0)).max() < 0.02


@pytest.mark.parametrize("kind", [*KINDS, "square"])
@by_norm
def test_no_image_looked_at_leaves_radius_box_or_frozen_pixels(guarded, rng, kind, norm):
    defense, images, targets = guarded
    epsilon = 0.15 if norm == "linf" else 0.7
    make = Square if kind == "square" else KINDS[kind]
    attack = make(epsilon, 40, norm=norm)
    free = rng.rand(*images.shape) < 0.8
    start = np.clip(images + rng.uniform(-0.6, 0.6, images.shape), 0, 1).astype(np.float32)
    keys, states = begin(attack, images, targets, start, free)
    for _ in range(25):
        current = np.asarray(states.walk.current)
        moves = current.astype(np.float64) - images
        assert size(moves, norm).max() <= epsilon * (1 + 1e-5)
        assert current.min() >= 0 and current.max() <= 1
        np.testing.assert_array_equal(current[~free].view(np.int32), images[~free].view(np.int32))
        states = look(attack, OUT_OF_REACH, defense, keys, states)
    assert size(moves, norm).min() > 0.5 * epsilon  # the radius is used


# ---- the end of it


def test_the_first_success_ends_an_attack_and_an_image_as_wanted_needs_no_step():
    net = toys.network()
    images = toys.digits(11)
    attack = PGD(0.3, 40)
    already = run(attack, Generic(), undefended(net), images, toys.predicted(net, images))
    assert already.success.all() and (already.distance == 0).all()
    assert (already.num_gradients == 0).all()
    found = run(attack, Generic(), undefended(net), images, toys.wrong_targets(net, images))
    assert found.success.all() and found.num_gradients.max() < 40


@pytest.mark.parametrize(
    ("kind", "each"), [("pgd", 1), ("selective_pgd", 1), ("orthogonal_pgd", 2)]
)
def test_gradients_are_counted_that_are_followed(guarded, kind, each):
    defense, images, targets = guarded
    for random_start in (True, False):
        attack = KINDS[kind](0.1, 7, random_start=random_start)
        states = final(attack, OUT_OF_REACH, defense, images, targets)
        assert (np.asarray(states.walk.num_gradients) == 7 * each).all()
        assert (np.asarray(states.walk.iteration) == attack.max_steps()).all()
        assert attack.max_steps() == 8 + random_start


def test_the_first_look_is_at_the_start_and_the_second_at_a_random_image(guarded):
    defense, images, targets = guarded
    keys, states = begin(PGD(0.1, 5), images, targets)
    np.testing.assert_array_equal(states.walk.current, images)
    states = look(PGD(0.1, 5), OUT_OF_REACH, defense, keys, states)
    moves = np.asarray(states.walk.current) - images
    inner = (images > 0.1) & (images < 0.9)
    assert np.abs(moves[inner]).max() > 0.09 and abs(moves[inner].mean()) < 0.01
    assert len(np.unique(np.round(moves[inner], 6))) > 0.9 * inner.sum()


def test_a_success_meets_both_goals_and_a_failure_leaves_the_nearest_miss(guarded):
    defense, images, targets = guarded
    for kind in KINDS.values():
        found = run(kind(0.2, 60), Generic(), defense, images, targets)
        assert 0 < found.success.sum() < toys.ROWS and found.missed.any()
        scores = np.asarray(defense.score(jax.random.key(0), jnp.asarray(found.image)))
        margins = toys.margins(defense.classifier, found.image, targets)
        assert (scores <= defense.threshold + 1e-5)[found.success].all()
        assert (margins < 0)[found.success].all()
        np.testing.assert_array_equal(found.image[~found.success], images[~found.success])
        missed = found.missed & ~found.success
        margins = toys.margins(defense.classifier, found.nearest_miss, targets)
        assert (margins < 0)[missed].all()


# ---- settings


@pytest.mark.parametrize("name", presets.FIXED_RADIUS)
@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_take_the_radius_of_papers(name, preset):
    for channels, norm, epsilon in (
        (1, None, 0.3), (1, "linf", 0.3), (1, "l2", 2.0), (3, "linf", 8 / 255), (3, "l2", 0.5)
    ):  # fmt: skip
        values = presets.settings(name, preset, channels, "none", norm)
        attack = presets.make(name, values)
        assert (attack.norm, attack.epsilon) == (norm or "linf", epsilon)
        assert presets.make(name, values | {"epsilon": 0.1}).epsilon == 0.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"epsilon": 0.0}, "epsilon must be above 0"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"norm": "l1"}, "unknown norm 'l1'; known: linf, l2"),
    ],
)
def test_settings_out_of_range_are_refused(change, said):
    values = presets.settings("pgd", "fast", 1, "none")
    with pytest.raises(InputError, match=said):
        presets.make("pgd", values | change)
