"""FSDP2 beside embedding tables, and the same in one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_hooks import EmbeddingTables, TableConfig, shard_embeddings
from fsdp_ext import extend, restore
from tests.support.devices import rank_device
from tests.support.fsdp_ext.twins import CONFIG

ROWS, DIM = 40, 10
WHOLE = StateDictOptions(full_state_dict=True)


class Net(nn.Module):
    """A table, of which a batch reads some rows, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM)
        self.blocks = nn.ModuleList([nn.Linear(DIM, 9), nn.Linear(9, 5)])

    def forward(self, ids: Tensor) -> Tensor:
        values: Tensor = self.words(ids).mean(1)
        for block in self.blocks:
            values = block(values).tanh()
        return values.square().sum()


def build(extended: bool = True) -> tuple[nn.Module, EmbeddingTables, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = Net().double().to(rank_device())
    tables = shard_embeddings(model, None, ["words"], torch.optim.SparseAdam, config=TableConfig(timeout_s=20), lr=0.05)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if extended:
        extend(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tables.follow(optimizer)
    return model, tables, optimizer


def batches(rank: int, numbers: range) -> list[Tensor]:
    seeded = [torch.Generator().manual_seed(9 * rank + i) for i in numbers]
    return [torch.randint(0, ROWS, (4, 3), generator=generator).to(rank_device()) for generator in seeded]


def train(model: nn.Module, tables: Any, optimizer: torch.optim.Optimizer, rank: int, numbers: range) -> None:
    for ids in tables.prefetch(batches(rank, numbers), lambda ids: {"words": ids}):
        optimizer.zero_grad()
        model(ids).backward()
        optimizer.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = get_model_state_dict(model, options=WHOLE)
    return {name: value.clone() for name, value in state.items()}


def end(model: nn.Module, tables: EmbeddingTables) -> None:
    restore(model)
    tables.close()


def as_one_process(rank: int, world_size: int) -> float:
    """The largest difference from a model that one process trains with all ranks' batches."""
    model, tables, optimizer = build()
    train(model, tables, optimizer, rank, range(6))
    found = {name: value.clone() for name, value in tables.full_state_dict().items() if name == "words.weight"}
    found |= {name: value for name, value in whole(model).items() if name != "words.weight"}
    end(model, tables)
    torch.manual_seed(5)
    plain = Net().double().to(rank_device())
    plain.words.sparse = True
    adam = torch.optim.SparseAdam([plain.words.weight], lr=0.05)
    adamw = torch.optim.AdamW(plain.blocks.parameters(), lr=0.01)
    for i in range(6):
        for parameter in plain.parameters():
            parameter.grad = None
        losses = [plain(batches(other, range(i, i + 1))[0]) for other in range(world_size)]
        (torch.stack(losses).mean()).backward()
        adam.step()
        adamw.step()
    expected = plain.state_dict()
    assert found.keys() == expected.keys()
    return max(float((found[name].cpu() - expected[name].cpu()).abs().max()) for name in expected)


def train_and_save(rank: int, world_size: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights when they are saved, and three steps later."""
    model, tables, optimizer = build()
    train(model, tables, optimizer, rank, range(3))
    weights, state = get_state_dict(model, [optimizer, tables.optimizer])
    assert isinstance(weights["words.weight"], DTensor) or world_size == 1
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    saved = whole(model)
    with tables.local():
        table: Any = model.get_submodule("words")
        assert torch.equal(saved["words.weight"], table.weight)
    train(model, tables, optimizer, rank, range(3, 6))
    later = whole(model)
    end(model, tables)
    return saved, later


def resume(rank: int, world_size: int, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, tables, optimizer = build()
    train(model, tables, optimizer, rank, range(50, 51))
    both = [optimizer, tables.optimizer]
    weights, state = get_state_dict(model, both)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, both, model_state_dict=weights, optim_state_dict=state)
    loaded = whole(model)
    train(model, tables, optimizer, rank, range(3, 6))
    later = whole(model)
    end(model, tables)
    return loaded, later
