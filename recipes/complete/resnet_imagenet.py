"""Train a ResNet on ImageNet, or on any folder of images, with plain DDP, with DeAR or with sparse all-reduce.

    torchrun --nproc-per-node 2 recipes/complete/resnet_imagenet.py
    torchrun --nproc-per-node 2 recipes/complete/resnet_imagenet.py --hook none
    torchrun --nproc-per-node 2 recipes/complete/resnet_imagenet.py --hook spardl --density 0.05
    torchrun --nproc-per-node 8 recipes/complete/resnet_imagenet.py --data imagenet --model resnet50 --image-size 224 \
        --epochs 90 --warmup-epochs 5 --batch-size 128 --data-workers 12 --amp bf16 --channels-last \
        --output runs/resnet50 --resume

``--data`` is a folder with ``train`` and ``val``, as ImageNet has it, or one with one folder per class, of which a
fifth is held out; without it the images are scikit-learn's handwritten digits, brought to 32 pixels. After every epoch
a checkpoint is written to ``--output``; ``--resume`` goes on from it, if there is one, so the same command may be
started again and again. Started without a launcher it trains in one process.

Everything random is seeded per rank and epoch, so ``--hook none`` and ``--hook dear`` see the same images, and their
losses agree to rounding.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `recipes`, when this file runs as a script

from ddp_hooks import DearState, GradScaler, TopKConfig, TopKState, dear_hook, topk_hook
from recipes.common.images import Images, load_images
from recipes.common.processes import clock_s, pick_device, process_group
from recipes.common.record import Record, all_reduce_mb, command_of, describe, mean_stats, now, report, surroundings
from recipes.common.schedules import warmed_cosine
from recipes.common.texts import positive

RESNETS = models.list_models(module=models, include=["resnet*", "resnext*", "wide_resnet*"])
AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

Batch: TypeAlias = tuple[Tensor, Tensor]  # images, (batch, 3, size, size), and classes, (batch,)


@dataclass
class Training:
    """Everything that training changes, and so the content of a checkpoint.

    Args:
        ddp, optimizer, scheduler, scaler: as in any loop; without ``--amp fp16`` the scaler does nothing.
        hook: the state of the communication hook; None with plain DDP.
        accuracies: after every epoch that has ended.
        losses: of training, mean over ranks: pairs of step and loss.
        stats: what the hook says of the steps since this process began, under the names of its logs.
    """

    ddp: DistributedDataParallel
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    scaler: GradScaler
    hook: DearState | TopKState | None
    accuracies: list[float] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    stats: list[dict[str, float]] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    device = pick_device(args.device)
    images = load_data(args.data, args.image_size)  # before ranks wait for each other
    with process_group(device):
        record = train(args, images, device, command_of("resnet_imagenet", argv))
        if dist.get_rank() == 0:
            report(record, args.output)


def train(args: argparse.Namespace, images: Images, device: torch.device, command: str) -> Record:
    """Train; the loop is the same for every hook."""
    loader = make_loader(images.train, args, device)
    num_steps = min(len(loader), args.limit_batches or len(loader))  # per epoch
    training = begin(args, images.num_classes, num_steps, device)
    if args.resume:
        load_checkpoint(training, args.output)
    while len(training.accuracies) < min(args.epochs, args.stop_after or args.epochs):
        started_s = clock_s(device)
        train_epoch(args, training, loader, num_steps, device)
        seconds = clock_s(device) - started_s
        training.accuracies.append(accuracy_of(training.ddp, images.held_out, args, device))
        save_checkpoint(training, args.output)
        if dist.get_rank() == 0:
            images_per_s = num_steps * args.batch_size * dist.get_world_size() / seconds
            epoch, accuracy = len(training.accuracies), training.accuracies[-1]
            print(f"epoch {epoch:3d}   accuracy {accuracy:6.1%}   {images_per_s:,.0f} images per second", flush=True)
    if training.hook is not None:
        training.hook.close()
    return record_of(args, training, images, command)


def begin(args: argparse.Namespace, num_classes: int, steps_per_epoch: int, device: torch.device) -> Training:
    """Return model, optimizer and hook, before the first step."""
    torch.manual_seed(args.seed)  # every rank draws the same initial weights
    model = models.get_model(args.model, num_classes=num_classes).to(device)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)
    bucket_cap_mb = 5 if args.hook == "dear" else None  # DeAR likes smaller buckets than DDP does
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
    lr = args.lr * args.batch_size * dist.get_world_size() / 256  # goyal2017: in proportion to the images of a step
    # Sparse gradients arrive late; their momentum is summed up in the hook, before anything is left out.
    momentum = 0.0 if args.hook == "spardl" else args.momentum
    optimizer = torch.optim.SGD(ddp.parameters(), lr, momentum, weight_decay=args.weight_decay)
    scaler = GradScaler(device.type, enabled=args.amp == "fp16")
    hook: DearState | TopKState | None = None
    if args.hook == "dear":
        hook = DearState(ddp, optimizer)
        ddp.register_comm_hook(hook, dear_hook)
    elif args.hook == "spardl":
        warmup_steps = args.epochs * steps_per_epoch // 3  # in which the density falls
        config = TopKConfig(
            density=args.density, momentum=args.momentum, warmup_steps=warmup_steps, dense_below_numel=1000
        )
        hook = TopKState(ddp, config, scaler=scaler)
        ddp.register_comm_hook(hook, topk_hook)
    schedule = warmed_cosine(round(args.warmup_epochs * steps_per_epoch), args.epochs * steps_per_epoch)
    return Training(ddp, optimizer, LambdaLR(optimizer, schedule), scaler, hook)


def train_epoch(
    args: argparse.Namespace, training: Training, loader: DataLoader[Batch], num_steps: int, device: torch.device
) -> None:
    """Pass once over this rank's images."""
    epoch, ddp, optimizer, scaler = len(training.accuracies), training.ddp, training.optimizer, training.scaler
    torch.manual_seed(args.seed + epoch * dist.get_world_size() + dist.get_rank())  # for what is random in the images
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(epoch)
    losses: list[Tensor] = []
    ddp.train()
    for inputs, labels in itertools.islice(loader, num_steps):
        inputs, labels = to_device(inputs, labels, args, device)
        optimizer.zero_grad()
        with torch.autocast(device.type, AMP_DTYPES.get(args.amp), enabled=args.amp is not None):
            loss = F.cross_entropy(ddp(inputs), labels, label_smoothing=args.label_smoothing)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if args.clip is not None:
            clip_gradients(training, args.clip)
        scaler.step(optimizer)
        scaler.update()
        training.scheduler.step()
        losses.append(loss.detach())
        if training.hook is not None and len(losses) % args.log_every == 0:
            stats = training.hook.stats()
            training.stats.append({"ddp_hooks/sent_mb": stats.sent_bytes / 2**20, "ddp_hooks/stall_s": stats.stall_s})
    note_losses(training, torch.stack(losses), args.log_every)


