"""Training scripts that torchrun starts, with Accelerate and Lightning, which may be killed while they save.

    torchrun --nproc-per-node 2 -m tests.integrations.loops_job FOLDER --loop lightning --hook topk [--die] [--resume]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.integrations.launched import weights_of

NUM_EPOCHS, FATAL_EPOCH = 3, 1  # the latter is the second one
VICTIM = 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--loop", choices=["accelerate", "lightning"], required=True)
    parser.add_argument("--hook", choices=["dear", "topk"], required=True)
    parser.add_argument("--die", action="store_true", help="kill the last rank in the second checkpoint")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    loop = {"accelerate": with_accelerate, "lightning": with_lightning}[args.loop]
    weights = loop(args)
    if dist.get_rank() == 0:
        torch.save(weights, args.folder / "weights.pt")
    dist.destroy_process_group()  # without it torch sometimes aborts a process that ends right after a collective


def with_accelerate(args: argparse.Namespace) -> dict[str, Tensor]:
    from tests.support.integrations.accelerate_loops import DEAR, TOPK, Loop

    torch.manual_seed(0)
    loop = Loop({"dear": DEAR, "topk": TOPK}[args.hook], str(args.folder), deterministic=True)
    assert loop.accelerator.num_processes == dist.get_world_size() > 1
    first = 0
    if args.resume:
        loop.accelerator.load_state()
        first = 1
    for epoch in range(first, NUM_EPOCHS):
        loop.train(4)
        if args.die and epoch == FATAL_EPOCH:
            die_in(Path(args.folder) / "checkpoints" / f"checkpoint_{epoch}")
        if not args.resume:
            loop.accelerator.save_state()
    weights = loop.weights()
    loop.end()
    return weights


def with_lightning(args: argparse.Namespace) -> dict[str, Tensor]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from tests.support.integrations.lightning_modules import DEAR, TOPK, loader, module, trainer

    model = module()
    model.network[4].p = 0.0  # Lightning does not keep the state of random numbers
    saving = ModelCheckpoint(args.folder, "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    hook = {"dear": DEAR, "topk": TOPK}[args.hook]
    settings = {"max_epochs": NUM_EPOCHS, "callbacks": [saving], "enable_checkpointing": True}
    fitting = trainer(hook, str(args.folder), num_processes=int(os.environ["WORLD_SIZE"]), **settings)
    found = sorted(args.folder.glob("epoch=*.ckpt"))
    if args.die:
        die_in(args.folder / f"epoch={FATAL_EPOCH}.ckpt.ddp_hooks")
    fitting.fit(model, loader(), ckpt_path=str(found[-1]) if args.resume else None)
    assert dist.get_world_size() > 1
    return weights_of(model)


def die_in(folder: Path) -> None:
    """Let the last rank die when it has half of its part written."""
    if int(os.environ["RANK"]) != VICTIM:
        return
    replace, save = os.replace, torch.save

    def replace_or_die(source: Any, target: Any) -> None:
        if Path(target).parent == folder:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    def save_or_die(value: Any, file: Any, *given: Any, **how: Any) -> None:
        if isinstance(file, str | os.PathLike) and Path(file).parent == folder:
            os.kill(os.getpid(), signal.SIGKILL)
        save(value, file, *given, **how)

    os.replace, torch.save = replace_or_die, save_or_die  # type: ignore[assignment]


if __name__ == "__main__":
    main()
