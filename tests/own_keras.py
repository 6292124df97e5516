"""A detector in Keras as a user would write it: an autoencoder's error, trained by `fit`."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import own_data
from keras import layers

from advdet import bridges


def classifier(half="full"):
    model = keras.Sequential([layers.Input(own_data.SHAPE), layers.Flatten(), layers.Dense(10)])
    model.layers[-1].set_weights(own_data.linear(half))
    return bridges.keras_classifier(model)


def fit(images, labels, seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([
        layers.Input(own_data.SHAPE), layers.Flatten(), layers.Dense(24, "tanh"),
        layers.Dropout(0.1), layers.Dense(64), layers.Reshape(own_data.SHAPE),
    ])  # fmt: skip
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(images, images, batch_size=200, epochs=6, verbose=0)
    return model


def reconstruction(images, outputs):
    return keras.ops.sum(keras.ops.square(images - outputs), axis=(1, 2, 3))


detector = bridges.keras_detector(score=reconstruction, fit=fit)
