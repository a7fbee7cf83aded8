"""Text as bytes, and a small GPT-2 that reads them: no tokenizer, no download."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from recipes.common.tokens import check_same_on_all_ranks, hold_out

NUM_BYTES = 256  # values of a byte


class ByteBlocks(Dataset[dict[str, Tensor]]):
    """Blocks of text as models of transformers take them; these shift the labels themselves.

    Args:
        blocks: (num_blocks, block_length), int64.
    """

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


def load_blocks(texts: list[str], block_length: int) -> tuple[ByteBlocks, ByteBlocks]:
    """Cut texts into blocks of bytes; return blocks to train on, and every tenth one to validate with.

    Raises:
        ValueError: the texts are shorter than two blocks, or ranks have different ones.
    """
    blocks = cut_into_blocks(texts, block_length)
    check_same_on_all_ranks(blocks)
    training, held_out = hold_out(blocks)
    return ByteBlocks(training), ByteBlocks(held_out)


def cut_into_blocks(texts: list[str], block_length: int) -> Tensor:
    """Return the texts as one stream of bytes, cut into (num_blocks, block_length), int64. The rest is dropped."""
    stream = torch.frombuffer(bytearray("\n".join(texts).encode()), dtype=torch.uint8).long()
    if len(stream) < 2 * block_length:
        raise ValueError(f"expected a text of at least 2 * {block_length} bytes, found {len(stream)}")
    return stream[: len(stream) - len(stream) % block_length].view(-1, block_length)


def make_gpt2(block_length: int, width: int = 128, layers: int = 4, heads: int = 4) -> GPT2LMHeadModel:
    """Return a new GPT-2 over bytes, without dropout: runs that resume then take the same steps in every loop."""
    config = GPT2Config(
        vocab_size=NUM_BYTES,
        n_positions=block_length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)
