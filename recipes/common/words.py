"""Text as words, numbered from frequent to rare."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

UNKNOWN = "<unk>"


def split_words(text: str) -> list[str]:
    """Split into words, and punctuation marks one by one."""
    return re.findall(r"\w+|[^\w\s]", text)


def make_vocabulary(words: Iterable[str], max_words: int) -> dict[str, int]:
    """Return ids of the most frequent words, the frequent ones first. Id 0 is ``<unk>``, for all other words."""
    counts = Counter(words)
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))  # the same on every machine
    return {word: index for index, word in enumerate([UNKNOWN, *by_frequency[: max_words - 1]])}


def cut_into_blocks(words: Sequence[str], vocabulary: dict[str, int], length: int) -> Tensor:
    """Cut the text into blocks of ids: (num_blocks, length + 1), int64.

    A block's last word is the next one's first, so that every word is predicted once. The last words, which fill no
    block, are dropped.

    Raises:
        ValueError: the text is too short for one block.
    """
    stream = torch.tensor([vocabulary.get(word, vocabulary[UNKNOWN]) for word in words], dtype=torch.int64)
    if len(stream) <= length:
        raise ValueError(f"expected a text of more than --sequence-length = {length} words, found {len(stream)} words")
    return stream.unfold(0, length + 1, length).contiguous()
