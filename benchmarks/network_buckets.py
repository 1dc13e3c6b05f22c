"""The gradient buckets of the five networks, as DDP makes them: `python -m benchmarks.network_buckets`.

Sizes and operations follow from each network's published shape. Tensors become ready in reverse order and fill buckets
of 25 MiB, the first of 1 MiB, each closed by the tensor that fills it (DDP's rule, after its rebuild). A bucket is
ready after the share of backward that its layers and all before it (from the loss) take, counted in two ways: by
layers, which is right while launching kernels takes the time, and by operations, which is right once samples do.

Prints the `bucket_mb`, `ready_by_layers` and `ready_by_work` lines of `src/cannikin/sim/data/workloads.toml`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

FIRST_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
Layer = tuple[float, float]  # parameters, multiply-adds for one sample


def conv(inputs: int, outputs: int, kernel: int, size: int) -> Layer:
    """Return a square convolution and its batch norm, at this output size."""
    parameters = inputs * outputs * kernel**2
    return parameters + 2 * outputs, parameters * size**2


def dense(inputs: int, outputs: int, repeats: float = 1.0) -> Layer:
    """Return a matrix product that is done so many times per sample."""
    return inputs * outputs + outputs, inputs * outputs * repeats


def resnet18() -> Iterator[Layer]:
    """Return the layers for 32 x 32 images: no first stride, no pooling."""
    yield conv(3, 64, 3, 32)
    inputs = 64
    for width, size in ((64, 32), (128, 16), (256, 8), (512, 4)):
        for block in range(2):
            yield conv(inputs if block == 0 else width, width, 3, size)
            yield conv(width, width, 3, size)
            if block == 0 and inputs != width:
                yield conv(inputs, width, 1, size)
        inputs = width
    yield dense(512, 10)


def resnet50() -> Iterator[Layer]:
    """Return the layers for 224 x 224 images."""
    yield conv(3, 64, 7, 112)
    inputs = 64
    for width, size, blocks in ((64, 56, 3), (128, 28, 4), (256, 14, 6), (512, 7, 3)):
        for block in range(blocks):
            yield conv(inputs, width, 1, size)
            yield conv(width, width, 3, size)
            yield conv(width, 4 * width, 1, size)
            if block == 0:
                yield conv(inputs, 4 * width, 1, size)
            inputs = 4 * width
    yield dense(2048, 1000)


def bert() -> Iterator[Layer]:
    """Return BERT base on 384 tokens; to write a gradient of an embedding counts as 20 operations."""
    tokens, width = 384, 768
    embeddings = (30522 + 512 + 2) * width
    yield embeddings, 20 * embeddings
    for _ in range(12):
        for _ in range(4):
            yield dense(width, width, tokens)
        yield dense(width, 4 * width, tokens)
        yield dense(4 * width, width, tokens)
    yield dense(width, 2, tokens)


def deepspeech2() -> Iterator[Layer]:
    """Return two convolutions and five bidirectional GRUs of 912 units, which make the paper's 52 M parameters."""
    frames, units = 400, 912
    yield 32 * 41 * 11, 32 * 41 * 11 * 81 * frames
    yield 32 * 32 * 21 * 11, 32 * 32 * 21 * 11 * 41 * frames
    inputs = 1312
    for _ in range(5):
        for _ in range(2):
            parameters = 3 * (inputs * units + units**2 + 2 * units)
            yield parameters, parameters * frames
        inputs = units
    yield dense(units, 29, frames)


def ncf() -> Iterator[Layer]:
    """Return NeuMF on MovieLens-1M with 98 factors, which make the paper's 5.2 M parameters; embeddings as in BERT."""
    factors = 98
    for size in (4 * factors, factors):
        for rows in (6040, 3706):
            yield rows * size, 20 * rows * size / 256
    for inputs, outputs in pairwise((8 * factors, 4 * factors, 2 * factors, factors)):
        yield dense(inputs, outputs)
    yield dense(2 * factors, 1)


def buckets(layers: list[Layer]) -> tuple[list[float], list[float], list[float]]:
    """Return bytes, and the shares of backward by layers and by operations after which each bucket is ready."""
    sizes, by_layers, by_work = [], [], []
    filled, work, total_work = 0.0, 0.0, sum(layer[1] for layer in layers)
    for number, (parameters, operations) in enumerate(reversed(layers), start=1):
        filled, work = filled + 4 * parameters, work + operations
        if filled >= (BUCKET_BYTES if sizes else FIRST_BYTES) or number == len(layers):
            sizes.append(filled)
            by_layers.append(number / len(layers))
            by_work.append(work / total_work)
            filled = 0.0
    return sizes, by_layers, by_work


def main() -> None:
    """Print the lines of the data file."""
    for network in (resnet18, resnet50, bert, deepspeech2, ncf):
        layers = list(network())
        sizes, by_layers, by_work = buckets(layers)
        parameters = sum(layer[0] for layer in layers)
        print(f"# {network.__name__}: {parameters / 1e6:.1f} M parameters, {len(layers)} layers, {len(sizes)} buckets")
        print(f"bucket_mb = {[round(size / 1e6, 2) for size in sizes]}")
        print(f"ready_by_layers = {np.round(by_layers, 3).tolist()}")
        print(f"ready_by_work = {np.round(by_work, 3).tolist()}")


if __name__ == "__main__":
    main()
