"""How the examples score words: edits for the word error rate, overlap for SQuAD's F1."""

from __future__ import annotations

import re
import string
from collections import Counter

__all__ = ["f1_score", "num_edits"]


def num_edits(said: list[str], heard: list[str]) -> int:
    """Words to insert, delete or replace to make one sentence of the other (Levenshtein's distance)."""
    row = list(range(len(heard) + 1))
    for k, word in enumerate(said, 1):
        corner, row[0] = row[0], k
        for j, other in enumerate(heard, 1):
            corner, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, corner + (word != other))
    return row[-1]


def f1_score(guess: str, answers: list[str]) -> float:
    """The best agreement of a guess with any of the answers: the harmonic mean of precision and recall in words."""
    return max(_f1(_plain_words(guess), _plain_words(answer)) for answer in answers)


def _f1(said: list[str], meant: list[str]) -> float:
    num_common = sum((Counter(said) & Counter(meant)).values())
    return 2 * num_common / (len(said) + len(meant)) if num_common else float(said == meant)


def _plain_words(text: str) -> list[str]:
    """The words of a text as SQuAD compares them: lower case, without punctuation and articles."""
    text = "".join(char for char in text.lower() if char not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()
