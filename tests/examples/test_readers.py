"""The examples read a data set's public files and its compact form alike, and score words as is usual."""

from __future__ import annotations

import json
import lzma

import made_up
import numpy as np
import pytest

from examples import readers, scoring


def assert_same_images(found, wanted):
    for part, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(part.images, want[0])
        np.testing.assert_array_equal(part.labels, want[1])


CIFAR10 = (made_up.cifar10_part(256, seed=0), made_up.cifar10_part(64, seed=1))


def test_cifar10_is_read_from_its_python_form(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    made_up.write_cifar10(tmp_path / "cifar-10-batches-py")
    assert_same_images(readers.cifar10(tmp_path, num_train=256), CIFAR10)


def test_cifar10_is_read_from_its_binary_form(tmp_path):
    for name, (images, labels) in zip(("data_batch_1.bin", "test_batch.bin"), CIFAR10, strict=True):
        planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
        np.concatenate([labels[:, None], planes], axis=1).tofile(tmp_path / name)
    assert_same_images(readers.cifar10(tmp_path, num_train=256), CIFAR10)


def test_cifar10_is_read_from_webp_grids(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="the WebP form needs Pillow")
    for name, (images, _) in zip(("train_1.webp", "test.webp"), CIFAR10, strict=True):
        wide = 16
        grid = images.reshape(-1, wide, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, wide * 32, 3)
        image.fromarray(grid).save(tmp_path / name, lossless=True)
    np.savez(tmp_path / "labels.npz", train=CIFAR10[0][1], test=CIFAR10[1][1])
    assert_same_images(readers.cifar10(tmp_path, num_train=256), CIFAR10)


def test_only_the_images_asked_for_are_read(tmp_path):
    made_up.write_cifar10(tmp_path)
    train, test = readers.cifar10(tmp_path, num_train=10, num_test=7)
    assert (len(train.images), len(train.labels), len(test.images)) == (10, 10, 7)


def test_movielens_is_the_same_from_the_files_of_ncf_and_from_the_compact_form(tmp_path):
    stored = made_up.write_movielens(tmp_path)
    compact = readers.movielens_1m(tmp_path)
    pairs = zip(stored["train_user"], stored["train_item"], strict=True)
    (tmp_path / "ml-1m.train.rating").write_text("".join(f"{user}\t{item}\t5\t978300760\n" for user, item in pairs))
    tests = enumerate(zip(stored["test_item"], stored["test_negative"], strict=True))
    lines = [f"({user},{item})\t" + "\t".join(map(str, negatives)) for user, (item, negatives) in tests]
    (tmp_path / "ml-1m.test.negative").write_text("\n".join(lines) + "\n")
    (tmp_path / "ml-1m-ncf.npz").unlink()
    for found, wanted in zip(readers.movielens_1m(tmp_path), compact, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_of_ratings_each_users_last_is_held_out_beside_99_that_were_never_rated(tmp_path):
    rng = np.random.default_rng(0)
    rows = [(user, movie, user * 1000 + rng.integers(500)) for user in (1, 2, 7) for movie in range(1, 801, user + 2)]
    (tmp_path / "ratings.dat").write_text("".join(f"{user}::{movie}::4::{time}\n" for user, movie, time in rows))
    data = readers.movielens_1m(tmp_path)
    assert data.candidates.shape == (3, 100)
    assert len(data.users) == len(data.items) == len(rows) - 3
    movies = np.unique([movie for _, movie, _ in rows])  # by number
    for number, user in enumerate((1, 2, 7)):
        own = {movie: time for who, movie, time in rows if who == user}
        held_out, *negatives = movies[data.candidates[number]].tolist()
        assert own[held_out] == max(own.values())
        assert len(set(negatives)) == 99
        assert not set(negatives) & set(own)
        assert set(movies[data.items[data.users == number]].tolist()) == set(own) - {held_out}


def test_squad_is_read_plain_and_compressed(tmp_path):
    made_up.write_squad(tmp_path)
    train, held_out = readers.squad(tmp_path)
    assert (len(train), len(held_out)) == (48, 8)
    for question in train:
        assert question.context[question.start :].startswith(question.answers[0])
    (tmp_path / "packed").mkdir()
    for old, new in (("train-v1.1.json", "train.json.xz"), ("dev-v1.1.json", "eval.json.xz")):
        with lzma.open(tmp_path / "packed" / new, "wt") as file:
            file.write((tmp_path / old).read_text())
    assert readers.squad(tmp_path / "packed") == (train, held_out)


def test_questions_without_an_answer_are_left_out(tmp_path):
    articles = made_up.squad_articles(3, seed=0)
    articles[0]["paragraphs"][1]["qas"][0]["answers"] = []
    for name in ("train.json", "eval.json"):
        (tmp_path / name).write_text(json.dumps({"data": articles}))
    assert len(readers.squad(tmp_path)[0]) == 2


def test_utterances_are_cut_where_they_end(tmp_path):
    made_up.write_an4(tmp_path)
    train, test = readers.an4(tmp_path)
    assert (len(train.texts), len(test.texts)) == (40, 8)
    for features, words in zip(train.features, train.texts, strict=True):
        assert features.shape == (6 * len(words), 13)


def test_a_folder_without_the_data_says_what_was_looked_for(tmp_path):
    with pytest.raises(
        SystemExit, match=r"has none of ml-1m-ncf.npz, ml-1m.train.rating, ratings.dat: name the folder"
    ):
        readers.movielens_1m(tmp_path)


@pytest.mark.parametrize(
    ("said", "heard", "num_edits"),
    [("a b c", "a b c", 0), ("a b c", "", 3), ("", "a", 1), ("a b c", "a x c", 1), ("a b c d", "b c d e", 2)],
)
def test_edits_are_levenshteins(said, heard, num_edits):
    assert scoring.num_edits(said.split(), heard.split()) == num_edits


@pytest.mark.parametrize(
    ("guess", "answers", "f1"),
    [
        ("The Rome!", ["rome"], 1.0),
        ("in Rome", ["Rome"], 2 / 3),
        ("Oslo", ["Rome", "the Oslo"], 1.0),
        ("Oslo", ["Rome"], 0.0),
        ("", ["the"], 1.0),
    ],
)
def test_f1_counts_common_words_of_the_best_answer(guess, answers, f1):
    assert scoring.f1_score(guess, answers) == pytest.approx(f1)
