"""Train a small GPT on text with Lightning: plain DDP, DeAR or sparse all-reduce, as the Trainer's strategy says.

    torchrun --nproc-per-node 2 recipes/complete/lightning_gpt.py
    torchrun --nproc-per-node 2 recipes/complete/lightning_gpt.py --hook none
    torchrun --nproc-per-node 2 recipes/complete/lightning_gpt.py --hook topk --density 0.05
    torchrun --nproc-per-node 2 recipes/complete/lightning_gpt.py --text novel.txt --accumulate 4 --epochs 5
    python recipes/complete/lightning_gpt.py --dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1
    torchrun --nproc-per-node 8 recipes/complete/lightning_gpt.py --layers 12 --width 768 --heads 12 \
        --block-length 1024 --precision bf16-mixed --output runs/gpt --resume

Its tokens are bytes, so any text will do; Python's own documentation unless you bring yours. After every epoch
checkpoints are written to ``--output``, ``last.ckpt`` and ``best.ckpt``; ``--resume`` goes on from the last one, if
there is one. Started without a launcher it trains in one process, on a GPU if there is one.
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
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `recipes`, when this file runs as a script

from ddp_hooks import DearConfig, TopKConfig
from ddp_hooks.integrations.lightning import CommHookStrategy
from recipes.common.record import Record, all_reduce_mb, command_of, describe, mean_stats, now, report, surroundings
from recipes.common.schedules import warmed_cosine
from recipes.common.texts import add_text_arguments, positive, read_texts
from recipes.common.tokens import check_same_on_all_ranks, hold_out

NUM_TOKENS = 256  # the values of a byte


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    seed_everything(args.seed)  # every rank draws the same initial weights
    text = Text(read_texts(args), args.block_length, args.batch_size)
    module = LanguageModel(args)
    trainer = make_trainer(args)
    last = args.output / "last.ckpt"
    trainer.fit(module, text, ckpt_path=last if args.resume and last.exists() else None)
    (measured,) = trainer.validate(module, text, verbose=False)
    if trainer.is_global_zero:
        record = record_of(args, trainer, module, text, measured["val_loss"], command_of("lightning_gpt", argv))
        report(record, args.output)
    if dist.is_initialized():
        dist.destroy_process_group()


def make_trainer(args: argparse.Namespace) -> Trainer:
    """A Trainer for the ranks that the launcher started, or for this process alone."""
    local, world = (int(os.environ.get(name, 1)) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    checkpoints = ModelCheckpoint(
        args.output,
        filename="best",
        monitor="val_loss",
        save_last=True,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
    )
    return Trainer(
        devices=local,
        num_nodes=world // local,
        strategy=make_strategy(args),
        plugins=[TorchElasticEnvironment()] if "RANK" in os.environ else None,  # under Slurm and Kubernetes, too
        precision=args.precision,
        max_epochs=min(args.epochs, args.stop_after or args.epochs),
        gradient_clip_val=args.clip,
        accumulate_grad_batches=args.accumulate,
        callbacks=[checkpoints],
        logger=CSVLogger(args.output, name="", version=""),
        log_every_n_steps=args.log_every,
        num_sanity_val_steps=0,
        enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(),
    )


def make_strategy(args: argparse.Namespace) -> DDPStrategy:
    """The one line that chooses a hook."""
    if args.hook == "dear":
        return CommHookStrategy(DearConfig())
    if args.hook == "topk":
        return CommHookStrategy(TopKConfig(density=args.density, dense_below_numel=1000))
    return DDPStrategy(gradient_as_bucket_view=True)


class LanguageModel(LightningModule):
    """What Lightning trains: losses, optimizer and logs around a :class:`Gpt`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.gpt = Gpt(args.layers, args.width, args.heads, args.block_length)
        self.losses: list[list[float]] = []  # of training, mean over ranks: pairs of step and loss
        self.hook_stats: list[dict[str, float]] = []
        self._last_step = 0
        self._step_loss = torch.zeros(())  # of the batches since then

    def loss_of(self, blocks: Tensor) -> Tensor:
        """Nats per byte, for blocks (batch, length + 1)."""
        logits = self.gpt(blocks[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.loss_of(batch[0])

    def on_train_start(self) -> None:
        self._last_step = self.trainer.global_step  # not zero in a run that was resumed

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_index: int) -> None:
        """Note losses, and what the hook says, of every few steps of the optimizer."""
        self._step_loss = self._step_loss + outputs["loss"]  # divided by --accumulate already
        step = self.trainer.global_step
        if step == self._last_step:
            return
        if step % self.args.log_every == 0:
            mean = self.trainer.strategy.reduce(self._step_loss, reduce_op="mean")
            self.losses.append([step, mean.item()])
            self.log("train_loss", mean)
            if isinstance(self.trainer.strategy, CommHookStrategy):
                stats = self.trainer.strategy.stats()
                self.log_dict(stats)
                self.hook_stats.append(stats)
        self._last_step, self._step_loss = step, torch.zeros(())

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val_loss", self.loss_of(batch[0]), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        epoch, loss = self.current_epoch + 1, self.trainer.callback_metrics["val_loss"]
        self.print(f"epoch {epoch:3d}   {self.trainer.global_step} steps   validation loss {loss:.4f}")

    def configure_optimizers(self) -> Any:
        """AdamW; matrices decay, biases and normalisation do not."""
        parameters = list(self.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() >= 2]},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, self.args.lr, betas=(0.9, 0.95), weight_decay=0.1)
        epochs = self.trainer.max_epochs or 1
        total_steps = int(self.trainer.estimated_stepping_batches) // epochs * self.args.epochs  # also of a resumed run
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmed_cosine(total_steps // 10, total_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["losses"] = self.losses

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.losses = checkpoint["losses"]


# Model --------------------------------------------------------------------------------------------------


class Gpt(nn.Module):
    """A decoder as in GPT-2: learned positions, normalisation before each part, and one table for input and output."""

    def __init__(self, num_layers: int, width: int, num_heads: int, block_length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, width)
        self.positions = nn.Embedding(block_length, width)
        self.layers = nn.Sequential(*(Layer(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the byte after each, (batch, length, 256), of bytes (batch, length)."""
        places = torch.arange(ids.shape[1], device=ids.device)
        states = self.layers(self.tokens(ids) + self.positions(places))
        return F.linear(self.norm(states), self.tokens.weight)


class Layer(nn.Module):
    """Attention to what came before, and two linear layers."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        heads = self.attend(self.norm1(states)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (batch, head, length, width / heads)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        states = states + self.merge(attended.transpose(1, 2).flatten(-2))
        return states + self.narrow(F.gelu(self.widen(self.norm2(states))))


# Text ---------------------------------------------------------------------------------------------------


class Text(LightningDataModule):
    """Blocks of bytes, of which every tenth one is held out; Lightning gives each rank its share of both.

    Args:
        texts: documents, one after the other.
        block_length: bytes of which the next one is predicted.
        batch_size: blocks per rank and step.
    """

    def __init__(self, texts: list[str], block_length: int, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.blocks = cut_into_blocks(texts, block_length)
        self.training, self.held_out = hold_out(self.blocks)

    def setup(self, stage: str) -> None:
        """Lightning's; ranks know each other by now."""
        check_same_on_all_ranks(self.blocks)
        needed = self.batch_size * dist.get_world_size()
        if len(self.training) < needed:
            raise ValueError(
                f"expected at least batch size * ranks = {needed} blocks of text to train on, found "
                f"{len(self.training)}; give more text or a smaller --batch-size or --block-length"
            )

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(self.training), self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(self.held_out), self.batch_size)


def cut_into_blocks(texts: list[str], block_length: int) -> Tensor:
    """The texts as one stream of bytes, cut into (num_blocks, block_length + 1), int64; the rest is dropped.

    A block's last byte is the next one's first, so that every byte is predicted once.
    """
    stream = torch.frombuffer(bytearray("\n".join(texts).encode()), dtype=torch.uint8).long()
    if len(stream) <= block_length:
        raise ValueError(f"expected a text of more than --block-length = {block_length} bytes, found {len(stream)}")
    return stream.unfold(0, block_length + 1, block_length).contiguous()


# Command line -------------------------------------------------------------------------------------------


def record_of(
    args: argparse.Namespace, trainer: Trainer, module: LanguageModel, text: Text, val_loss: float, command: str
) -> Record:
    sent_mb, stall_s = mean_stats(module.hook_stats)
    if args.hook == "none":
        sent_mb = all_reduce_mb(module.parameters(), trainer.world_size)
    return Record(
        recipe="lightning_gpt",
        hook=args.hook,
        command=command,
        created=now(),
        environment=surroundings(),
        data=f"{len(text.training):,} blocks of {args.block_length} bytes of text",
        model=describe(module.gpt),
        num_workers=trainer.world_size,
        steps=trainer.global_step,
        losses=module.losses,
        held_out={"nats per byte": val_loss},
        sent_mb_per_step=sent_mb,
        stall_s_per_step=stall_s,
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT on text with Lightning: plain DDP, DeAR or sparse all-reduce.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--hook", choices=["none", "dear", "topk"], default="dear", help="plain DDP, DeAR or sparse all-reduce")
    add("--density", type=float, default=0.01, help="part of the gradient that is kept, with topk")
    add("--output", type=Path, default=Path("build/lightning_gpt"), metavar="FOLDER", help="for checkpoints and logs")
    add("--resume", action="store_true", help="go on from last.ckpt in --output, if there is one")
    add("--epochs", type=positive, default=2)
    add("--stop-after", type=positive, metavar="EPOCHS", help="end early; --resume goes on from there")
    add("--batch-size", type=positive, default=16, help="blocks per rank and backward")
    add("--accumulate", type=positive, default=1, help="backwards per step")
    add("--lr", type=float, default=2e-3, help="largest learning rate")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--precision", choices=["32-true", "bf16-mixed", "16-mixed"], default="32-true")
    add("--seed", type=int, default=0)
    add("--log-every", type=positive, default=10, metavar="STEPS")

    add_text_arguments(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=positive, default=4)
    model.add_argument("--width", type=positive, default=128)
    model.add_argument("--heads", type=positive, default=4)
    model.add_argument("--block-length", type=positive, default=128, help="bytes that it sees at once")

    args = parser.parse_args(argv)
    if args.width % args.heads != 0:
        parser.error(f"--width must be a multiple of --heads, got {args.width} and {args.heads}")
    return args


if __name__ == "__main__":
    main()
