"""Data sets made up in the form of the real ones, small enough to train on in a moment and with something to learn."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np

__all__ = ["write_an4", "write_cifar10", "write_encoder", "write_movielens", "write_squad", "write_text"]

WORDS = ["YES", "NO", "STOP", "ENTER", "ONE", "TWO"]


def cifar10_part(num_images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, 32, 32, 3] whose brightness tells their class, and the classes, both uint8."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, num_images)
    images = rng.integers(0, 50, (num_images, 32, 32, 3)) + 20 * labels[:, None, None, None]
    return images.astype(np.uint8), labels.astype(np.uint8)


def write_cifar10(folder: Path, num_train: int = 256) -> None:
    """The python form: data_batch_1 and test_batch."""
    for name, num_images, seed in (("data_batch_1", num_train, 0), ("test_batch", 64, 1)):
        images, labels = cifar10_part(num_images, seed)
        batch = {b"data": images.transpose(0, 3, 1, 2).reshape(num_images, -1), b"labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))


def write_movielens(folder: Path, num_users: int = 40, num_items: int = 160) -> dict[str, np.ndarray]:
    """The compact form. Users rate 25 items, and those of even number only items of even number."""
    rng = np.random.default_rng(0)
    rated, negatives = [], []
    for user in range(num_users):
        own = rng.permutation(np.arange(user % 2, num_items, 2))[:26]
        rated.append(own)
        negatives.append(rng.permutation(np.setdiff1d(np.arange(num_items), own))[:99])
    items = np.array(rated)
    stored = {
        "train_user": np.repeat(np.arange(num_users), 25).astype(np.uint16),
        "train_item": items[:, 1:].flatten().astype(np.uint16),
        "test_item": items[:, 0].astype(np.uint16),
        "test_negative": np.array(negatives).astype(np.uint16),
    }
    np.savez(folder / "ml-1m-ncf.npz", **stored)
    return stored


def write_text(folder: Path) -> None:
    """A sentence, again and again."""
    (folder / "input.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 150)


def write_an4(folder: Path) -> None:
    """Utterances of one to three words, with a sound of its own for each letter."""
    rng = np.random.default_rng(0)
    sounds = rng.normal(size=(128, 13))
    stored = {}
    for part, num_utterances in (("train", 40), ("test", 8)):
        texts = [" ".join(rng.choice(WORDS, rng.integers(1, 4))) for _ in range(num_utterances)]
        features = [np.repeat(sounds[[ord(letter) for letter in text]], 6, axis=0) for text in texts]
        stored[f"{part}_feat"] = np.concatenate(features).astype(np.float16)
        stored[f"{part}_len"] = np.array([len(sound) for sound in features], np.uint16)
        stored[f"{part}_text"] = np.array(texts)
    np.savez(folder / "an4-mfcc13.npz", **stored)


def squad_articles(num_questions: int, seed: int) -> list[dict]:
    """Paragraphs that say who lives where, and a question on each."""
    rng = np.random.default_rng(seed)
    paragraphs = []
    for _ in range(num_questions):
        name, town = rng.choice(["Anna", "Bert", "Cleo"]), rng.choice(["Rome", "Oslo", "Lima"])
        context = f"Once upon a time {name} lived in the town of {town}."
        answer = {"text": str(town), "answer_start": context.index(town)}
        paragraphs.append({"context": context, "qas": [{"question": f"Where lived {name}?", "answers": [answer]}]})
    return [{"title": "towns", "paragraphs": paragraphs}]


def write_squad(folder: Path) -> None:
    """The public form: train-v1.1.json and dev-v1.1.json."""
    for name, num_questions, seed in (("train-v1.1.json", 48, 0), ("dev-v1.1.json", 8, 1)):
        (folder / name).write_text(json.dumps({"data": squad_articles(num_questions, seed)}))


def write_encoder(folder: Path) -> None:
    """A BERT of one layer, and a tokenizer that knows letters and the words of `squad_articles`."""
    from transformers import BertConfig, BertForQuestionAnswering, BertTokenizerFast

    words = ["once", "upon", "a", "time", "lived", "in", "the", "town", "of", "where", "anna", "bert", "cleo"]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        ".",
        "?",
        *words,
        *letters,
        *["##" + x for x in letters],
    ]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocabulary)))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(dict.fromkeys(vocabulary)),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
    )
    BertForQuestionAnswering(config).save_pretrained(folder)
