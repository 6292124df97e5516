"""A detector in scikit-learn: a one-class SVM, whose slope is written down in JAX."""

import jax.numpy as jnp
import own_data
from sklearn.svm import OneClassSVM

import advdet
from advdet import bridges

classifier = own_data.jax_classifier


def fit(images, labels):
    return OneClassSVM(gamma=0.1, nu=0.1).fit(images.reshape(len(images), -1)[:300])


def one_class(images, fitted):
    return -fitted.decision_function(images.reshape(len(images), -1))


def stand_in(images, fitted):
    flat, vectors = images.reshape(len(images), 1, -1), fitted.support_vectors_[None]
    kernel = jnp.exp(-0.1 * jnp.sum(jnp.square(flat - vectors), axis=2))
    return fitted.offset_[0] - kernel @ fitted.dual_coef_[0]


detector = advdet.Detector.from_function(bridges.numpy_score(one_class, stand_in), fit=fit)
no_gradient = advdet.Detector.from_function(bridges.numpy_score(one_class), fit=fit)
