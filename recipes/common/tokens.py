"""Tokens of text: a tokenizer trained on the spot, the same on every rank, and blocks of equal length to learn from."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def shared_tokenizer(texts: list[str], vocab_size: int, **more_tokens: str) -> PreTrainedTokenizerFast:
    """Train the tokenizer on rank 0 and give every rank the same one.

    Args:
        texts: to train it on.
        vocab_size: tokens, at most.
        more_tokens: roles that models ask for, such as ``eos_token``, and which of :data:`SPECIAL_TOKENS` has them.
    """
    message: list[Any] = [train_tokenizer(texts, vocab_size).to_str() if is_first_rank() else None]
    if dist.is_initialized():
        dist.broadcast_object_list(message, src=0)
    tokenizer = Tokenizer.from_str(message[0])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL_TOKENS, **more_tokens)


def is_first_rank() -> bool:
    """Return True in the only process, or on the first rank."""
    return not dist.is_initialized() or dist.get_rank() == 0


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a lower-case WordPiece tokenizer of at most ``vocab_size`` tokens; the same texts give the same one."""
    tokenizer = word_piece(vocab={})
    # The trainer numbers the pieces "##a", "##b", … in the order of a randomly seeded hash map and breaks
    # ties by number, so that no two runs would agree. Naming them first fixes their numbers.
    normalize = tokenizer.normalizer.normalize_str
    characters = sorted({character for text in texts for character in normalize(text)})
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS.values(), *(f"##{character}" for character in characters)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A fresh tokenizer, in which the pieces are ordinary tokens again.
    return word_piece(tokenizer.get_vocab())


def word_piece(vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def cut_into_blocks(
    texts: list[str], tokenizer: PreTrainedTokenizerBase, block_length: int, marked: bool = True
) -> Tensor:
    """Cut the texts, as one stream, into blocks: (num_blocks, block_length), int64.

    Tokens at the end that fill no block are dropped, so no block needs padding.

    Args:
        texts: to cut.
        tokenizer: that makes tokens of them.
        block_length: in tokens.
        marked: begin each block with ``[CLS]`` and end it with ``[SEP]``.
    """
    documents = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    stream = torch.tensor(list(itertools.chain.from_iterable(documents)), dtype=torch.int64)
    length = block_length - 2 if marked else block_length
    rows = stream[: len(stream) - len(stream) % length].view(-1, length)
    if not marked:
        return rows
    cls = torch.full((len(rows), 1), tokenizer.cls_token_id)
    sep = torch.full((len(rows), 1), tokenizer.sep_token_id)
    return torch.cat([cls, rows, sep], dim=1)


def hold_out(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks to train on, and every tenth block for validation."""
    is_held_out = torch.arange(len(blocks)) % 10 == 0
    return blocks[~is_held_out], blocks[is_held_out]


def check_same_on_all_ranks(blocks: Tensor) -> None:
    """Raise everywhere if ranks read different text, as they might on machines with different files."""
    if not dist.is_initialized():
        return
    fingerprint = f"{len(blocks)} blocks with hash {hashlib.sha256(blocks.numpy().tobytes()).hexdigest()[:8]}"
    fingerprints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, fingerprint)
    if len(set(fingerprints)) > 1:
        found = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(fingerprints))
        raise ValueError(
            f"expected the same text on every rank, found {found}; read the same files with the same Python "
            "on every machine"
        )


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks of text in the form that the collator of transformers expects."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks  # (num_blocks, block_length), int64

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.blocks[index]}
