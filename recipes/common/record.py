"""Record of one run of a recipe, as JSON. ``python -m recipes.common.results`` makes a page of many."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from recipes.common.pages import environment, now

__all__ = ["Record", "all_reduce_mb", "command_of", "describe", "mean_stats", "now", "report", "surroundings"]


@dataclass(frozen=True)
class Record:
    """One run of one recipe with one hook, as its first rank writes it.

    Args:
        recipe: the name of its file, without ``.py``.
        hook: what ``--hook`` said.
        command: that repeats it.
        created: date and time in UTC; see :func:`now`.
        environment: versions and hardware; see :func:`surroundings`.
        data: what it learned from, and how much of it, in a few words.
        num_workers: that trained together.
        steps: of the optimizer.
        losses: of training, mean over workers: pairs of step, counted from one, and loss.
        held_out: what was measured on data that it did not learn from, by name.
        sent_mb_per_step: MB (10⁶ bytes) that one worker sent in a step, mean over steps. Hooks count theirs; what DDP
            sends by itself is calculated with :func:`all_reduce_mb`. None: unknown.
        stall_s_per_step: seconds that one worker waited for the hook in a step, mean over steps. None: unknown, as with
            plain DDP.
        model: what was trained, and how many parameters it has, in a few words.
    """

    recipe: str
    hook: str
    command: str
    created: str
    environment: dict[str, str]
    data: str
    num_workers: int
    steps: int
    losses: list[list[float]]
    held_out: dict[str, float]
    sent_mb_per_step: float | None = None
    stall_s_per_step: float | None = None
    model: str = ""

    @property
    def final_loss(self) -> float:
        """Last loss of training."""
        return self.losses[-1][1]

    def save(self, path: Path) -> None:
        """Write it, and the folder around it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read what :meth:`save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


def report(record: Record, folder: Path) -> Path:
    """Print a table, write the JSON into a folder, and return its path. For the first rank."""
    table = Table(title=record.recipe, show_header=False, box=None)
    table.add_row("hook", record.hook)
    table.add_row("workers", str(record.num_workers))
    table.add_row("model", record.model)
    table.add_row("data", record.data)
    table.add_row("steps", str(record.steps))
    table.add_row("training loss, first and last", f"{record.losses[0][1]:.4f}, {record.final_loss:.4f}")
    for name, value in record.held_out.items():
        table.add_row(f"held out: {name}", f"{value:.4f}")
    if record.sent_mb_per_step is not None:
        table.add_row("sent per step", f"{record.sent_mb_per_step:.3f} MB")
    if record.stall_s_per_step is not None:
        table.add_row("waited per step", f"{record.stall_s_per_step:.4f} s")
    path = folder / f"{record.recipe}_{record.hook}.json"
    record.save(path)
    Console().print(table)
    print(f"Wrote {path}")
    return path


def describe(model: nn.Module) -> str:
    """Return the class of a model, and its number of parameters."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__}, {num_parameters / 1e6:.2f} million parameters"


def surroundings() -> dict[str, str]:
    """Return versions and hardware of this process."""
    packages = {name: importlib.metadata.version(name) for name in ("accelerate", "lightning")}
    gpu = {"GPU": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {**environment(), **packages, **gpu}


def command_of(recipe: str, arguments: Sequence[str] | None) -> str:
    """Return the command that started a recipe.

    Args:
        recipe: the name of its file, without ``.py``.
        arguments: that it was called with; None: those of the command line.
    """
    workers = os.environ.get("LOCAL_WORLD_SIZE")
    launcher = ["torchrun", "--nproc-per-node", workers] if workers is not None else ["python"]
    return shlex.join([*launcher, f"recipes/complete/{recipe}.py", *(sys.argv[1:] if arguments is None else arguments)])


def mean_stats(logged: Iterable[Mapping[str, float]]) -> tuple[float | None, float | None]:
    """Return MB sent and seconds waited per step, of hooks and tables together; None where nothing was logged.

    Args:
        logged: statistics of steps, as :mod:`ddp_hooks.integrations` logs them: ``ddp_hooks/sent_mb`` is in MiB, and
            ``ddp_hooks/tables_sent_mb`` is that of tables. Other entries are passed over.
    """
    sent_mb, stall_s = [], []
    for entry in logged:
        sent = [entry[key] for key in ("ddp_hooks/sent_mb", "ddp_hooks/tables_sent_mb") if key in entry]
        stall = [entry[key] for key in ("ddp_hooks/stall_s", "ddp_hooks/tables_stall_s") if key in entry]
        if sent:
            sent_mb.append(sum(sent) * 2**20 / 1e6)
            stall_s.append(sum(stall))
    return (statistics.mean(sent_mb), statistics.mean(stall_s)) if sent_mb else (None, None)


def all_reduce_mb(parameters: Iterable[Tensor], num_workers: int) -> float:
    """Return the MB that one worker sends when the gradients of these parameters are all-reduced in a ring."""
    num_bytes = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
    return 2 * (num_workers - 1) / num_workers * num_bytes / 1e6
