"""torch modules and functions as JAX functions with exact gradients; see `bridges`.

The forward pass of a gradient keeps torch's graph until the backward pass asks for it, so that each
costs what it costs in torch. Where a graph is gone (nobody asked in time) it is made again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from advdet import functions, host_calls
from advdet.types import InputError

_GRAPHS_KEPT = 16  # those of calls under way at once, on all devices
_calls = itertools.count()
_graphs: OrderedDict[int, tuple[Any, Any]] = OrderedDict()


@dataclasses.dataclass(frozen=True, eq=False)
class TorchFunction:
    """A torch function of images, callable from JAX.

    Attributes:
      function: tensor of images -> tensor [B, ...]; None where `fitted` is one.
      width: entries of a row: 0 for one number [B], None for [B, K] with K found by a trial.
      what: its name in messages.
      layout: of its images, "NCHW" or "NHWC".
      mean, std: of the normalisation (image - mean) / std, for each channel or all.
      device: torch's name of the device.
      random: whether it draws random numbers; then each image goes alone, with a seed of its own.
      differentiable: whether it has useful gradients.
      threads: torch's own on CPU. The setting belongs to a thread, and callbacks have theirs.
    """

    function: Callable | None
    width: int | None
    what: str
    layout: str
    mean: Sequence[float] | float | None
    std: Sequence[float] | float | None
    device: str
    random: bool
    differentiable: bool = True
    threads: int = dataclasses.field(default_factory=lambda: imported().get_num_threads())
    on_host = True

    def __call__(self, images: jax.Array, fitted: Any = None, key: jax.Array | None = None):
        torch = imported()
        function = functools.partial(self._rows, torch, fitted)
        width = self._trial(torch, function, images.shape[1:])
        seeds = ()
        if self.random:
            if key is None:
                raise InputError(f"{self.what} draws random numbers and was given no key")
            seeds = (jax.random.bits(key, (len(images),), "uint32"),)
        shape = (width,) if width else ()
        call = _differentiable if self.differentiable else _value
        return call(_Host(torch, function, shape, self.threads), jnp.asarray(images), seeds)

    def to_tensor(self, images: np.ndarray):
        """Images [N, H, W, C] in [0, 1] as the function wants them."""
        torch = imported()
        return self._prepared(torch, torch.from_numpy(np.array(images, np.float32)), None)

    def _prepared(self, torch, images, function):
        # Modules may write into what they are given.
        images = images.to(self.device, _dtype(torch, function), copy=True)
        if self.mean is not None or self.std is not None:
            like = dict(dtype=images.dtype, device=self.device)
            images = images - torch.as_tensor(0.0 if self.mean is None else self.mean, **like)
            images = images / torch.as_tensor(1.0 if self.std is None else self.std, **like)
        return images.permute(0, 3, 1, 2).contiguous() if self.layout == "NCHW" else images

    def _rows(self, torch, fitted, images, seeds=None):
        """The function's answers for a leaf tensor [N, H, W, C]; seeds [N] where it is random."""
        function = fitted if self.function is None else self.function
        given = {} if self.function is None else {"fitted": fitted}
        ask = lambda x: _answers(torch, function, self.what, x, given)
        if not self.random:
            return ask(self._prepared(torch, images, function))
        devices = [] if self.device == "cpu" else [self.device]
        answers = []
        with torch.random.fork_rng(devices):
            for image, seed in zip(images, seeds):  # alone: torch's draws go by place in a batch
                torch.manual_seed(int(seed))
                answers.append(ask(self._prepared(torch, image[None], function)))
        return torch.cat(answers)

    def _trial(self, torch, function, shape) -> int:
        """The width of a row, by one empty image: what is wrong is said before anything is run."""
        like = dict(dtype=torch.float32, requires_grad=self.differentiable)
        empty = torch.zeros((1, *shape), **like)
        try:
            with torch.enable_grad(), _exact(torch):
                found = function(empty, np.zeros(1, np.uint32))
            found_shape = tuple(found.shape)
        except InputError:
            raise
        except Exception as error:  # foreign code can raise anything
            raise InputError(
                f"{self.what} cannot be called on an image of shape {tuple(shape)} in layout "
                f"{self.layout}: {functions.first_line(error)}"
            ) from error
        if self.differentiable and not found.requires_grad:
            raise InputError(
                f"{self.what} has no gradient for its images (it leaves torch, or detaches them); "
                "mend that, or say differentiable=False"
            )
        if self.width is None and len(found_shape) == 2 and found_shape[0] == 1:
            return found_shape[1]
        if self.width == 0 and found_shape in ((1,), (1, 1)):
            return 0
        wanted = "[1, K]" if self.width is None else "[1]"
        if self.width == 0 and found_shape == (1, 2):
            wanted += " (of two logits z, z[:, 1] - z[:, 0] is a score)"
        raise InputError(
            f"{self.what} gives a tensor of shape {found_shape} for 1 image; wanted {wanted}"
        )


