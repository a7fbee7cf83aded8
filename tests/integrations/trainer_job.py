"""A training script that torchrun starts: a Trainer with a hook, which may be killed while it writes a checkpoint.

    torchrun --nproc-per-node 2 -m tests.integrations.trainer_job FOLDER --hook dear [--die optimizer.pt] [--resume]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.integrations.launched import gpt2, weights_of
from tests.support.integrations.trainer_tables import TABLES, model
from tests.support.integrations.trainers import DEAR, TOPK, make

HOOKS: dict[str, Any] = {"none": None, "dear": DEAR, "topk": TOPK, "tables": [DEAR, TABLES]}
MAX_STEPS, SAVE_STEPS = 9, 3
FATAL_STEP = 6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hook", choices=HOOKS, required=True)
    parser.add_argument("--die", metavar="FILE", help="file of the second checkpoint whose writer is killed halfway")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    settings = {"max_steps": MAX_STEPS, "save_strategy": "steps", "save_steps": SAVE_STEPS, "optim": "sgd"}
    network = model() if args.hook == "tables" else gpt2()
    trainer = make(args.folder / "run", HOOKS[args.hook], network, by="mixin", **settings)
    assert trainer.args.parallel_mode.value == "distributed" and dist.get_backend() == "gloo"
    if args.die:
        kill_while_writing(args.folder / "run" / f"checkpoint-{FATAL_STEP}" / args.die)
    trainer.train(resume_from_checkpoint=True if args.resume else None)
    tables = trainer._tables
    weights = tables.full_state_dict() if tables is not None else weights_of(trainer.model)
    if trainer.is_world_process_zero():
        torch.save(weights, args.folder / "weights.pt")
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = {"world_size": dist.get_world_size(), "losses": losses, "stats": trainer.comm_hook_stats()}
        (args.folder / "outcome.json").write_text(json.dumps(found))
    dist.destroy_process_group()  # without it torch sometimes aborts a process that ends right after a collective


def kill_while_writing(fatal: Path) -> None:
    """Let the process die when it has written half of this file."""
    save, replace = torch.save, os.replace

    def save_or_die(value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        save(value, file, *args, **kwargs)
        if isinstance(file, str | os.PathLike) and Path(file) == fatal:
            halve_and_die(fatal)

    def replace_or_die(source: Any, target: Any) -> None:
        if Path(target) == fatal:
            halve_and_die(Path(source))
        replace(source, target)

    def halve_and_die(path: Path) -> None:
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save, os.replace = save_or_die, replace_or_die  # type: ignore[assignment]
    if fatal.name == "trainer_state.json":
        from transformers import TrainerState

        write = TrainerState.save_to_json

        def write_or_die(self: TrainerState, json_path: str) -> None:
            write(self, json_path)
            if Path(json_path) == fatal:
                halve_and_die(fatal)

        TrainerState.save_to_json = write_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
