"""A model with a table for the Trainer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddp_hooks.integrations import Tables
from tests.support.integrations.launched import gpt2


def ids_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"transformer.wte": batch["input_ids"]}


TABLES = Tables(ids_of, "transformer.wte", torch.optim.SGD)


def model() -> nn.Module:
    return gpt2(tie_word_embeddings=False)
