"""torch from compiled attacks: exact gradients under every transformation, sharding, randomness."""

import os
import pathlib
import subprocess
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys

import advdet
from advdet import bridges, inputs, torch_bridge
from advdet.attacks import DDN, CarliniWagner
from advdet.attacks.objectives import Generic
from advdet.defenses import score_images, undefended
from advdet.splits import Splits
from advdet.types import Batch, FitData, InputError

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

torch.set_num_threads(1)


class Twin(nn.Module):
    """`toys.ToyApply` in torch, with the weights copied over."""

    def __init__(self, variables):
        super().__init__()
        for name, value in variables.items():
            self.register_buffer(name, torch.tensor(np.asarray(value)))

    def forward(self, images):
        flat = images.permute(0, 2, 3, 1).flatten(1) - 0.5
        return torch.tanh(flat @ self.w1) @ self.w2 + flat @ self.skip + self.bias


NETWORK = toys.network()
TWIN = bridges.torch_classifier(Twin(NETWORK.variables))
IMAGES = toys.digits()
DIRECTION = np.random.RandomState(5).randn(toys.PIXELS).astype(np.float32)


def _logits(images):
    return TWIN(images).logits


@pytest.fixture(scope="module")
def linear_score():
    direction = torch.tensor(DIRECTION)
    return bridges.torch_detector(lambda x: x.permute(0, 2, 3, 1).flatten(1) @ direction)


def test_values_are_torch_s_own():
    with torch.no_grad():
        plain = Twin(NETWORK.variables)(torch.tensor(IMAGES.transpose(0, 3, 1, 2))).numpy()
    np.testing.assert_allclose(_logits(IMAGES), plain, atol=1e-6)
    np.testing.assert_allclose(jax.jit(_logits)(IMAGES), plain, atol=1e-6)
    one_by_one = jax.vmap(lambda x: _logits(x[None])[0])
    np.testing.assert_allclose(jax.jit(one_by_one)(IMAGES), plain, atol=1e-5)
    twice = jax.vmap(one_by_one)(IMAGES.reshape(4, 4, *toys.SHAPE))
    np.testing.assert_allclose(twice.reshape(plain.shape), plain, atol=1e-5)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f, jax.vmap])
def test_gradients_equal_the_closed_form(transform):
    def margin(image):
        logits = _logits(image[None])[0]
        return logits[3] - logits[7]

    chosen = IMAGES[:4] if transform is jax.vmap else IMAGES[0]
    found = np.asarray(transform(jax.grad(margin))(jnp.asarray(chosen)))
    v = {name: np.asarray(value, np.float64) for name, value in NETWORK.variables.items()}
    for image, gradient in zip(chosen.reshape(-1, *toys.SHAPE), found.reshape(-1, *toys.SHAPE)):
        hidden = np.tanh((image.ravel().astype(np.float64) - 0.5) @ v["w1"])
        slope = v["w1"] @ ((1 - hidden**2) * (v["w2"][:, 3] - v["w2"][:, 7]))
        np.testing.assert_allclose(gradient.ravel(), slope, atol=1e-5)


def test_a_whole_jacobian_and_a_second_look_at_one_forward_pass():
    plain = jax.jacrev(lambda x: NETWORK(x[None]).logits[0])
    found = jax.jit(jax.vmap(jax.jacrev(lambda x: _logits(x[None])[0])))(IMAGES[:3])
    np.testing.assert_allclose(found, jax.vmap(plain)(IMAGES[:3]), atol=1e-5)
    # The graph of a forward pass serves one backward pass; others make it again.
    _, pull_back = jax.vjp(_logits, jnp.asarray(IMAGES))
    pull = jnp.asarray(np.random.RandomState(1).randn(len(IMAGES), toys.CLASSES), jnp.float32)
    (first,), (second,) = pull_back(pull), pull_back(pull)
    np.testing.assert_allclose(first, second, atol=1e-6)
    assert np.abs(first).max() > 0


