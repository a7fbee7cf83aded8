"""Save a training run with DeAR, and resume it on any number of ranks.

    torchrun --nproc-per-node 2 recipes/checkpoint_resume.py --save-every 20
    torchrun --nproc-per-node 3 recipes/checkpoint_resume.py --resume build/checkpoints/step-20
    torchrun --nproc-per-node 2 recipes/checkpoint_resume.py --save-every 20 --format sharded

With DeAR each rank holds a part of the optimizer's state. ``--format full`` gathers it on the first rank, which writes
one file for DeAR and plain DDP; with ``sharded`` every rank writes its part (torch.distributed.checkpoint). On as many
ranks as before a resumed run ends with the same bits.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from tqdm import trange

from ddp_hooks import DearState, dear_hook
from recipes.common.images import load_digit_images
from recipes.common.processes import log_loss, pick_device, process_group
from recipes.common.texts import positive


class Run:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=5, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        self.schedule = CosineAnnealingLR(self.optimizer, args.steps)
        self.state = DearState(self.ddp, self.optimizer)
        self.ddp.register_comm_hook(self.state, dear_hook)

    def save(self, folder: Path, form: str) -> None:
        """Write a checkpoint; collective. The folder gets its name when it is complete."""
        partial, content = folder.with_suffix(".partial"), dict[str, Any](schedule=self.schedule.state_dict())
        if form == "full":
            self.state.consolidate(to=0)  # on all ranks; then the first one has the whole state of the optimizer
            if dist.get_rank() == 0:
                partial.mkdir(parents=True, exist_ok=True)
                content.update(model=self.ddp.module.state_dict(), optimizer=self.optimizer.state_dict())
                torch.save(content, partial / "full.pt")
        else:
            content["model"], content["optimizer"] = get_state_dict(self.ddp, self.optimizer)
            dcp.save(content, checkpoint_id=partial)
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(partial, folder)
        dist.barrier()

    def load(self, folder: Path) -> int:
        """Read a checkpoint in either format, of any number of ranks; return the number of steps made."""
        content: dict[str, Any] = {"schedule": self.schedule.state_dict()}
        if (folder / "full.pt").exists():
            content = torch.load(folder / "full.pt", map_location="cpu", weights_only=True)
            self.ddp.module.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])  # each rank cuts out its part
        else:
            weights, moments = get_state_dict(self.ddp, self.optimizer)
            content.update(model=weights, optimizer=moments)
            dcp.load(content, checkpoint_id=folder)  # in place; each rank reads what overlaps its part
            set_state_dict(self.ddp, self.optimizer, model_state_dict=weights, optim_state_dict=moments)
        self.schedule.load_state_dict(content["schedule"])
        return self.schedule.last_epoch


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    images, _ = load_digit_images(16)
    with process_group(device := pick_device(args.device)):
        rank, world_size, run = dist.get_rank(), dist.get_world_size(), Run(args, device)
        first = run.load(args.resume) if args.resume is not None else 0
        for step in trange(first + 1, args.steps + 1, disable=rank != 0):
            # The number of a step draws its images, so there is no order of the data to save. Ranks share them.
            drawn = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed + step))
            inputs, labels = images[drawn[: args.batch_size][rank::world_size]]
            run.optimizer.zero_grad()
            loss = F.cross_entropy(run.ddp(inputs.to(device)), labels.to(device))
            loss.backward()
            run.optimizer.step()
            run.schedule.step()
            if step % 10 == 0 or step == args.steps:
                log_loss(step, loss)
            if args.save_every is not None and step % args.save_every == 0:
                run.save(args.output / f"step-{step}", args.format)
        run.state.close()


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Save a training run with DeAR, and resume it.")
    add = parser.add_argument
    add("--steps", type=positive, default=60)
    add("--save-every", type=positive, metavar="STEPS")
    add("--format", choices=["full", "sharded"], default="full")
    add("--output", type=Path, default=Path("build/checkpoints"), metavar="FOLDER", help="for checkpoints")
    add("--resume", type=Path, metavar="FOLDER", help="a checkpoint, such as build/checkpoints/step-20")
    add("--batch-size", type=positive, default=48, help="of all ranks together")
    add("--seed", type=int, default=0)
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.resume is not None and not args.resume.is_dir():
        parser.error(f"no checkpoint at {args.resume}")
    return args


if __name__ == "__main__":
    main()