class _Host:
    """What the callbacks run: values, values with a graph kept, slopes."""

    def __init__(self, torch, function, shape, threads):
        self._torch, self._function, self.shape = torch, function, shape
        self._threads = threads

    def value(self, images, *seeds):
        with self._torch.no_grad(), self._settings():
            found = self._function(self._torch.from_numpy(images), *seeds)
        return (found.cpu().numpy(),)

    def value_and_ticket(self, images, *seeds):
        """The value, and [N, 2] the call's number and each image's row in it."""
        leaf, found = self._with_graph(images, *seeds)
        number = next(_calls) % 2**31
        _graphs[number] = leaf, found
        while len(_graphs) > _GRAPHS_KEPT:
            _graphs.popitem(last=False)
        ticket = np.stack([np.full(len(images), number), np.arange(len(images))], 1)
        return found.detach().cpu().numpy(), ticket.astype(np.int32)

    def slope(self, images, tickets, pull, *seeds):
        """Each image's gradient of sum(pull * value); several rows may be of one image."""
        active = np.flatnonzero(pull.reshape(len(images), -1).any(axis=1))
        if not len(active):
            return (np.zeros_like(images),)
        number, rows = tickets[active[0], 0], tickets[active, 1]
        kept = _graphs.pop(int(number), None)
        if kept is None or (tickets[active, 0] != number).any():
            kept = self._with_graph(images[active], *(seed[active] for seed in seeds))
            rows = np.arange(len(active))
        leaf, found = kept
        pull = pull.reshape(len(images), *found.shape[1:])
        if len(active) == len(images) == len(leaf) and (rows == np.arange(len(rows))).all():
            return (self._pull_back(leaf, found, pull, False),)  # as a rule
        slope, turn = np.zeros_like(images), _occurrence(rows)
        for now in range(turn.max() + 1):
            chosen = turn == now
            cotangent = np.zeros(tuple(found.shape), np.float32)
            cotangent[rows[chosen]] = pull[active[chosen]]
            gradient = self._pull_back(leaf, found, cotangent, bool(now < turn.max()))
            slope[active[chosen]] = gradient[rows[chosen]]
        return (slope,)

    def _with_graph(self, images, *seeds):
        with self._torch.enable_grad(), self._settings():
            leaf = self._torch.from_numpy(images).requires_grad_(True)
            return leaf, self._function(leaf, *seeds)

    def _pull_back(self, leaf, found, cotangent, again: bool) -> np.ndarray:
        cotangent = self._torch.from_numpy(cotangent).to(found.device)
        with self._settings():
            (gradient,) = self._torch.autograd.grad(found, leaf, cotangent, retain_graph=again)
        return gradient.cpu().numpy()

    def _settings(self):
        if self._torch.get_num_threads() != self._threads:
            self._torch.set_num_threads(self._threads)
        return _exact(self._torch)


def _occurrence(rows: np.ndarray) -> np.ndarray:
    """How often each entry stood before its place: [3, 4, 3] -> [0, 0, 1]."""
    order = np.argsort(rows, kind="stable")
    ranked = rows[order]
    first = np.searchsorted(ranked, ranked)
    turn = np.empty(len(rows), np.int64)
    turn[order] = np.arange(len(rows)) - first
    return turn


def _value(host: _Host, images, seeds):
    return host_calls.call(host.value, [(host.shape, np.float32)], images, *seeds)[0]


_differentiable = jax.custom_vjp(_value, nondiff_argnums=(0,))


def _forward(host, images, seeds):
    results = [(host.shape, np.float32), ((2,), np.int32)]
    value, tickets = host_calls.call(host.value_and_ticket, results, images, *seeds)
    return value, (images, seeds, tickets)


def _backward(host, kept, pull):
    images, seeds, tickets = kept
    results = [(images.shape[1:], np.float32)]
    slope = host_calls.call(host.slope, results, images, tickets, pull, *seeds)
    return *slope, tuple(None for _ in seeds)


_differentiable.defvjp(_forward, _backward)


def _answers(torch, function, what, images, given):
    """The function's answers as a float32 tensor."""
    if isinstance(function, torch.nn.Module):
        found = function(images)
    else:
        found = functions.call(function, what, {"images": images}, given)
    if not isinstance(found, torch.Tensor):
        raise InputError(f"{what} gives {type(found).__name__}; wanted a tensor")
    return found.float()


def _exact(torch):
    """Without TF32, which CUDA's convolutions take by default: it flips success tests."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


def _dtype(torch, function):
    """The type that a function computes in: a module's own, else torch's default."""
    weights = function.parameters() if isinstance(function, torch.nn.Module) else ()
    kinds = (weight.dtype for weight in weights if weight.is_floating_point())
    return next(kinds, torch.get_default_dtype())


def frozen(module):
    """A module's copy in evaluation mode, whose weights ask for no gradient.

    Raises:
      InputError: it cannot be copied.
    """
    # Weights that are computed (torch.nn.utils.weight_norm, spectral_norm) belong to a graph, which
    # deepcopy refuses; they are computed again at the first call.
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, imported().Tensor) and not value.is_leaf
    }
    try:
        module = copy.deepcopy(module, computed)
    except Exception as error:  # modules may hold locks, files, and what else there is
        raise InputError(
            f"the torch module cannot be copied ({functions.first_line(error)}): give a function "
            "that calls it, after .eval()"
        ) from error
    return module.eval().requires_grad_(False)


def refuse_training(torch, function: Callable, what: str) -> None:
    """Looks for modules that a plain function works with.

    Raises:
      InputError: one of them is in training mode.
    """
    try:
        seen = inspect.getclosurevars(inspect.unwrap(function))
    except TypeError:
        return
    for name, value in {**seen.globals, **seen.nonlocals}.items():
        if isinstance(value, torch.nn.Module) and any(part.training for part in value.modules()):
            raise InputError(
                f"{what} uses the module {name!r}, which is in training mode: its answers depend "
                f"on the batch or on chance; call {name}.eval() first"
            )


def imported():
    """torch itself.

    Raises:
      InputError: it is not there.
    """
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"torch cannot be imported ({error}): pip install 'advdet[torch]'"
        ) from None
    return torch
