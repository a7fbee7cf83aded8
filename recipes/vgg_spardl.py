"""Train a VGG on images with sparse all-reduce (SparDL), or with plain DDP.

    torchrun --nproc-per-node 2 recipes/vgg_spardl.py
    torchrun --nproc-per-node 2 recipes/vgg_spardl.py --hook none
    torchrun --nproc-per-node 4 recipes/vgg_spardl.py --density 0.001 --warmup-steps 50 --teams 2
    python -m recipes.cluster --workers 4 --rate 100mbit -- python recipes/vgg_spardl.py --algorithm auto

The images are scikit-learn's handwritten digits unless ``--images`` names a folder with one folder per class. Started
without a launcher it trains in one process, where nothing travels and so nothing is left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torchvision import models
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `recipes`, when this file runs as a script

from ddp_hooks import TopKConfig, TopKState, TopKStats, topk_hook
from recipes.common.images import endless_batches, load_images

UNTIMED_STEPS = 3  # DDP rebuilds its buckets, and the hook its groups


@dataclass(frozen=True)
class Result:
    """What one run measured, the same on every rank but for ``stats``."""

    num_parameters: int
    final_loss: float  # mean over the last ten steps and all ranks
    accuracy: float  # on images that were held out, from 0 to 1
    step_s: float
    stats: TopKStats | None  # of this rank's last step


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    with process_group():
        result = train(args)
        if dist.get_rank() == 0:
            report(args, result)


def train(args: argparse.Namespace) -> Result:
    """The training loop; it is the same with and without the hook."""
    images = load_images(args.images, args.image_size)
    torch.manual_seed(args.seed)  # every rank draws the same initial weights
    model = make_vgg(args.depth, images.num_classes)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)
    state = None
    if args.hook == "spardl":
        config = TopKConfig(
            density=args.density,
            algorithm=args.algorithm,
            teams=args.teams,
            warmup_steps=args.warmup_steps,
            dense_below_numel=1000,  # biases and batch normalisation
        )
        state = TopKState(ddp, config)
        ddp.register_comm_hook(state, topk_hook)

    losses: list[Tensor] = []
    started_s = time.perf_counter()
    batches = itertools.islice(endless_batches(images.train, args.batch_size), args.steps)
    for step, (inputs, labels) in enumerate(tqdm(batches, total=args.steps, disable=dist.get_rank() != 0)):
        if step == min(UNTIMED_STEPS, args.steps - 1):
            started_s = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    step_s = (time.perf_counter() - started_s) / max(1, args.steps - UNTIMED_STEPS)

    stats = None
    if state is not None:
        stats = state.stats()
        state.close()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    final_loss = mean_over_ranks(torch.stack(losses[-10:]).mean())
    return Result(num_parameters, final_loss, accuracy_of(model, images.held_out), step_s, stats)


def make_vgg(depth: int, num_classes: int) -> models.VGG:
    """A VGG with batch normalisation for small images: one linear layer behind the convolutions, as usual for those."""
    with torch.device("meta"):  # large images have linear layers of 120 million parameters there, drawn in seconds
        vgg: models.VGG = {11: models.vgg11_bn, 16: models.vgg16_bn}[depth](num_classes=1)
    vgg.avgpool = nn.AdaptiveAvgPool2d(1)
    vgg.classifier = nn.Linear(512, num_classes)
    for layer in vgg.features.to_empty(device="cpu"):  # drawn as torchvision does
        if isinstance(layer, nn.Conv2d) and layer.bias is not None:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            layer.reset_parameters()
    return vgg


@torch.no_grad()
def accuracy_of(model: nn.Module, images: Dataset[tuple[Tensor, Tensor]]) -> float:
    """The part of the images that the model tells right; every rank looks at all of them."""
    model.eval()
    right = [model(inputs).argmax(1) == labels for inputs, labels in DataLoader(images, 64)]
    return float(torch.cat(right).double().mean())


def mean_over_ranks(value: Tensor) -> float:
    total = value.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@contextmanager
def process_group() -> Iterator[None]:
    """Join the ranks that the launcher started; without a launcher, be the only one."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def report(args: argparse.Namespace, result: Result) -> None:
    table = Table(title=f"VGG-{args.depth} on images", show_header=False, box=None)
    table.add_row("hook", args.hook)
    table.add_row("ranks", str(dist.get_world_size()))
    table.add_row("parameters", f"{result.num_parameters:,}")
    table.add_row("final loss", f"{result.final_loss:.4f}")
    table.add_row("accuracy on held-out images", f"{result.accuracy:.1%}")
    table.add_row("seconds per step", f"{result.step_s:.3f}")
    if result.stats is not None:
        stats, dense_mb = result.stats, 4e-6 * result.num_parameters
        table.add_row("last step sent", f"{stats.sent_bytes / 1e6:.2f} MB, of gradients of {dense_mb:.1f} MB")
        table.add_row("waiting at the end of backward", f"{stats.stall_s:.3f} s")
    Console().print(table)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a VGG on images with sparse all-reduce, or with plain DDP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--hook", choices=["none", "spardl"], default="spardl", help="plain DDP or sparse all-reduce")
    add("--density", type=float, help="part of the gradient that is kept; 0.01 where none is given")
    add("--algorithm", default="spardl", help="one of SparDL's rivals, or auto")
    add("--teams", type=int, default=1, help="of workers, for SparDL")
    add("--warmup-steps", type=int, default=0, help="steps in which the density falls to --density")
    add("--depth", type=int, choices=[11, 16], default=11)
    add("--images", type=Path, metavar="FOLDER", help="one folder per class (default: scikit-learn's digits)")
    add("--image-size", type=int, default=32, help="height and width in pixels, at least 32")
    add("--steps", type=int, default=200)
    add("--batch-size", type=int, default=32, help="images per rank and step")
    add("--lr", type=float, default=0.05, help="largest learning rate")
    add("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.image_size < 32:
        parser.error(f"--image-size must be at least 32, for five poolings, got {args.image_size}")
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    return args


if __name__ == "__main__":
    main()