def test_a_graph_that_is_gone_is_made_again():
    pulls = [jax.vjp(lambda x: _logits(x).sum(axis=1), jnp.asarray(IMAGES[:2]))[1]]
    pulls += [jax.vjp(lambda x: _logits(x).sum(axis=1), jnp.asarray(IMAGES[2:4]))[1]
              for _ in range(torch_bridge._GRAPHS_KEPT)]  # fmt: skip
    assert len(torch_bridge._graphs) == torch_bridge._GRAPHS_KEPT
    (late,) = pulls[0](jnp.ones(2))
    wanted = jax.grad(lambda x: NETWORK(x).logits.sum())(jnp.asarray(IMAGES[:2]))
    np.testing.assert_allclose(late, wanted, atol=1e-5)


@pytest.mark.parametrize("attack", [DDN(40), CarliniWagner(2, 40, 0.1, 1.0)])
def test_torch_and_jax_twins_of_one_network_give_the_same_images(attack, linear_score):
    targets = toys.wrong_targets(NETWORK, IMAGES)
    threshold = float(np.quantile(IMAGES.reshape(len(IMAGES), -1) @ DIRECTION, 0.5))
    ours = toys.guarded(NETWORK, toys.LinearScore(), jnp.asarray(DIRECTION), threshold, 5.0)
    theirs = toys.guarded(TWIN, linear_score, (), threshold, 5.0)
    plain = toys.attack(attack, Generic(), ours, IMAGES, targets)
    through = toys.attack(attack, Generic(), theirs, IMAGES, targets)
    assert plain.success.sum() > len(IMAGES) / 2
    np.testing.assert_array_equal(plain.success, through.success)
    np.testing.assert_allclose(through.distance, plain.distance, atol=1e-3)
    np.testing.assert_allclose(through.image, plain.image, atol=1e-3)


def test_an_image_s_result_does_not_depend_on_its_batch_mates():
    targets = toys.wrong_targets(NETWORK, IMAGES)
    run = lambda todo: toys.attack(
        DDN(40), Generic(), undefended(TWIN), IMAGES, targets, todo=np.array(todo)
    )
    together, alone = run(range(len(IMAGES))), run([5])
    np.testing.assert_allclose(alone.image[5], together.image[5], atol=1e-5)
    np.testing.assert_allclose(alone.distance[5], together.distance[5], atol=1e-5)


_SHARDED = """
import faulthandler, functools, sys
faulthandler.dump_traceback_later(150, exit=True)
import jax, jax.numpy as jnp, numpy as np, torch
jax.config.update("jax_num_cpu_devices", 2)
from jax.sharding import Mesh, PartitionSpec as P
from advdet import bridges
torch.set_num_threads(1)
ask = bridges.torch_detector(lambda x: torch.sin(x).flatten(1).sum(1))
score = lambda x: ask.score(jax.random.key(0), (), None, x[None])[0]

@jax.jit
def climb(images):
    def on_device(images):
        step = lambda _, x: x + 0.01 * jax.vmap(jax.grad(score))(x)
        return jax.lax.fori_loop(0, 80, step, images)
    return jax.shard_map(on_device, mesh=Mesh(np.array(jax.devices()), ("d",)), in_specs=P("d"),
                         out_specs=P("d"), check_vma=False)(images)

images = np.random.RandomState(0).rand(2 * 24, 40, 40, 3).astype(np.float32)  # 460 KB a device
found = np.asarray(climb(images))
for _ in range(80):
    images = images + np.float32(0.01) * np.cos(images)
np.testing.assert_allclose(found, images, atol=1e-4)
print("done")
"""


def test_large_arrays_on_two_devices_neither_hang_nor_mix_up():
    root = pathlib.Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-c", _SHARDED], cwd=root, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(root)}, timeout=300,
    )  # fmt: skip
    assert ran.stdout == "done\n", ran.stderr[-3000:]


# ---- chance


@pytest.fixture(scope="module")
def noisy():
    return bridges.torch_detector(
        lambda x: nn.functional.dropout(x, 0.5, training=True).flatten(1).sum(1), random=True
    )


def test_random_scores_follow_the_image_s_key_and_nothing_else(noisy):
    defense = toys.guarded(NETWORK, noisy)
    ids = np.arange(len(IMAGES))
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    ask = lambda seed, images: score_images(jax.random.key(seed), defense, images, ids)
    first = ask(0, IMAGES)
    np.testing.assert_array_equal(first, ask(0, IMAGES))
    assert (first != ask(1, IMAGES)).all()
    assert len(set(np.round(ask(0, np.repeat(IMAGES[:1], len(IMAGES), 0)), 4))) > 10
    mates = np.concatenate([IMAGES[:1], np.zeros_like(IMAGES[1:])])
    assert ask(0, mates)[0] == first[0]
    assert torch.equal(before, torch.random.get_rng_state())  # the user's own draws go on


