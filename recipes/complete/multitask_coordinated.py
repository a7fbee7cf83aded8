"""Train one network for several tasks, of which every rank draws one in each step: coordinated, or with plain DDP.

    torchrun --nproc-per-node 2 recipes/complete/multitask_coordinated.py
    torchrun --nproc-per-node 2 recipes/complete/multitask_coordinated.py --hook none
    torchrun --nproc-per-node 2 recipes/complete/multitask_coordinated.py --num-groups 4
    torchrun --nproc-per-node 4 recipes/complete/multitask_coordinated.py --data photographs --image-size 64
    python -m recipes.cluster --workers 4 --rate 100mbit -- python recipes/complete/multitask_coordinated.py

Each task has a branch of its own behind a common trunk, so gradients of most branches are missing in every step, and of
others than on the next rank. Plain DDP with ``find_unused_parameters=True`` reduces zeros for them;
:func:`ddp_hooks.coordination.coordinate` reduces the branches that some rank has used.

``--data`` is a folder with one folder per class; without it the images are scikit-learn's handwritten digits. The first
of ``--tasks`` is to tell the class; each other one parts the classes in two halves, and is to tell which of them it is.
Both hooks see the same batches and draw the same tasks.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `recipes`, when this file runs as a script

from ddp_hooks.coordination import CoordinatedModel, coordinate
from recipes.common.images import Images, endless_batches, load_images
from recipes.common.processes import mean_over_ranks, pick_device, process_group
from recipes.common.record import Record, all_reduce_mb, command_of, describe, now, report, surroundings
from recipes.common.texts import positive

RECIPE = "multitask_coordinated"


@dataclass
class Training:
    """What training needs.

    Args:
        model: for evaluation, and what ``call`` trains.
        call: the model, or DDP around it.
        optimizer: of its parameters.
        no_sync: in which backwards add up gradients on this rank only.
        coordinated: None with plain DDP.
        losses: of training, mean over ranks: pairs of step and loss.
    """

    model: MultiTask
    call: nn.Module
    optimizer: torch.optim.Optimizer
    no_sync: Callable[[], AbstractContextManager[None]]
    coordinated: CoordinatedModel | None
    losses: list[list[float]] = field(default_factory=list)


class MultiTask(nn.Module):
    """A trunk of convolutions, and a branch for each task.

    Args:
        num_outputs: of every task's branch.
        width: channels of the last convolution, and of each branch's hidden layer.
    """

    def __init__(self, num_outputs: Sequence[int], width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, width // 2, 3, padding=1),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width // 2, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(16 * width, width), nn.ReLU(), nn.Linear(width, outputs)) for outputs in num_outputs
        )

    def forward(self, images: Tensor, task: int) -> Tensor:
        logits: Tensor = self.branches[task](self.trunk(images))
        return logits


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = pick_device(args.device)
    images = load_images(args.data, args.image_size)  # before ranks wait for each other
    with process_group(device):
        record = train(args, images, device, command_of(RECIPE, argv))
        if dist.get_rank() == 0:
            report(record, args.output)


def train(args: argparse.Namespace, images: Images, device: torch.device, command: str) -> Record:
    """The training loop; it is the same for both."""
    targets = tasks(images.num_classes, args.tasks).to(device)
    training = begin(args, [images.num_classes] + [2] * (args.tasks - 1), device)
    draws = random.Random(args.seed + dist.get_rank())
    batches, since_log = endless_batches(images.train, args.batch_size), list[Tensor]()
    for step in range(1, args.steps + 1):
        training.optimizer.zero_grad()
        for part in range(args.accumulate):
            inputs, labels = (tensor.to(device) for tensor in next(batches))
            task = draws.randrange(args.tasks)
            if part < args.accumulate - 1:
                with training.no_sync():
                    loss = backward(training.call, inputs, targets[task][labels], task)
            else:
                loss = backward(training.call, inputs, targets[task][labels], task)
            since_log.append(loss)
        nn.utils.clip_grad_norm_(training.model.parameters(), args.clip)
        training.optimizer.step()
        if step % args.log_every == 0 or step == args.steps:
            training.losses.append([step, mean_over_ranks(torch.stack(since_log).mean())])
            since_log.clear()
            if dist.get_rank() == 0:
                print(f"step {step:5d}   loss {training.losses[-1][1]:.4f}", flush=True)
    return end(args, training, images, targets, device, command)


def backward(call: nn.Module, inputs: Tensor, wanted: Tensor, task: int) -> Tensor:
    """Of one batch, for one task; returns the loss."""
    loss = F.cross_entropy(call(inputs, task), wanted)
    loss.backward()
    return loss.detach()


def tasks(num_classes: int, num_tasks: int) -> Tensor:
    """(tasks, classes): of each task what is to be told of a class: itself, then which half it is in."""
    halves = torch.Generator().manual_seed(0)
    rows = [torch.arange(num_classes)]
    while len(rows) < num_tasks:
        rows.append((torch.randperm(num_classes, generator=halves) < num_classes // 2).long())
    return torch.stack(rows)


def begin(args: argparse.Namespace, num_outputs: Sequence[int], device: torch.device) -> Training:
    """Model and optimizer, before the first step."""
    torch.manual_seed(args.seed)
    model = MultiTask(num_outputs, args.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    if args.hook == "none":
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        return Training(model, ddp, optimizer, ddp.no_sync, None)
    coordinated = coordinate(model, optimizer, num_groups=args.num_groups)
    return Training(model, model, optimizer, coordinated.no_sync, coordinated)


def end(
    args: argparse.Namespace,
    training: Training,
    images: Images,
    targets: Tensor,
    device: torch.device,
    command: str,
) -> Record:
    """What was learned, and what it took."""
    sent_mb: float | None = all_reduce_mb(training.model.parameters(), dist.get_world_size())
    stall_s = None
    if training.coordinated is not None:
        stats = training.coordinated.stats()
        sent_mb = stats.sent_bytes / 1e6 / args.steps
        training.coordinated.close()
    accuracies = [
        accuracy_of(training.model, images.held_out, targets, task, args, device) for task in range(args.tasks)
    ]
    halves = accuracies[1:]
    held_out = {"accuracy of classes": accuracies[0]}
    if halves:
        held_out["accuracy of halves"] = sum(halves) / len(halves)
    return Record(
        recipe=RECIPE,
        hook=args.hook,
        command=command,
        created=now(),
        environment=surroundings(),
        data=f"{images.name}: {len(images.train):,} images of {args.image_size} pixels, {args.tasks} tasks",
        num_workers=dist.get_world_size(),
        steps=args.steps,
        losses=training.losses,
        held_out=held_out,
        sent_mb_per_step=sent_mb,
        stall_s_per_step=stall_s,
        model=describe(training.model),
    )


@torch.no_grad()
def accuracy_of(
    model: MultiTask,
    held_out: Subset[tuple[Tensor, Tensor]],
    targets: Tensor,
    task: int,
    args: argparse.Namespace,
    device: torch.device,
) -> float:
    """The part of the images of which the task's first guess is right; every rank looks at all of them."""
    model.eval()
    right = 0
    for inputs, labels in DataLoader(held_out, args.batch_size):
        guesses = model(inputs.to(device), task).argmax(1)
        right += int((guesses == targets[task][labels.to(device)]).sum())
    return right / len(held_out)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train one network for several tasks.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--hook", choices=["coordinated", "none"], default="coordinated", help="how gradients are reduced")
    add("--num-groups", type=positive, help="groups that travel together; by branch and size without it")
    add("--data", type=Path, metavar="FOLDER", help="with one folder of images per class")
    add("--image-size", type=positive, default=16, metavar="PIXELS", help="that images are brought to")
    add("--tasks", type=positive, default=8, help="branches of the network")
    add("--width", type=positive, default=64, help="of the trunk's last layer, and of branches")
    add("--steps", type=positive, default=200)
    add("--batch-size", type=positive, default=32, help="per rank")
    add("--accumulate", type=positive, default=1, metavar="BATCHES", help="per step and rank")
    add("--lr", type=float, default=2e-3)
    add("--clip", type=float, default=5.0, help="largest norm of the gradient")
    add("--log-every", type=positive, default=10, metavar="STEPS")
    add("--seed", type=int, default=0)
    add("--device", choices=["cpu", "cuda"], default="cpu", help="models are coordinated on CPUs only so far")
    add("--output", type=Path, default=Path("build/recipes"), metavar="FOLDER", help="for the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
