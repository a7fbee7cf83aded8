"""Work of one worker of the time-to-loss benchmark."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchvision import models
from transformers import GPT2Config, GPT2LMHeadModel

from recipes.benchmarks.harness.worker import report, total
from recipes.benchmarks.time_to_loss import LossJob
from recipes.benchmarks.variants import parse_variant, with_hook
from recipes.common.batches import endless_batches
from recipes.common.images import load_images
from recipes.common.texts import python_documentation

TOKENS = 48  # per worker and step; few, so that two cores can train four workers


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Args:
        model: makes the network; its forward takes a batch and returns the loss.
        batches: this rank's, without end, the same in every run.
        optimizer: of parameters.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[], Iterator[tuple[Tensor, ...]]]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def compare(job: LossJob) -> dict[str, Any]:
    """Finds the fastest plain DDP, trains it, and then every other variant until it has the same loss."""
    task = task_called(job.model, job.seed)
    dense = [name for name in job.variants if parse_variant(name).is_plain_ddp]
    trials = {name: train(job, task, name, job.trial_steps, None)["step_s"] for name in dense}
    best = min(trials, key=trials.__getitem__)
    runs = {best: train(job, task, best, job.steps, None)}
    target = runs[best]["averaged"][-1]
    for name in job.variants:
        if name not in dense:
            runs[name] = train(job, task, name, round(job.patience * job.steps), target)
    for run_of_one in runs.values():
        run_of_one["reached"] = first_step_at(target, run_of_one["averaged"], job.window)
    num_parameters = sum(parameter.numel() for parameter in task.model().parameters())
    return {"trials": trials, "best": best, "target": target, "runs": runs, "num_parameters": num_parameters}


def train(job: LossJob, task: Task, name: str, steps: int, target: float | None) -> dict[str, Any]:
    """Trains for some steps, or until the loss is at most ``target``; losses are means over ranks and a window."""
    torch.manual_seed(job.seed)
    spec = parse_variant(name)
    ddp = DistributedDataParallel(task.model(), bucket_cap_mb=spec.bucket_mb, gradient_as_bucket_view=True)
    optimizer = task.optimizer(ddp.parameters())
    if spec.settings.get("momentum") is not None:  # the hook's takes the place of the optimizer's
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
    trainee = with_hook(ddp, optimizer, spec)
    torch.manual_seed(job.seed + dist.get_rank())
    losses: list[float] = []
    averaged: list[float] = []
    times_s: list[float] = []
    dist.barrier()
    begin_s = time.perf_counter()
    for step, batch in enumerate(itertools.islice(task.batches(), steps)):
        trainee.optimizer.zero_grad()
        loss = ddp(*batch)
        loss.backward()
        trainee.optimizer.step()
        times_s.append(time.perf_counter() - begin_s)
        losses.append(total(loss.item())[0] / dist.get_world_size())
        window = losses[-job.window :]
        averaged.append(sum(window) / len(window))
        if step % 10 == 9:
            report(f"{job.model} {name}, step {step + 1}: loss {averaged[-1]:.4f}, {times_s[-1]:.1f} s")
        if target is not None and first_step_at(target, averaged, job.window) is not None:
            break
    trainee.finish()
    del ddp, trainee
    gc.collect()
    settled = min(3, len(times_s) - 1)
    step_s = (times_s[-1] - times_s[settled - 1]) / max(1, len(times_s) - settled) if settled else times_s[-1]
    return {"step_s": step_s, "times_s": times_s, "losses": losses, "averaged": averaged}


def first_step_at(target: float, averaged: Sequence[float], window: int) -> int | None:
    """Which step, counted from 0, is the first whose average over a full window is at most the target."""
    return next((step for step, loss in enumerate(averaged) if step + 1 >= window and loss <= target), None)


def task_called(name: str, seed: int) -> Task:
    """One of :data:`~recipes.benchmarks.time_to_loss.MODELS`."""
    if name == "gpt2":
        return text_task(768, 6, seed)
    if name == "tiny":
        return text_task(32, 1, seed)
    images = load_images(None, 32)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    return Task(lambda: Classifier(images.num_classes), lambda: endless_batches(images.train, 8), sgd)


class Classifier(nn.Module):
    """VGG-16 with its large linear layers, for small images, with its loss."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.vgg = models.vgg16_bn(num_classes=num_classes, dropout=0.0)

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.vgg(inputs), labels)


class LanguageModel(nn.Module):
    """A GPT-2 over bytes, with its loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"n_embd": width, "n_layer": layers, "n_head": max(1, width // 64)}
        dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=TOKENS, **sizes, **dropout))

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.gpt2(input_ids=ids, labels=ids).loss
        return loss


def text_task(width: int, layers: int, seed: int) -> Task:
    text = torch.frombuffer(bytearray("\n".join(python_documentation()).encode()), dtype=torch.uint8).long()

    def batches() -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        while True:
            start = int(torch.randint(len(text) - TOKENS, (1,), generator=generator))
            yield (text[start : start + TOKENS][None],)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-4, fused=True)

    return Task(lambda: LanguageModel(width, layers), batches, adamw)
