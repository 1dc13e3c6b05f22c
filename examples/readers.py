"""Reads the examples' data sets, each from its usual public files or from a compact copy of them.

    cifar10        data_batch_1..5 and test_batch (python), the same with .bin, or train_1..5.webp and test.webp, each a
                   grid of 100 x 100 images, with labels.npz (needs Pillow)
    movielens_1m   ratings.dat of MovieLens-1M, NCF's ml-1m.train.rating and its companions, or ml-1m-ncf.npz
    text           input.txt
    an4            an4-mfcc13.npz: MFCC features; the corpus's own sound files would need an audio library
    squad          train-v1.1.json and dev-v1.1.json, or train.json and eval.json, with or without .xz

Files may lie in the folder given or in a folder directly in it.
"""

from __future__ import annotations

import json
import lzma
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Images", "Interactions", "Question", "Speech", "an4", "cifar10", "movielens_1m", "squad", "text"]

Array = npt.NDArray[Any]


class Images(NamedTuple):
    """Images [n, 32, 32, 3] and labels [n], both uint8."""

    images: Array
    labels: Array


class Interactions(NamedTuple):
    """Pairs of users and the items they rated, and for each user a held-out item followed by 99 never rated."""

    users: Array
    items: Array
    candidates: Array


class Speech(NamedTuple):
    """Utterances: features [frames, 13] of each, and what was said, in upper case."""

    features: list[Array]
    texts: list[str]


class Question(NamedTuple):
    """A question on a context; `start` is the place of the first answer in it."""

    context: str
    question: str
    answers: list[str]
    start: int


def locate(folder: str | Path, names: Sequence[str]) -> Path:
    """The first of these files in the folder, or in a folder directly in it."""
    homes = [Path(folder), *sorted(path for path in Path(folder).glob("*") if path.is_dir())]
    for name in names:
        for home in homes:
            if (home / name).is_file():
                return home / name
    raise SystemExit(f"--data {folder} has none of {', '.join(names)}: name the folder that holds the data set")


# CIFAR-10


