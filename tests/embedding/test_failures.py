"""Workers that die: a run that is resumed ends in the bits of one that was not killed, and nobody waits for ever.

Prevents: a checkpoint between the two parts of an update, rows that are forgotten or applied twice after it, and
survivors that do not say who died.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import LaneError, RowwiseAdamW, shard_embeddings
from tests.support import resuming
from tests.support.embedding.twins import CONFIG, Tables, batches, ids_of
from tests.support.resuming import NUM_STEPS, die, die_in_a_round
from tests.support.workers import WorkerPools

PHASES = ("mid prior rows", "before the step", "mid delayed rows", "saving", "before commit")


def train(rank: int, world_size: int, folder: str, victim: int, phase: str | None) -> bytes:
    return resuming.train(Loop(rank, world_size), rank, Path(folder), victim, phase)


class Loop:
    """What a user would write, with places to die in."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        torch.manual_seed(7)
        model = Tables(world_size)
        self.tables = shard_embeddings(model, None, 1, RowwiseAdamW, config=CONFIG, lr=0.25)
        self.ddp = DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.5)
        self.tables.follow(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.tables.optimizer, 1.0, 0.1, NUM_STEPS)
        self.loader = self.load(0)

    def load(self, step: int):  # type: ignore[no-untyped-def]
        data = itertools.islice(batches(self.rank, self.world_size, NUM_STEPS), step, None)
        return iter(self.tables.prefetch(data, ids_of))

    def train_step(self, step: int, dying: str | None) -> None:
        batch = next(self.loader)
        self.optimizer.zero_grad()
        loss = self.ddp(batch)
        if dying == "mid prior rows":
            die_in_a_round(self.tables._channels.urgent, "exchange of prior rows")
        loss.backward()
        if dying == "before the step":
            die()
        if dying == "mid delayed rows":
            die_in_a_round(self.tables._channels.patient, "exchange of delayed rows")
        self.optimizer.step()
        self.scheduler.step()
        if dying == "mid delayed rows":
            self.tables.flush()

    def write(self, folder: Path, step: int, dying: str | None) -> None:
        content = {
            "model": self.tables.full_state_dict(),
            "tables": self.tables.full_optimizer_state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": step,
        }
        resuming.write_part(folder, self.rank, content, dying)

    def read(self, folder: Path) -> int:
        content = resuming.read_part(folder, self.rank)
        self.ddp.module.load_state_dict(content["model"])
        self.tables.optimizer.load_state_dict(content["tables"])
        self.scheduler.load_state_dict(content["scheduler"])
        step: int = content["step"]
        self.loader = self.load(step)
        return step

    def finish(self) -> bytes:
        weights = self.tables.full_state_dict().values()
        states = self.tables.full_optimizer_state_dict()["state"].values()
        kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        result = b"".join(value.numpy().tobytes() for value in (*weights, *kept))
        self.tables.close()
        return result


@pytest.mark.quick("before commit")
@pytest.mark.parametrize("phase", PHASES)
def test_killed_and_resumed(workers: WorkerPools, tmp_path: Path, phase: str) -> None:
    resuming.kill_and_resume(workers, train, tmp_path, 2, 1, phase)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 1)])
def test_every_rank(workers: WorkerPools, tmp_path: Path, world_size: int, victim: int, phase: str) -> None:
    resuming.kill_and_resume(workers, train, tmp_path, world_size, victim, phase)


def look_up_until_somebody_dies(rank: int, world_size: int, victim: int) -> str:
    model = Tables(world_size)
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=CONFIG, lr=0.1)
    try:
        for step in range(1000):
            if rank == victim and step == 5:
                die()
            model.encoder(torch.tensor([step % 40]))
    except LaneError as error:
        return str(error)
    finally:
        tables._scheduler.closed = True
    return "nobody noticed"


@pytest.mark.quick("3-1")
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 1)])
def test_survivors_name_the_dead(workers: WorkerPools, world_size: int, victim: int) -> None:
    pool = workers(world_size)
    outcomes = pool.outcomes(look_up_until_somebody_dies, victim, timeout_s=40)
    pool.end()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[0] == "ok" and f"rank {victim} died" in outcome[1], outcome
