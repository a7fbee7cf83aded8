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
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from ddp_hooks import TopKConfig, TopKState, topk_hook
from ddp_hooks.sparse.error_feedback import Collection
from recipes.common.images import load_images
from recipes.common.texts import python_documentation
from recipes.common.vgg import make_vgg
from tests.support.workers import WorkerPools

WORLD_SIZE = 4  # the least with residuals inside of the procedure, which partial collection loses
RESIDUALS: tuple[Collection, ...] = ("global", "partial", "local")
SMOOTHING = 0.1  # of labels, where they are learnt by heart: the loss has a floor; the 2 % are of a larger loss, too


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Args:
        model: makes the network; its forward takes a batch and returns the loss.
        data: everything, a tensor per argument of the forward.
        batch: samples per rank and step.
        steps: of a run.
        lr: the largest learning rate; it falls to 0 in the end.
        momentum: in the optimizer, or where gradients are sparse in the hook (momentum correction). None: neither.
        warmup: part of the steps in which the density falls to its value.
        max_norm: gradients are clipped to it; None: they are not.
        num_seeds: of whose losses the mean is taken. Three are enough where those of one variant are within 1 % of
            each other and 2 % are allowed; the VGG's are within 7 %.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Tensor, ...]]
    batch: int
    steps: int
    lr: float
    momentum: float | None
    warmup: float
    max_norm: float | None = None
    num_seeds: int = 3


class Images(nn.Module):
    """VGG-11 with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.vgg = make_vgg(11, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.vgg(images), labels, label_smoothing=SMOOTHING)


class Recurrent(nn.Module):
    """An LSTM over bytes, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, 256)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(ids[:, :-1]))
        return next_byte_loss(self.head(hidden), ids, SMOOTHING)


class Transformer(nn.Module):
    """A GPT-2 over bytes, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": 256, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 2}
        dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, **dropout))

    def forward(self, ids: Tensor) -> Tensor:
        return next_byte_loss(self.gpt2(input_ids=ids[:, :-1]).logits, ids)


def next_byte_loss(logits: Tensor, ids: Tensor, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=smoothing)


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


def little_text() -> tuple[Tensor, ...]:
    """So little that it is learnt by heart."""
    return (text()[0][1000:1032],)


TASKS = {
    "vgg11": Task(Images, digits, batch=4, steps=50, lr=0.01, momentum=0.9, warmup=0.3, num_seeds=5),
    "lstm": Task(Recurrent, little_text, batch=8, steps=300, lr=20.0, momentum=None, warmup=0.3),
    "gpt2": Task(Transformer, text, batch=16, steps=300, lr=0.5, momentum=None, warmup=0.5, max_norm=1.0),
}


def final_losses(rank: int, world_size: int, name: str, seed: int) -> dict[str, float]:
    """Return the losses of plain DDP and of every residual rule, on the same batches from the same weights."""
    variants: dict[str, Collection | None] = {"dense": None, **{collection: collection for collection in RESIDUALS}}
    return {key: train(TASKS[name], rank, world_size, collection, seed) for key, collection in variants.items()}


def train(task: Task, rank: int, world_size: int, collection: Collection | None, seed: int) -> float:
    """The loss on a fixed part of the data in the end, of which every rank looks at a part."""
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    state, momentum = None, task.momentum or 0.0
    if collection is not None:
        warmup_steps, momentum = int(task.warmup * task.steps), 0.0
        config = TopKConfig(
            0.01, collection=collection, momentum=task.momentum, warmup_steps=warmup_steps, dense_below_numel=1000
        )
        state = TopKState(ddp, config)
        ddp.register_comm_hook(state, topk_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=task.lr, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.lr, total_steps=task.steps, cycle_momentum=False)
    for batch in batches(task, rank, world_size, seed):
        optimizer.zero_grad()
        ddp(*batch).backward()
        if task.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), task.max_norm)
        optimizer.step()
        scheduler.step()
    if state is not None:
        state.close()
    ddp.eval()
    with torch.no_grad():
        loss: Tensor = ddp.module(*(part[:512].chunk(world_size)[rank] for part in task.data()))
    dist.all_reduce(loss)
    return float(loss) / world_size


def batches(task: Task, rank: int, world_size: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)  # the same on every rank, which takes its part
    data = task.data()
    for _ in range(task.steps):
        chosen = torch.randint(len(data[0]), (world_size, task.batch), generator=generator)[rank]
        yield tuple(part[chosen] for part in data)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", TASKS)
def test_the_loss_of_dense_training(workers: WorkerPools, name: str) -> None:
    seeds = range(TASKS[name].num_seeds)
    runs = [workers(WORLD_SIZE).run(final_losses, name, seed, timeout_s=300)[0] for seed in seeds]
    losses = {key: [run[key] for run in runs] for key in runs[0]}
    means = {key: statistics.fmean(values) for key, values in losses.items()}
    errors = {key: statistics.stdev(values) / math.sqrt(len(runs)) for key, values in losses.items()}
    print(f"{name}: " + ", ".join(f"{key} {means[key]:.4f} +- {errors[key]:.4f}" for key in means))
    for collection in RESIDUALS:
        assert means[collection] <= 1.02 * means["dense"], (collection, losses)
        assert means["global"] <= means[collection] + math.hypot(errors["global"], errors[collection]), losses