def to_device(inputs: Tensor, labels: Tensor, args: argparse.Namespace, device: torch.device) -> Batch:
    layout = torch.channels_last if args.channels_last else torch.preserve_format
    inputs = inputs.to(device, non_blocking=True, memory_format=layout)
    return inputs, labels.to(device, non_blocking=True)


def clip_gradients(training: Training, max_norm: float) -> None:
    """Clip by the norm over all ranks; with DeAR each rank holds a part of every gradient."""
    if isinstance(training.hook, DearState):
        training.hook.clip_grad_norm_(max_norm)
    else:
        nn.utils.clip_grad_norm_(training.ddp.parameters(), max_norm)


def note_losses(training: Training, losses: Tensor, every: int) -> None:
    """Keep the mean over ranks of every few steps of an epoch, and of its last one."""
    dist.all_reduce(losses)
    means = (losses / dist.get_world_size()).tolist()
    before = training.scheduler.last_epoch - len(means)  # steps of former epochs
    training.losses += [
        [before + step, loss]
        for step, loss in enumerate(means, start=1)
        if step % every == 0 or step == len(means)
    ]


@torch.no_grad()
def accuracy_of(
    ddp: DistributedDataParallel, held_out: Subset[Batch], args: argparse.Namespace, device: torch.device
) -> float:
    """Return the part of the images that the model tells right; each rank looks at some of them."""
    for buffer in ddp.module.buffers():
        dist.broadcast(buffer, 0)  # statistics of batch normalisation, of which every rank has its own
    ddp.eval()
    own = range(dist.get_rank(), len(held_out), dist.get_world_size())
    counts = torch.zeros(2, dtype=torch.int64, device=device)  # told right, all
    for inputs, labels in DataLoader(Subset(held_out, own), args.batch_size, num_workers=args.data_workers):
        inputs, labels = to_device(inputs, labels, args, device)
        with torch.autocast(device.type, AMP_DTYPES.get(args.amp), enabled=args.amp is not None):
            guesses = ddp.module(inputs).argmax(1)
        counts += torch.stack([(guesses == labels).sum(), torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    right, total = counts.tolist()
    return float(right / total)


# Images -------------------------------------------------------------------------------------------------


def load_data(folder: Path | None, size: int) -> Images:
    """Load images for training and for validation.

    Args:
        folder: with ``train`` and ``val``, or with one folder per class; None for scikit-learn's digits.
        size: height and width in pixels that images are brought to.
    """
    if folder is None or not (folder / "train").is_dir():
        return load_images(folder, size)
    as_numbers = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]
    varied = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *as_numbers])
    centred = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), *as_numbers])  # 256 for 224
    train, held_out = ImageFolder(str(folder / "train"), varied), ImageFolder(str(folder / "val"), centred)
    if train.classes != held_out.classes:
        differing = sorted(set(train.classes) ^ set(held_out.classes))
        raise SystemExit(f"error: train and val in {folder} differ: the class {differing[0]!r} is in one of them only")
    return Images(
        Subset(train, range(len(train))), Subset(held_out, range(len(held_out))), len(train.classes), str(folder)
    )


