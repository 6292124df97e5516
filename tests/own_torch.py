"""A detector in torch as a user would write it: an autoencoder's error, trained by `fit`."""

import own_data
import torch
from torch import nn

from advdet import bridges

torch.set_num_threads(1)  # the tests run in as many processes as there are cores


def classifier(half="full"):
    weights, bias = own_data.linear(half)
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    net[2].weight.data, net[2].bias.data = torch.tensor(weights.T.copy()), torch.tensor(bias)
    return bridges.torch_classifier(net)  # in training mode: the bridge puts its copy to rest


def fit(images, labels):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 64))
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        reconstruction(images, net).mean().backward()
        optimizer.step()
    return net


def reconstruction(images, fitted):
    return (fitted(images) - images.flatten(1)).square().sum(1)


detector = bridges.torch_detector(reconstruction, fit=fit)
