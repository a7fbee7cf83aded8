"""The code of the README and of the integrations' pages runs as it stands, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.integrations.launched import as_torchrun_does
from tests.support.integrations.lightning_modules import module
from tests.support.pages import blocks_of
from tests.support.workers import WorkerPools


class Words(nn.Module):
    """As a Trainer calls models."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5000, 8)
        self.output = nn.Linear(8, 4)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.output(self.words(input_ids)).mean(1), labels)}


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def names_for(page: str, folder: str) -> dict[str, Any]:
    """Return the names that a page takes for granted."""
    data: Any
    if page == "transformers.md":
        import transformers

        args = transformers.TrainingArguments(folder, use_cpu=True, max_steps=3, report_to=[], ddp_backend="gloo")
        data = [{"input_ids": torch.randint(0, 5000, (6,)), "labels": torch.tensor(n % 4)} for n in range(48)]
        return {"model": Words(), "Model": Words, "args": args, "data": data}
    names: dict[str, Any] = {"torch": torch, "path": f"{folder}/end.ckpt", "folder": folder, "model": Net()}
    names["loss_of"] = lambda output: output.square().mean()
    if page == "accelerate.md":
        data = [torch.randn(8) for _ in range(12)]
        return names | {"loader": torch.utils.data.DataLoader(data, batch_size=2)}
    settings = {"accelerator": "cpu", "devices": 2, "max_steps": 2, "logger": False, "enable_checkpointing": False}
    return names | {"settings": settings, "module": module()}


def run_page(rank: int, world_size: int, page: str, folder: str) -> int:
    from tests.support.integrations.lightning_modules import loader

    with as_torchrun_does(rank, world_size):
        torch.manual_seed(0)
        names = names_for(page, folder)
        blocks = blocks_of(page)
        for number, block in enumerate(blocks):
            if page == "lightning.md":
                names["loader"] = loader(8) if number == 0 else [torch.randn(6, 8) for _ in range(3)]
            exec(compile(block, f"{page}, block {number + 1}", "exec"), names)
        if page == "accelerate.md":
            assert names["numbers"]["ddp_hooks/sent_mb"] > 0
            names["attachment"].close()
        if page == "transformers.md":
            assert names["trainer"].comm_hook_stats()["ddp_hooks/tables_sent_mb"] > 0
            names["trainer"]._detach()
        if page == "lightning.md":
            names["fabric"].strategy.hooked_models.release()
    return len(blocks)


@pytest.mark.parametrize(("page", "least"), [("transformers.md", 3), ("accelerate.md", 3), ("lightning.md", 2)])
def test_every_block_of_a_page_runs(workers: WorkerPools, tmp_path: Path, page: str, least: int) -> None:
    counts = workers(2).run(run_page, page, str(tmp_path))
    assert counts == [len(blocks_of(page))] * 2 and counts[0] >= least


def run_readme(rank: int, world_size: int) -> int:
    from ddp_hooks import DearState

    with as_torchrun_does(rank, world_size):
        model: Any = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names: dict[str, Any] = {"model": model, "optimizer": optimizer}
        blocks = blocks_of("../README.md")
        for number, block in enumerate(blocks):
            exec(compile(block, f"README.md, block {number + 1}", "exec"), names)
        for _ in range(2):
            names["ddp"](torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = next(value for value in names["ddp"].__dict__["_comm_hooks"] if isinstance(value[1], DearState))[1]
        assert state.stats().sent_bytes > 0
        state.close()
    return len(blocks)


def test_the_readmes_lines_run(workers: WorkerPools) -> None:
    assert workers(2).run(run_readme) == [1, 1]
