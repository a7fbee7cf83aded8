"""The code in the documentation runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support.pages import DOCS, blocks_of
from tests.support.workers import WorkerPools


def run_page(rank: int, world_size: int, page: str, path: str) -> int:
    return len(run_blocks(page, names_for(page, path)))


def run_blocks(page: str, names: dict[str, Any]) -> list[str]:
    """Run a page's blocks, one after the other, with what the reader has already; they add to ``names``."""
    blocks = blocks_of(page)
    without_c_compiler = partial(torch.compile, backend="aot_eager")
    with mock.patch("torch.compile", without_c_compiler):
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}, block {number + 1}", "exec"), names)
    return blocks


def names_for(page: str, path: str) -> dict[str, Any]:
    torch.manual_seed(0)
    kind: type[nn.Module] = _Net
    loader: list[Any] = [torch.randn(6, 8) for _ in range(3)]
    if page == "tables.md":
        kind, loader = _Words, [{"ids": torch.randint(0, 5000, (6, 3))} for _ in range(3)]
    folder = str(Path(path).with_suffix(""))
    return {"Net": kind, "model": kind(), "loader": loader, "path": path, "folder": folder, "loss_of": _loss_of}


_NOT_OURS = ("DistributedSampler(drop_last=True)", "join()")  # of the cheat sheet's table


class _Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


class _Words(nn.Module):
    """A table of words, and an output layer."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 8, sparse=sparse)
        self.output = nn.Linear(8, 4)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        output: Tensor = self.output(self.words(batch["ids"]))
        return output


def _loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


@pytest.mark.quick("training_loop.md-8", "sparse.md-4", "tables.md-8", "coordination.md-5")
@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("training_loop.md", 8),
        ("sparse.md", 4),
        ("tables.md", 8),
        ("tuning.md", 3),
        ("planner.md", 2),
        ("fsdp.md", 6),
        ("coming_from.md", 3),
        ("coordination.md", 5),
    ],
)
def test_every_block_of_a_page_runs(workers: WorkerPools, tmp_path: Path, page: str, least: int) -> None:
    counts = workers(2).run(run_page, page, str(tmp_path / "checkpoint.pt"))
    assert counts == [len(blocks_of(page))] * 2 and counts[0] >= least


def run_cheat_sheet(rank: int, world_size: int, folder: str) -> tuple[int, float, float]:
    """How many blocks ran, and how much the hooks of two frameworks' loops have sent, in MiB."""
    from tests.support.integrations.launched import as_torchrun_does, gpt2
    from tests.support.integrations.lightning_modules import loader, module
    from tests.support.integrations.trainers import make

    with as_torchrun_does(rank, world_size):
        names = names_for("cheat_sheet.md", f"{folder}/checkpoint.pt")
        trainer = make(Path(folder), None, gpt2())
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        settings = {"accelerator": "cpu", "devices": world_size, "max_steps": 2, "enable_checkpointing": False, **quiet}
        names |= {"trainer": trainer, "module": module(), "batches": loader(8), "settings": settings}
        blocks = run_blocks("cheat_sheet.md", names)
        sent_mb = trainer.comm_hook_stats()["ddp_hooks/sent_mb"], names["fit"].strategy.stats()["ddp_hooks/sent_mb"]
        trainer._detach()
    return len(blocks), sent_mb[0], sent_mb[1]


def test_every_block_of_the_cheat_sheet_runs(workers: WorkerPools, tmp_path: Path) -> None:
    for num_blocks, *sent_mb in workers(2).run(run_cheat_sheet, str(tmp_path)):
        assert num_blocks == len(blocks_of("cheat_sheet.md")) >= 8
        assert all(sent > 0 for sent in sent_mb), "no hook was at work"


def test_the_cheat_sheets_table_has_lines_that_run() -> None:
    rows = re.findall(r"^\| (?!---|your loop)(.*) \|$", (DOCS / "cheat_sheet.md").read_text(), re.MULTILINE)
    program = "\n".join(blocks_of("cheat_sheet.md"))
    lines = [line for row in rows for line in re.findall(r"`([^`]*\(.*?)`", row.split(" | ")[1])]
    assert len(rows) >= 20 and len(lines) >= 14
    assert not [line for line in lines if line not in program and line not in _NOT_OURS]


def test_every_page_is_in_one_toctree() -> None:
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")} - {"index"}
    assert len(listed) == len(set(listed)) and pages <= set(listed)


@pytest.mark.slow
def test_the_documentation_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110)
    assert done.returncode == 0, done.stdout[-3000:]
    assert (tmp_path / "index.html").exists() and (tmp_path / "troubleshooting.html").exists()
