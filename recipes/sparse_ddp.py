"""Train a VGG on images with sparse all-reduce: a hundredth of the gradient travels, the rest waits for the next step.

    torchrun --nproc-per-node 2 recipes/sparse_ddp.py
    torchrun --nproc-per-node 4 recipes/sparse_ddp.py --density 0.001 --warmup-steps 50 --teams 2
    torchrun --nproc-per-node 2 recipes/sparse_ddp.py --images photographs --image-size 64 --algorithm auto

The images are scikit-learn's handwritten digits unless ``--images`` names a folder with one folder per class. The
result is not that of plain DDP; docs/sparse.md says when this is worth it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from ddp_hooks import TopKConfig, TopKState, topk_hook
from recipes.common.batches import endless_batches
from recipes.common.images import load_images
from recipes.common.processes import log_loss, pick_device, process_group
from recipes.common.vgg import make_vgg


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = pick_device(args.device)
    with process_group(device):
        train(args, device)


def train(args: argparse.Namespace, device: torch.device) -> None:
    is_first = dist.get_rank() == 0
    images = load_images(args.images, args.image_size)
    torch.manual_seed(args.seed)  # every rank draws the same initial weights
    model = make_vgg(args.depth, images.num_classes).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps)

    config = TopKConfig(
        density=args.density,
        algorithm=args.algorithm,
        teams=args.teams,
        warmup_steps=args.warmup_steps,  # in which the density falls from a quarter
        dense_below_numel=1000,  # biases and batch normalisation are few: they are summed in full
    )
    state = TopKState(ddp, config)
    ddp.register_comm_hook(state, topk_hook)

    batches = itertools.islice(endless_batches(images.train, args.batch_size), args.steps)
    for step, (inputs, labels) in enumerate(tqdm(batches, total=args.steps, disable=not is_first), start=1):
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(inputs.to(device)), labels.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), 5.0)  # gradients have arrived
        optimizer.step()
        scheduler.step()
        if step % args.log_every == 0:
            log_loss(step, loss)

    sent_mb, dense_mb = state.stats().sent_bytes / 1e6, 4e-6 * sum(p.numel() for p in model.parameters())
    state.close()
    accuracy = accuracy_of(model, images.held_out, device)
    if is_first:
        print(f"accuracy on held-out images {accuracy:.1%}")
        print(f"the last step sent {sent_mb:.2f} MB, of gradients of {dense_mb:.1f} MB")


@torch.no_grad()
def accuracy_of(model: nn.Module, images: Dataset[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> float:
    """Return the part of the images that the model tells right; every rank looks at all of them."""
    model.eval()
    right = [model(inputs.to(device)).argmax(1).cpu() == labels for inputs, labels in DataLoader(images, 64)]
    return float(torch.cat(right).double().mean())


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a VGG on images with sparse all-reduce.")
    add = parser.add_argument
    add("--density", type=float, help="part of the gradient that travels; 0.01 where none is given")
    add("--algorithm", default="spardl", help="one of SparDL's rivals, or auto")
    add("--teams", type=int, default=1, help="of workers, for SparDL")
    add("--warmup-steps", type=int, default=0, help="steps in which the density falls to --density")
    add("--depth", type=int, choices=[11, 16], default=11)
    add("--images", type=Path, metavar="FOLDER", help="one folder per class; scikit-learn's digits without it")
    add("--image-size", type=int, default=32, help="height and width in pixels, at least 32")
    add("--steps", type=int, default=200)
    add("--batch-size", type=int, default=32, help="images per rank and step")
    add("--lr", type=float, default=0.05, help="largest learning rate")
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--seed", type=int, default=0)
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.image_size < 32:
        parser.error(f"--image-size must be at least 32, for five poolings, got {args.image_size}")
    return args


if __name__ == "__main__":
    main()
