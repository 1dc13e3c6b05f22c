"""The demonstration's data and networks: small enough for two cores, real enough to learn something."""

from __future__ import annotations

import gzip
import io
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from cannikin.demo.settings import FASHION_MNIST_FILES, check_folder
from cannikin.errors import InvalidInputError

__all__ = ["load_data", "make_network"]


def load_data(dataset: str, folder: Path | None) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Training samples, and the images and labels of the test set.

    Args:
        dataset: "digits", which scikit-learn brings, or "fashion-mnist".
        folder: where Fashion-MNIST is: its four original .gz files, or images.npy.xz and labels.npz.
    """
    if dataset == "digits":
        return _digits()
    check_folder(dataset, folder)
    assert folder is not None
    return _fashion_mnist(folder)


def _digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """scikit-learn's 1,797 handwritten digits of 8x8 pixels, every fifth of them for the test."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InvalidInputError("the demonstration needs scikit-learn: pip install 'cannikin[demo]'") from error
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16 - 0.5
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~test], labels[~test]), images[test], labels[test]


def _fashion_mnist(folder: Path) -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    compact = folder / FASHION_MNIST_FILES[0]
    if compact.exists():
        with lzma.open(compact) as file:
            images = np.load(io.BytesIO(file.read()))
        saved = np.load(folder / "labels.npz")
        labels = np.concatenate([saved["train"], saved["test"]])
    else:
        images = np.concatenate([_idx(folder / f"{part}-images-idx3-ubyte.gz") for part in ("train", "t10k")])
        labels = np.concatenate([_idx(folder / f"{part}-labels-idx1-ubyte.gz") for part in ("train", "t10k")])
    pixels = torch.from_numpy(images).float().unsqueeze(1) / 255 - 0.3
    classes = torch.from_numpy(labels).long()
    # A quarter of each: the demonstration is to end in minutes.
    return TensorDataset(pixels[:15000], classes[:15000]), pixels[60000:62500], classes[60000:62500]


def _idx(path: Path) -> np.ndarray:
    """An array in the format of the MNIST files."""
    with gzip.open(path) as file:
        content = file.read()
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


def make_network(dataset: str) -> nn.Module:
    """A small convolutional network; the same weights every time for a seed set before."""
    side, stride = (8, 1) if dataset == "digits" else (28, 2)
    width = -(-side // stride) // 2
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, 1, 1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * width * width, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
