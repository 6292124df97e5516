"""A detector as a user would write it: distance from what training images are made of."""

import dataclasses

import jax.numpy as jnp
import numpy as np

import advdet


@dataclasses.dataclass(frozen=True)
class Reconstruction(advdet.Detector):
    """Flags images that a few principal components cannot put together again."""

    components: int = 40

    def fit(self, key, classifier, data):
        flat = np.asarray(data.train.images, np.float64).reshape(len(data.train.images), -1)
        mean = flat.mean(0)
        _, _, rows = np.linalg.svd(flat - mean, full_matrices=False)
        kept = rows[: self.components]
        return {"mean": mean.astype(np.float32), "kept": kept.astype(np.float32)}

    def score(self, key, fitted, classifier, images):
        flat = images.reshape(images.shape[0], -1) - fitted["mean"][None]
        inside = jnp.matmul(flat, fitted["kept"].T, precision="highest")
        rest = flat - jnp.matmul(inside, fitted["kept"], precision="highest")
        return jnp.sum(jnp.square(rest), axis=1)
