"""A detector in JAX as a user would write it: distance from what principal components span."""

import jax.numpy as jnp
import numpy as np
import own_data

import advdet

classifier = own_data.jax_classifier


def fit(images, labels):
    flat = images.reshape(len(images), -1)
    mean = flat.mean(0)
    rows = np.linalg.svd(flat - mean, full_matrices=False)[2][:20]
    return {"mean": mean, "rows": rows}


def reconstruction(images, fitted):
    flat = images.reshape(len(images), -1) - fitted["mean"]
    inside = flat @ fitted["rows"].T @ fitted["rows"]
    return jnp.sum(jnp.square(flat - inside), axis=1)


detector = advdet.Detector.from_function(reconstruction, fit=fit)