def cifar10(folder: str | Path, *, num_train: int = 50_000, num_test: int = 10_000) -> tuple[Images, Images]:
    """Train and test images, the first `num_train` and `num_test` of them; files beyond those are not opened."""
    first = locate(folder, ["data_batch_1", "data_batch_1.bin", "train_1.webp"])
    if first.suffix == ".webp":
        return _webp_images(first.parent, "train", num_train), _webp_images(first.parent, "test", num_test)
    read = _binary_batch if first.suffix == ".bin" else _python_batch
    train = [read(first.with_name(f"data_batch_{k}{first.suffix}")) for k in range(1, 1 + -(-num_train // 10_000))]
    return _joined(train, num_train), _joined([read(first.with_name(f"test_batch{first.suffix}"))], num_test)


def _python_batch(path: Path) -> Images:
    with path.open("rb") as file:
        batch = pickle.load(file, encoding="bytes")  # the data set's own form; only open files you trust
    return Images(_from_planes(batch[b"data"]), np.array(batch[b"labels"], np.uint8))


def _binary_batch(path: Path) -> Images:
    records = np.fromfile(path, np.uint8).reshape(-1, 1 + 3072)
    return Images(_from_planes(records[:, 1:]), records[:, 0])


def _from_planes(planes: Array) -> Array:
    return planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _webp_images(home: Path, part: str, num_images: int) -> Images:
    try:
        from PIL import Image
    except ModuleNotFoundError:
        raise SystemExit(f"{home} holds CIFAR-10 as WebP, which needs Pillow: pip install pillow") from None
    names = [f"train_{k}.webp" for k in range(1, 1 + -(-num_images // 10_000))] if part == "train" else ["test.webp"]
    labels = np.load(home / "labels.npz")[part]
    parts = []
    for k, name in enumerate(names):
        grid = np.asarray(Image.open(home / name).convert("RGB"))
        high, wide = grid.shape[0] // 32, grid.shape[1] // 32
        images = grid.reshape(high, 32, wide, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)
        parts.append(Images(images, labels[k * 10_000 : k * 10_000 + len(images)]))
    return _joined(parts, num_images)


def _joined(parts: list[Images], num_images: int) -> Images:
    images, labels = (np.concatenate(arrays)[:num_images] for arrays in zip(*parts, strict=True))
    return Images(images, labels)


# MovieLens-1M


def movielens_1m(folder: str | Path) -> Interactions:
    """The implicit feedback of MovieLens-1M, leaving one item a user out, as NCF does."""
    path = locate(folder, ["ml-1m-ncf.npz", "ml-1m.train.rating", "ratings.dat"])
    if path.suffix == ".npz":
        stored = np.load(path)
        users, items, test_items, negatives = (
            stored[name].astype(np.int64) for name in ("train_user", "train_item", "test_item", "test_negative")
        )
        return Interactions(users, items, np.concatenate([test_items[:, None], negatives], axis=1))
    if path.suffix == ".dat":
        return _leave_one_out(_numbers(path.read_text(encoding="latin-1").replace("::", " ")).reshape(-1, 4))
    rows = _numbers(path.read_text()).reshape(-1, 4)
    lines = path.with_name("ml-1m.test.negative").read_text().splitlines()
    pairs = [line.split("\t") for line in lines]  # "(user,item)", then 99 items
    candidates = [[pair[0].strip("()").split(",")[1], *pair[1:]] for pair in pairs]
    return Interactions(rows[:, 0], rows[:, 1], np.array(candidates, np.int64))


def _numbers(written: str) -> Array:
    return np.array(written.split(), np.int64)


def _leave_one_out(rows: Array) -> Interactions:
    """Of (user, movie, rating, time) hold out each user's last, beside 99 movies drawn from those never rated."""
    users, items = (np.unique(rows[:, column], return_inverse=True)[1] for column in (0, 1))
    num_users, num_items = users.max() + 1, items.max() + 1
    order = np.lexsort((rows[:, 3], users))
    last = order[np.searchsorted(users[order], np.arange(num_users), side="right") - 1]
    rated = np.zeros((num_users, num_items), bool)
    rated[users, items] = True
    rng = np.random.default_rng(0)
    negatives = [rng.choice(np.flatnonzero(~rated[user]), 99, replace=False) for user in range(num_users)]
    kept = np.setdiff1d(np.arange(len(rows)), last)
    candidates = np.concatenate([items[last][:, None], np.array(negatives)], axis=1)
    return Interactions(users[kept], items[kept], candidates)


# Text, speech and questions


def text(folder: str | Path) -> str:
    """Tiny Shakespeare, or any other text in input.txt."""
    return locate(folder, ["input.txt"]).read_text()


def an4(folder: str | Path) -> tuple[Speech, Speech]:
    """Train and test utterances of CMU AN4, 100 frames of 13 MFCC a second."""
    stored = np.load(locate(folder, ["an4-mfcc13.npz"]))
    parts = []
    for part in ("train", "test"):
        ends = np.cumsum(stored[f"{part}_len"].astype(np.int64))
        features = np.split(stored[f"{part}_feat"].astype(np.float32), ends[:-1])
        parts.append(Speech(features, [str(words) for words in stored[f"{part}_text"]]))
    return parts[0], parts[1]


def squad(folder: str | Path) -> tuple[list[Question], list[Question]]:
    """Train and evaluation questions of SQuAD v1.1, or of a part of it."""
    train = locate(folder, ["train-v1.1.json", "train.json", "train.json.xz"])
    held_out = locate(train.parent, ["dev-v1.1.json", "eval.json", "eval.json.xz"])
    return _questions(train), _questions(held_out)


def _questions(path: Path) -> list[Question]:
    with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
        articles = json.load(file)["data"]
    return [
        Question(
            paragraph["context"],
            asked["question"],
            [answer["text"] for answer in asked["answers"]],
            asked["answers"][0]["answer_start"],
        )
        for article in articles
        for paragraph in article["paragraphs"]
        for asked in paragraph["qas"]
        if asked["answers"]
    ]
