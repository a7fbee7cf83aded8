"""Train a GPT-2 with Lightning and DeAR: the Trainer's ``strategy`` is all it takes.

    torchrun --nproc-per-node 2 recipes/with_lightning.py
    torchrun --nproc-per-node 2 recipes/with_lightning.py --hook topk --accumulate 4
    torchrun --nproc-per-node 8 recipes/with_lightning.py --layers 12 --width 768 --heads 12 --block-length 1024 \\
        --precision bf16-mixed --output runs/gpt --resume

The model reads bytes; the text is Python's own documentation unless ``--text`` names yours. After every epoch a
checkpoint is written to ``--output``; ``--resume`` goes on from it, if there is one. Started without a launcher it
trains in one process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from ddp_hooks import DearConfig, TopKConfig
from ddp_hooks.integrations.lightning import CommHookStrategy
from recipes.common.byte_text import load_blocks, make_gpt2
from recipes.common.texts import add_text_arguments, positive, read_texts

HOOKS: dict[str, Any] = {"dear": DearConfig(), "topk": TopKConfig(density=0.05, dense_below_numel=1000), "none": None}


class LanguageModel(LightningModule):
    """Loss, optimizer and logs around a GPT-2."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.lr = args.lr
        self.gpt2 = make_gpt2(args.block_length, args.width, args.layers, args.heads)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss: Tensor = self.gpt2(**batch).loss
        self.log("train_loss", loss)
        if isinstance(self.trainer.strategy, CommHookStrategy):
            self.log_dict(self.trainer.strategy.stats())  # of the last step
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.log("val_loss", self.gpt2(**batch).loss, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        loss = self.trainer.callback_metrics["val_loss"]
        self.print(f"step {self.trainer.global_step:5d}   validation loss {loss:.6f}")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr, betas=(0.9, 0.95), weight_decay=0.1)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    seed_everything(args.seed)  # every rank draws the same initial weights
    training, held_out = load_blocks(read_texts(args), args.block_length)
    trainer = make_trainer(args)
    last = args.output / "last.ckpt"
    trainer.fit(
        LanguageModel(args),
        DataLoader(training, args.batch_size, shuffle=True, drop_last=True),
        DataLoader(held_out, args.batch_size),
        ckpt_path=last if args.resume and last.exists() else None,
    )
    if dist.is_initialized():
        dist.destroy_process_group()


def make_trainer(args: argparse.Namespace) -> Trainer:
    """Return a Trainer for the ranks that the launcher started, or for this process alone."""
    local, world = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return Trainer(
        strategy=DDPStrategy() if args.hook == "none" else CommHookStrategy(HOOKS[args.hook]),
        devices=local,
        num_nodes=world // local,
        plugins=[TorchElasticEnvironment()] if "RANK" in os.environ else None,  # under Slurm and Kubernetes, too
        precision=args.precision,
        max_epochs=args.epochs,
        gradient_clip_val=args.clip,
        accumulate_grad_batches=args.accumulate,
        callbacks=[ModelCheckpoint(args.output, save_last=True, save_on_train_epoch_end=True)],
        logger=CSVLogger(args.output, name="", version=""),
        log_every_n_steps=args.log_every,
        enable_progress_bar=sys.stderr.isatty(),
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT-2 with Lightning and DeAR.")
    add = parser.add_argument
    add("--hook", choices=HOOKS, default="dear", help="DeAR, sparse all-reduce or plain DDP")
    add("--output", type=Path, default=Path("build/with_lightning"), metavar="FOLDER", help="checkpoints and logs")
    add("--resume", action="store_true", help="go on from last.ckpt in --output, if there is one")
    counts = {"epochs": 2, "batch-size": 16, "accumulate": 1, "log-every": 10}
    for name, default in {**counts, "layers": 4, "width": 128, "heads": 4, "block-length": 128}.items():
        add(f"--{name}", type=positive, default=default)
    add("--lr", type=float, default=2e-3)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--precision", choices=["32-true", "bf16-mixed", "16-mixed"], default="32-true")
    add("--seed", type=int, default=0)
    add_text_arguments(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
