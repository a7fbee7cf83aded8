"""Train one network for several tasks, of which every rank draws one in each step.

    torchrun --nproc-per-node 2 recipes/coordinated.py
    torchrun --nproc-per-node 2 recipes/coordinated.py --num-groups 4 --accumulate 2
    torchrun --nproc-per-node 4 recipes/coordinated.py --images photographs --image-size 64

Each task has a branch of its own behind a common trunk, so a rank has gradients of one branch, and the next rank of
another. ``coordinate`` reduces the branches that some rank has used, and sends no zeros for the rest. The first task
is to tell the class of an image; each other task parts the classes in two halves, and is to tell the half.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import trange

from ddp_hooks.coordination import coordinate
from recipes.common.batches import endless_batches
from recipes.common.images import load_images
from recipes.common.processes import log_loss, process_group
from recipes.common.texts import positive


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    with process_group(torch.device("cpu")):  # models are coordinated on CPUs only
        train(args)


def train(args: argparse.Namespace) -> None:
    is_first = dist.get_rank() == 0
    images = load_images(args.images, args.image_size)
    targets = make_targets(images.num_classes, args.tasks)
    torch.manual_seed(args.seed)  # every rank draws the same initial weights
    model = MultiTask([images.num_classes] + [2] * (args.tasks - 1), args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    coordinated = coordinate(model, optimizer, num_groups=args.num_groups)  # in place of DDP

    draws = random.Random(args.seed + dist.get_rank())  # every rank draws its own tasks
    batches = endless_batches(images.train, args.batch_size)
    for step in trange(1, args.steps + 1, disable=not is_first):
        optimizer.zero_grad()
        for part in range(args.accumulate):
            inputs, labels = next(batches)
            task = draws.randrange(args.tasks)
            with coordinated.no_sync() if part < args.accumulate - 1 else nullcontext():
                loss = F.cross_entropy(model(inputs, task), targets[task][labels])
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        if step % args.log_every == 0:
            log_loss(step, loss)

    sent_mb, model_mb = coordinated.stats().sent_bytes / 1e6, 4e-6 * sum(p.numel() for p in model.parameters())
    coordinated.close()
    if is_first:
        print(f"sent {sent_mb / args.steps:.2f} MB per step, of gradients of {model_mb:.2f} MB")


class MultiTask(nn.Module):
    """A trunk of convolutions, and a branch for each task.

    Args:
        num_outputs: of every task's branch.
        width: channels of the last convolution, and of each branch's hidden layer.
    """

    def __init__(self, num_outputs: Sequence[int], width: int) -> None:
        super().__init__()
        first = [nn.Conv2d(3, width // 2, 3, padding=1), nn.BatchNorm2d(width // 2), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(width // 2, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.trunk = nn.Sequential(*first, *second, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(16 * width, width), nn.ReLU(), nn.Linear(width, outputs)) for outputs in num_outputs
        )

    def forward(self, images: Tensor, task: int) -> Tensor:
        logits: Tensor = self.branches[task](self.trunk(images))
        return logits


def make_targets(num_classes: int, num_tasks: int) -> Tensor:
    """Return the right answers, (tasks, classes): the class itself, then the half that it is in."""
    halves = torch.Generator().manual_seed(0)
    rows = [torch.randperm(num_classes, generator=halves) < num_classes // 2 for _ in range(num_tasks - 1)]
    return torch.stack([torch.arange(num_classes), *(row.long() for row in rows)])


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train one network for several tasks.")
    add = parser.add_argument
    add("--num-groups", type=positive, help="groups that travel together; by branch and size without it")
    add("--images", type=Path, metavar="FOLDER", help="one folder per class; scikit-learn's digits without it")
    add("--image-size", type=positive, default=16, metavar="PIXELS", help="height and width of images")
    add("--tasks", type=positive, default=8, help="branches of the network")
    add("--width", type=positive, default=64, help="of the trunk's last layer, and of branches")
    add("--steps", type=positive, default=200)
    add("--batch-size", type=positive, default=32, help="per rank")
    add("--accumulate", type=positive, default=1, metavar="BATCHES", help="per step and rank")
    add("--lr", type=float, default=2e-3)
    add("--clip", type=float, default=5.0, help="largest norm of the gradient")
    add("--log-every", type=positive, default=10, metavar="STEPS")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