def make_loader(train: Subset[Batch], args: argparse.Namespace, device: torch.device) -> DataLoader[Batch]:
    """Return this rank's images, shuffled, in batches of one size."""
    sampler: DistributedSampler[Batch] = DistributedSampler(train, seed=args.seed, drop_last=True)
    loader = DataLoader(
        train,
        args.batch_size,
        sampler=sampler,
        drop_last=True,
        num_workers=args.data_workers,
        pin_memory=device.type == "cuda",
        persistent_workers=args.data_workers > 0,
    )
    if len(loader) == 0:
        raise ValueError(
            f"expected at least batch size * ranks = {args.batch_size} * {dist.get_world_size()} images to train on, "
            f"found {len(train)}; give a smaller --batch-size"
        )
    return loader


# Checkpoints --------------------------------------------------------------------------------------------


def save_checkpoint(training: Training, output: Path) -> None:
    """Write ``output/epoch-N``, which is complete as soon as it has this name, and remove older ones; collective."""
    epoch = len(training.accuracies)
    partial, final = output / f"epoch-{epoch}.partial", output / f"epoch-{epoch}"
    partial.mkdir(parents=True, exist_ok=True)
    if isinstance(training.hook, DearState):
        training.hook.consolidate(to=0)  # each rank holds a part of the optimizer's state
    elif isinstance(training.hook, TopKState):  # and here what it has left out so far
        torch.save(training.hook.state_dict(), partial / f"left-out-{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        content = {name: part.state_dict() for name, part in parts_of(training).items()}
        torch.save({**content, "losses": training.losses, "accuracies": training.accuracies}, partial / "training.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        for former in output.glob("epoch-*"):
            if former != partial:
                shutil.rmtree(former)
        os.replace(partial, final)
    dist.barrier()


def load_checkpoint(training: Training, output: Path) -> None:
    """Go on from the newest checkpoint that is complete, if there is one; collective. Every rank has to see it."""
    newest: list[Path | None] = [newest_checkpoint(output)]
    dist.broadcast_object_list(newest, src=0)
    folder = newest[0]
    if folder is None:
        return
    saved = torch.load(folder / "training.pt", map_location="cpu", weights_only=True)
    for name, part in parts_of(training).items():
        part.load_state_dict(saved[name])
    training.losses, training.accuracies = saved["losses"], saved["accuracies"]
    if isinstance(training.hook, TopKState):
        files = [folder / f"left-out-{rank}.pt" for rank in range(len(list(folder.glob("left-out-*.pt"))))]
        states = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
        as_before = len(states) == dist.get_world_size()
        training.hook.load_state_dict(states[dist.get_rank()] if as_before else states)


def newest_checkpoint(output: Path) -> Path | None:
    """Return the folder of the last complete checkpoint."""
    found = {int(path.name.removeprefix("epoch-")): path for path in output.glob("epoch-*") if path.suffix == ""}
    return found[max(found)] if found else None


def parts_of(training: Training) -> dict[str, Any]:
    """Return all parts with a ``state_dict`` that is the same on all ranks."""
    return {
        "model": training.ddp.module,
        "optimizer": training.optimizer,
        "scheduler": training.scheduler,
        "scaler": training.scaler,
    }


# Command line -------------------------------------------------------------------------------------------


def record_of(args: argparse.Namespace, training: Training, images: Images, command: str) -> Record:
    sent_mb, stall_s = mean_stats(training.stats)
    if training.hook is None:
        sent_mb = all_reduce_mb(training.ddp.parameters(), dist.get_world_size())
    return Record(
        recipe="resnet_imagenet",
        hook=args.hook,
        command=command,
        created=now(),
        environment=surroundings(),
        data=f"{images.name}: {len(images.train):,} images of {args.image_size} pixels, {images.num_classes} classes",
        model=f"{args.model}: {describe(training.ddp.module)}",
        num_workers=dist.get_world_size(),
        steps=training.scheduler.last_epoch,
        losses=training.losses,
        held_out={"top-1 accuracy": training.accuracies[-1]},
        sent_mb_per_step=sent_mb,
        stall_s_per_step=stall_s,
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a ResNet on images with plain DDP, with DeAR or with sparse all-reduce.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--hook", choices=["none", "dear", "spardl"], default="dear", help="plain DDP, DeAR or sparse all-reduce")
    add("--density", type=float, default=0.01, help="part of the gradient that is kept in the end, with spardl")
    add("--output", type=Path, default=Path("build/resnet_imagenet"), metavar="FOLDER", help="for the record")
    add("--resume", action="store_true", help="go on from the checkpoint in --output, if there is one")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--log-every", type=positive, default=5, metavar="STEPS")

    data = parser.add_argument_group("images (default: scikit-learn's digits)")
    data.add_argument("--data", type=Path, metavar="FOLDER", help="with train and val, or one folder per class")
    data.add_argument("--image-size", type=positive, default=32, help="height and width in pixels")
    data.add_argument("--batch-size", type=positive, default=32, help="images per rank and step")
    data.add_argument("--data-workers", type=int, default=0, help="processes per rank that read images")

    how = parser.add_argument_group("training")
    how.add_argument("--model", choices=RESNETS, default="resnet18", metavar="NAME", help="a ResNet of torchvision")
    how.add_argument("--epochs", type=positive, default=5)
    how.add_argument("--warmup-epochs", type=float, default=1.0, help="in which the learning rate grows")
    how.add_argument("--lr", type=float, default=0.1, help="largest learning rate, for 256 images per step")
    how.add_argument("--momentum", type=float, default=0.9)
    how.add_argument("--weight-decay", type=float, default=1e-4)
    how.add_argument("--label-smoothing", type=float, default=0.0)
    how.add_argument("--clip", type=float, metavar="NORM", help="largest norm of the gradient")
    how.add_argument("--amp", choices=AMP_DTYPES, help="mixed precision")
    how.add_argument("--channels-last", action="store_true", help="memory format that GPUs prefer for convolutions")
    how.add_argument("--limit-batches", type=positive, metavar="N", help="per epoch, for a quick look")
    how.add_argument("--stop-after", type=positive, metavar="EPOCHS", help="end early; --resume goes on from there")

    args = parser.parse_args(argv)
    if args.data is not None and not args.data.is_dir():
        parser.error(f"--data {args.data} is no folder")
    return args


if __name__ == "__main__":
    main()
