"""Work of one worker of the time-to-loss benchmark."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LinearLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision import models

from recipes.benchmarks.harness.worker import report, slowest, take_turns, total
from recipes.benchmarks.time_to_loss import PATIENCE, VALIDATED_EVERY, CurveJob, TimingJob, powersgd_after, steps_to
from recipes.benchmarks.variants import Trainee, parse_variant, with_hook
from recipes.common.batches import endless_batches
from recipes.common.byte_text import cut_into_blocks, make_gpt2
from recipes.common.images import load_images
from recipes.common.texts import python_documentation
from recipes.common.tokens import hold_out

ItemT = TypeVar("ItemT")

# Per worker and step; few, so that two cores can train several workers.
TOKENS = 48
IMAGES = 8
NOISE = 1.0  # standard deviation of what is added to images, whose range is -1 to 1
NUM_HELD_OUT = 128  # blocks of text


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Args:
        model: makes the network; its forward takes a batch and returns the loss.
        batches: this rank's, without end, the same in every run.
        held_out: this rank's part of what is validated on, in batches of one size, as many on every rank.
        optimizer: of parameters.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[], Iterator[tuple[Tensor, ...]]]
    held_out: Sequence[tuple[Tensor, ...]]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def train(job: CurveJob) -> dict[str, Any]:
    """Train, and return validation losses, one every :data:`~recipes.benchmarks.time_to_loss.VALIDATED_EVERY` steps."""
    task = task_called(job.model)
    trainee = _wrapped(task, job.variant, powersgd_after(job.steps))
    ddp = trainee.model
    assert isinstance(ddp, DistributedDataParallel)
    torch.manual_seed(dist.get_rank())
    losses: list[float] = []
    steps = job.steps if job.target is None else round(PATIENCE * job.steps)
    # Of weights that follow every batch, losses go up and down by more than formats differ.
    smooth = AveragedModel(task.model(), multi_avg_fn=get_ema_multi_avg_fn(0.98), use_buffers=True)
    schedule = LinearLR(trainee.optimizer, 1.0, 0.1, job.steps)  # later steps go on at a tenth
    for step, batch in enumerate(itertools.islice(task.batches(), steps), 1):
        _train_step(trainee, batch)
        schedule.step()
        smooth.update_parameters(ddp.module)
        if step % VALIDATED_EVERY == 0:
            losses.append(_validate(smooth, task))
            report(f"{job.model} {job.variant}, step {step}: loss {losses[-1]:.4f}")
        if job.target is not None and steps_to(job.target, losses) is not None:
            break
    trainee.finish()
    return {"losses": losses}


def time_variants(job: TimingJob) -> dict[str, Any]:
    """Return the slowest rank's mean seconds of a step, one per round and variant, in turns."""
    task = task_called(job.model)

    def measure(name: str) -> float:
        trainee, batches = _wrapped(task, name, 2), task.batches()
        for batch in itertools.islice(batches, job.warmup + 1):  # PowerSGD's third step is its first
            _train_step(trainee, batch)
        dist.barrier()
        _train_step(trainee, next(batches))  # so that what is under way gets no free start
        begin_s = time.perf_counter()
        for batch in itertools.islice(batches, job.steps):
            _train_step(trainee, batch)
        (step_s,) = slowest((time.perf_counter() - begin_s) / job.steps)
        dist.barrier()
        trainee.finish()
        return step_s

    num_parameters = sum(parameter.numel() for parameter in task.model().parameters())
    return {"step_s": take_turns(job.variants, job.rounds, measure), "num_parameters": num_parameters}


def _wrapped(task: Task, name: str, num_dense_steps: int) -> Trainee:
    torch.manual_seed(0)
    spec = parse_variant(name)
    ddp = DistributedDataParallel(
        task.model(), bucket_cap_mb=spec.bucket_mb, gradient_as_bucket_view=True, init_sync=False
    )
    optimizer = task.optimizer(ddp.parameters())
    if spec.settings.get("momentum") is not None:  # the hook's takes the place of the optimizer's
        for group in optimizer.param_groups:
            group["momentum"] = 0.0
    return with_hook(ddp, optimizer, spec, num_dense_steps)


def _train_step(trainee: Trainee, batch: tuple[Tensor, ...]) -> None:
    trainee.optimizer.zero_grad()
    loss = trainee.model(*batch)
    loss.backward()
    trainee.optimizer.step()


@torch.no_grad()
def _validate(model: nn.Module, task: Task) -> float:
    """Return the mean loss over all ranks' parts, in evaluation mode, which stays on; collective."""
    model.eval()
    mean = sum(float(model(*batch)) for batch in task.held_out) / len(task.held_out)
    return total(mean)[0] / dist.get_world_size()


def task_called(name: str) -> Task:
    """Return one of :data:`~recipes.benchmarks.time_to_loss.MODELS`."""
    if name == "gpt2":
        return text_task(768, 6)
    if name == "tiny":
        return text_task(32, 1)
    return digits_task()


def digits_task() -> Task:
    """Return a VGG-16 on digits under noise, without which 400 steps leave little to learn."""
    images = load_images(None, 32)
    generator = torch.Generator().manual_seed(0)
    pairs = _of_this_rank([images.held_out[index] for index in range(len(images.held_out))])
    inputs, labels = (torch.stack(each).split(30) for each in zip(*pairs, strict=True))
    held_out = [(_noisy(part, generator), classes) for part, classes in zip(inputs, labels, strict=True)]

    def batches() -> Iterator[tuple[Tensor, ...]]:
        noise = torch.Generator().manual_seed(1 + dist.get_rank())
        for inputs, labels in endless_batches(images.train, IMAGES):
            yield _noisy(inputs, noise), labels

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    return Task(lambda: Classifier(images.num_classes), batches, held_out, sgd)


def text_task(width: int, layers: int) -> Task:
    """Return a GPT-2 on the bytes of Python's documentation."""
    blocks = cut_into_blocks(python_documentation(), TOKENS)
    training, others = hold_out(blocks)
    others = others[torch.randperm(len(others), generator=torch.Generator().manual_seed(0))[:NUM_HELD_OUT]]
    held_out = [(part,) for part in torch.stack(_of_this_rank(list(others))).split(8)]

    def batches() -> Iterator[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        while True:
            yield (training[torch.randint(len(training), (1,), generator=generator)],)

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=3e-4, fused=True)

    return Task(lambda: LanguageModel(width, layers), batches, held_out, adamw)


def _of_this_rank(items: list[ItemT]) -> list[ItemT]:
    """Return as many on every rank."""
    share = len(items) // dist.get_world_size()
    return items[dist.get_rank() * share :][:share]


def _noisy(images: Tensor, generator: torch.Generator) -> Tensor:
    return images + NOISE * torch.randn(images.shape, generator=generator)


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
        self.gpt2 = make_gpt2(TOKENS, width, layers, heads=max(1, width // 64))

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.gpt2(input_ids=ids, labels=ids).loss
        return loss
