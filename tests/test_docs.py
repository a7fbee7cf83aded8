"""The code in the documentation runs as it stands."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.workers import WorkerPools

DOCS = Path(__file__).parents[1] / "docs"


def blocks_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def run_page(rank: int, world_size: int, page: str, path: str) -> int:
    torch.manual_seed(0)
    kind: type[nn.Module] = _Net
    loader: list[Any] = [torch.randn(6, 8) for _ in range(3)]
    if page == "tables.md":
        kind, loader = _Words, [{"ids": torch.randint(0, 5000, (6, 3))} for _ in range(3)]
    names: dict[str, Any] = {"Net": kind, "model": kind(), "loader": loader, "path": path, "loss_of": _loss_of}
    blocks = blocks_of(page)
    without_c_compiler = partial(torch.compile, backend="aot_eager")
    with mock.patch("torch.compile", without_c_compiler):
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page}, block {number + 1}", "exec"), names)
    return len(blocks)


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


@pytest.mark.parametrize(
    ("page", "least"),
    [("training_loop.md", 8), ("sparse.md", 4), ("tables.md", 8), ("tuning.md", 3), ("planner.md", 2)],
)
def test_every_block_of_a_page_runs(workers: WorkerPools, tmp_path: Path, page: str, least: int) -> None:
    counts = workers(2).run(run_page, page, str(tmp_path / "checkpoint.pt"))
    assert counts == [len(blocks_of(page))] * 2 and counts[0] >= least
