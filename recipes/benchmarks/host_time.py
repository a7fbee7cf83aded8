"""Processor time of a step in which nothing but the host counts: many small layers, plain DDP and DeAR in turns.

    torchrun --nproc-per-node 2 -m recipes.benchmarks.host_time
    torchrun --nproc-per-node 1 -m recipes.benchmarks.host_time --layers 400 --rounds 20
    torchrun --nproc-per-node 1 -m recipes.benchmarks.host_time --device cuda
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, dear_hook
from recipes.common.pages import Table

VARIANTS: dict[str, DearConfig | None] = {
    "plain DDP": None,
    "DeAR, sharded": DearConfig(),
    "DeAR, replicated": DearConfig(update="replicated"),
}
STEPS = 20  # of a window


class Run:
    """A model of small layers, its optimizer, and the times of its windows.

    Args:
        layers: number of ``Linear(16, 16)``, each with a ReLU.
        config: None for plain DDP.
        device: of the model.
    """

    def __init__(self, layers: int, config: DearConfig | None, device: torch.device) -> None:
        torch.manual_seed(0)
        blocks = [block for _ in range(layers) for block in (nn.Linear(16, 16), nn.ReLU())]
        model = nn.Sequential(*blocks).to(device)
        self.ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=5)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4)
        self.state = DearState(self.ddp, self.optimizer, config) if config is not None else None
        if self.state is not None:
            self.ddp.register_comm_hook(self.state, dear_hook)
        self.batch = torch.randn(8, 16, device=device)
        self.cpu_s: list[float] = []  # of each window, per step
        self.wall_s: list[float] = []

    def train(self) -> None:
        """Make the steps of one window."""
        for _ in range(STEPS):
            self.optimizer.zero_grad()
            self.ddp(self.batch).square().mean().backward()
            self.optimizer.step()
        if self.state is not None:
            self.state.synchronize()
        if self.batch.is_cuda:
            torch.cuda.synchronize()

    def measure(self) -> None:
        """Time one window."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        self.train()
        self.cpu_s.append((time.process_time() - cpu_s) / STEPS)
        self.wall_s.append((time.perf_counter() - wall_s) / STEPS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare processor time per step of plain DDP and DeAR.")
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=12, help="windows of each variant")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    runs = {name: Run(options.layers, config, device) for name, config in VARIANTS.items()}
    for run in runs.values():
        run.train()
    for _ in range(options.rounds):
        for run in runs.values():
            run.measure()
    if dist.get_rank() == 0:
        show(runs)
    for run in runs.values():
        if run.state is not None:
            run.state.close()
    dist.destroy_process_group()


def show(runs: dict[str, Run]) -> None:
    """Print medians of the windows of this rank."""
    plain_s = statistics.median(runs["plain DDP"].cpu_s)
    rows = []
    for name, run in runs.items():
        cpu_s, wall_s = statistics.median(run.cpu_s), statistics.median(run.wall_s)
        rows.append([name, f"{1e3 * cpu_s:.2f}", f"{cpu_s / plain_s:.2f}", f"{1e3 * wall_s:.2f}"])
    columns = ("variant", "processor ms", "× plain DDP", "wall ms")
    Table(f"One step, rank 0 of {dist.get_world_size()}, medians", columns, rows).show()


if __name__ == "__main__":
    main()
