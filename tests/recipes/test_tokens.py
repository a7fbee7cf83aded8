"""Tokens of text: the same in every run, and nothing of the text is lost."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from recipes.common.texts import python_documentation
from recipes.common.tokens import SPECIAL_TOKENS, cut_into_blocks, shared_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return python_documentation()


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    return shared_tokenizer(texts, vocab_size=1000)


def test_tokenizer_is_the_same_every_time(texts: list[str]) -> None:
    """The trainer alone picks other tokens every time; losses of two runs could then not be compared."""
    assert len({train_tokenizer(texts, vocab_size=1000).to_str() for _ in range(3)}) == 1


def test_tokenizer_knows_its_text(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == 1000
    tokens = tokenizer.tokenize("The statement is compiled")
    assert "".join(tokens).replace("##", "") == "thestatementiscompiled"
    assert tokenizer.unk_token not in tokens
    assert set(tokenizer.all_special_tokens) == set(SPECIAL_TOKENS.values())


def test_special_tokens_can_have_more_roles(texts: list[str]) -> None:
    tokenizer = shared_tokenizer(texts[:3], vocab_size=500, eos_token="[SEP]")
    assert tokenizer.eos_token_id == tokenizer.sep_token_id


def test_blocks_hold_the_text_in_order(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    blocks = cut_into_blocks(texts, tokenizer, block_length=32)
    assert blocks.shape[1] == 32
    assert bool((blocks[:, 0] == tokenizer.cls_token_id).all())
    assert bool((blocks[:, -1] == tokenizer.sep_token_id).all())
    stream = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    assert blocks[:, 1:-1].flatten().tolist() == stream[: len(blocks) * 30]
    assert len(stream) - len(blocks) * 30 < 30


def test_blocks_without_marks_are_the_text(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> None:
    blocks = cut_into_blocks(texts, tokenizer, block_length=32, marked=False)
    marked = cut_into_blocks(texts, tokenizer, block_length=34)
    assert torch.equal(blocks, marked[:, 1:-1])