def test_a_random_score_s_gradient_is_that_of_its_draw(noisy):
    def both(key):
        score = lambda x: noisy.score(key, (), NETWORK, x[None])[0]
        return jax.value_and_grad(score)(jnp.asarray(IMAGES[0]))

    value, gradient = jax.jit(both)(jax.random.key(3))
    assert set(np.unique(gradient)) <= {0.0, 2.0}  # what dropout keeps is doubled
    np.testing.assert_allclose(value, (gradient * IMAGES[0]).sum(), rtol=1e-5)


# ---- modules are taken as they are, at rest


def test_a_module_is_copied_and_put_into_evaluation_mode():
    net = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 10))
    assert net.training
    taken = bridges.torch_classifier(net)
    first = np.asarray(taken(IMAGES).logits)
    np.testing.assert_array_equal(first, taken(IMAGES).logits)
    np.testing.assert_allclose(taken(IMAGES[:3]).logits, first[:3], atol=1e-6)
    assert net.training and net[3].weight.requires_grad  # the user's own is left alone
    net[3].weight.data.zero_()
    np.testing.assert_array_equal(first, taken(IMAGES).logits)


def test_normalisation_and_layouts():
    seen = []
    see = lambda x: (seen.append(x.detach().clone()), x.flatten(1)[:, :10])[1]
    images = np.random.RandomState(0).rand(2, 4, 5, 3).astype(np.float32)
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.0, 2.0)
    given = bridges.torch_classifier(see, mean=mean, std=std)
    given(images)
    wanted = (images - np.array(mean, np.float32)) / np.array(std, np.float32)
    np.testing.assert_allclose(seen[-1].numpy(), wanted.transpose(0, 3, 1, 2), rtol=1e-5)
    gradient = jax.grad(lambda x: given(x).logits.sum())(jnp.asarray(images))
    taken = np.zeros((3, 20))
    taken.flat[:10] = 1  # the first ten entries in torch's order
    by_hand = taken.reshape(3, 4, 5).transpose(1, 2, 0) / np.array(std)
    np.testing.assert_allclose(gradient, np.broadcast_to(by_hand, images.shape), rtol=1e-5)
    bridges.torch_classifier(see, layout="NHWC", mean=0.5)(images)
    np.testing.assert_allclose(seen[-1].numpy(), images - np.float32(0.5), rtol=1e-5)


def test_a_module_may_write_into_its_images():
    net = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 10))
    gradient = jax.grad(lambda x: bridges.torch_classifier(net)(x).logits.sum())
    assert np.abs(gradient(jnp.asarray(IMAGES))).max() > 0


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: bridges.torch_classifier(nn.Conv2d(3, 8, 3)),
            "image of shape .8, 8, 1. in layout",
        ),
        (lambda: bridges.torch_classifier(nn.Flatten(0)), r"shape \(64,\) for 1 image; wanted"),
        (lambda: bridges.torch_classifier(nn.Flatten(), layout="HWC"), "unknown layout 'HWC'"),
        (lambda: bridges.torch_classifier(nn.Flatten(), std=0.0), "std must be above 0"),
        (lambda: bridges.torch_classifier(lambda x: x.detach().flatten(1)), "has no gradient"),
        (lambda: bridges.torch_classifier(lambda x: [1.0]), "gives list; wanted a tensor"),
        (lambda: bridges.torch_classifier(lambda x, beta: x), "parameter 'beta' that nothing"),
    ],
)
def test_bad_torch_code_is_refused_in_words(make, message):
    with pytest.raises(InputError, match=message):
        make()(IMAGES)


