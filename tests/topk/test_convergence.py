"""Real models on real data, with a hundredth of every gradient: they end where dense training does.

Prevents: residuals that are right in every sum of whole numbers and still keep a model from learning, because they
come too late, with the wrong weight, or not at all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from ddp_hooks import TopKConfig, TopKState, topk_hook
from recipes.bert_mlm import python_documentation
from recipes.images import load_images
from recipes.vgg_spardl import make_vgg
from tests.workers import WorkerPools

RESIDUALS = ("global", "partial", "local")
SEEDS = range(5)


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Args:
        model: makes the network; its forward takes a batch and returns the loss.
        data: everything, a tensor per argument of the forward.
        batch: samples per rank and step.
        steps: of a run.
        lr: the largest learning rate; it falls to 0 in the end.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]
    batch: int
    steps: int
    lr: float


class Images(nn.Module):
    """VGG-11 with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.vgg = make_vgg(11, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.vgg(images), labels, label_smoothing=0.1)


class Recurrent(nn.Module):
    """An LSTM over bytes, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.lstm = nn.LSTM(32, 96, batch_first=True)
        self.head = nn.Linear(96, 256)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(ids[:, :-1]))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten())


class Transformer(nn.Module):
    """A GPT-2 over bytes, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
        dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, **dropout))

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.gpt2(input_ids=ids, labels=ids).loss
        return loss


@cache
def digits() -> tuple[Tensor, ...]:
    images = load_images(None, 32).train
    inputs, labels = zip(*(images[index] for index in range(len(images))), strict=True)
    return torch.stack(inputs), torch.stack(labels)


@cache
def text() -> tuple[Tensor, ...]:
    documentation = "\n".join(python_documentation()).encode()
    ids = torch.frombuffer(bytearray(documentation), dtype=torch.uint8).long()
    return (ids[: len(ids) // 32 * 32].view(-1, 32),)


TASKS = {
    "vgg11": Task(Images, digits, 8, 120, 0.02),
    "lstm": Task(Recurrent, text, 16, 400, 0.5),
    "gpt2": Task(Transformer, text, 8, 400, 0.2),
}


def final_losses(rank: int, world_size: int, name: str, seed: int) -> dict[str, float]:
    """Of plain DDP and of every residual variant, on the same batches from the same weights."""
    variants: dict[str, Any] = {"dense": None, **{collection: collection for collection in RESIDUALS}}
    return {key: train(TASKS[name], rank, world_size, collection, seed) for key, collection in variants.items()}


def train(task: Task, rank: int, world_size: int, collection: Any, seed: int) -> float:
    """The loss on a fixed part of the data in the end."""
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=task.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.lr, total_steps=task.steps, cycle_momentum=False)
    state = None
    if collection is not None:
        state = TopKState(ddp, TopKConfig(density=0.01, collection=collection))
        ddp.register_comm_hook(state, topk_hook)
    for batch in batches(task, rank, world_size, seed):
        optimizer.zero_grad()
        ddp(*batch).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    if state is not None:
        state.close()
    ddp.eval()
    with torch.no_grad():
        return float(ddp.module(*(part[:512] for part in task.data())))


def batches(task: Task, rank: int, world_size: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)  # the same on every rank, which takes its part
    data = task.data()
    for _ in range(task.steps):
        chosen = torch.randint(len(data[0]), (world_size, task.batch), generator=generator)[rank]
        yield tuple(part[chosen] for part in data)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TASKS)
def test_the_loss_of_dense_training(workers: WorkerPools, name: str) -> None:
    runs = [workers(4).run(final_losses, name, seed, timeout_s=300)[0] for seed in SEEDS]
    losses = {key: [run[key] for run in runs] for key in runs[0]}
    means = {key: statistics.fmean(values) for key, values in losses.items()}
    errors = {key: statistics.stdev(values) / math.sqrt(len(runs)) for key, values in losses.items()}
    print(f"{name}: " + ", ".join(f"{key} {means[key]:.4f} +- {errors[key]:.4f}" for key in means))
    for collection in RESIDUALS:
        assert means[collection] <= 1.02 * means["dense"], (collection, losses)
        assert means["global"] <= means[collection] + math.hypot(errors["global"], errors[collection]), losses