def test_training_mode_and_batch_statistics_are_refused():
    drop = nn.Dropout(0.5)
    with pytest.raises(InputError, match="module 'drop', which is in training mode"):
        bridges.torch_classifier(lambda x: drop(x).flatten(1))
    by_batch = bridges.torch_classifier(lambda x: (x - x.mean(0)).flatten(1)[:, :10])
    by_chance = bridges.torch_classifier(lambda x: (x + torch.rand_like(x)).flatten(1)[:, :10])
    data = Splits.from_arrays(
        test=(IMAGES, np.arange(16) % 10), clean=(toys.digits(7), np.arange(16) % 10)
    )
    for classifier, message in (
        (by_batch, "depends on the other images of its batch"),
        (by_chance, "gives another answer for the same image each time"),
        (bridges.torch_classifier(nn.Sequential(Twin(NETWORK.variables), nn.Softmax(1))),
         "returns probabilities"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            inputs.check_classifier(classifier, data)


def test_a_fit_gets_tensors_and_a_seed_of_its_own():
    seen = {}

    def fit(images, labels, seed):
        seen.update(images=images, labels=labels, seed=seed, draw=float(torch.rand(())))
        return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(64, 1))

    detector = bridges.torch_detector(fit=fit, mean=0.5)
    batch = toys_batch()
    fitted = detector.fit(jax.random.key(0), NETWORK, batch)
    first = dict(seen)
    assert first["images"].shape == (16, 1, 8, 8) and first["labels"].dtype == torch.int64
    np.testing.assert_allclose(first["images"][:, 0], IMAGES[..., 0] - 0.5, atol=1e-6)
    detector.fit(jax.random.key(0), NETWORK, batch)
    assert seen["draw"] == first["draw"]
    detector.fit(jax.random.key(1), NETWORK, batch)
    assert seen["draw"] != first["draw"] and seen["seed"] != first["seed"]
    scores = detector.score(jax.random.key(0), fitted, NETWORK, jnp.asarray(IMAGES))
    np.testing.assert_array_equal(
        scores, detector.score(jax.random.key(0), fitted, NETWORK, jnp.asarray(IMAGES))
    )
    assert not fitted.value.training


def toys_batch():
    batch = Batch(IMAGES, np.arange(16, dtype=np.int32) % 10, np.arange(16, dtype=np.int32))
    return FitData(batch, batch)


# ---- modules as people have them


def _net(width: int = 10):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_modules_keep_the_type_that_they_compute_in(dtype):
    try:
        torch.set_default_dtype(getattr(torch, dtype))
        net = _net()
        classifier = bridges.torch_classifier(net)
        images = np.random.RandomState(0).rand(5, 8, 8, 1).astype(np.float32)
        logits, slopes = jax.value_and_grad(lambda x: classifier(x).logits[:, 0].sum())(
            jnp.asarray(images)
        )
    finally:
        torch.set_default_dtype(torch.float32)
    weight = net[1].weight.detach().double().numpy()
    bias = net[1].bias.detach().double().numpy()
    expected = (images.reshape(5, -1) @ weight[0] + bias[0]).sum()
    np.testing.assert_allclose(logits, expected, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(slopes).reshape(5, -1), np.tile(weight[0], (5, 1)), 1e-5)
    assert slopes.dtype == logits.dtype == jnp.float32


def _weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have the new one
        return torch.nn.utils.weight_norm(layer)


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm", "new weight_norm"])
def test_modules_with_computed_weights_are_taken(norm):
    normed = {
        "weight_norm": _weight_norm, "spectral_norm": torch.nn.utils.spectral_norm,
        "new weight_norm": torch.nn.utils.parametrizations.weight_norm,
    }[norm]  # fmt: skip
    net = _net()
    normed(net[1])
    net(torch.zeros(1, 1, 8, 8))  # as after training
    images = np.random.RandomState(0).rand(5, 8, 8, 1).astype(np.float32)
    net.eval()
    expected = net(torch.from_numpy(images.transpose(0, 3, 1, 2))).detach().numpy()
    found = bridges.torch_classifier(net)(images).logits
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_module_that_cannot_be_copied_is_refused_in_words():
    net = _net()
    net.lock = threading.Lock()
    with pytest.raises(InputError, match="cannot be copied .*: give a function that calls it"):
        bridges.torch_classifier(net)


def test_two_logits_are_no_score():
    data = toys.splits(toys.network())
    with pytest.raises(InputError, match=r"z\[:, 1\] - z\[:, 0\] is a score"):
        advdet.evaluate(
            bridges.torch_detector(_net(2)), classifier=toys.network(), data=data, num_images=4
        )
