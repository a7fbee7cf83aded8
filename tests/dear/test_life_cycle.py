"""States begin, end and begin again in one process: two models at once, copies, exceptions, and no thread left over."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddp_hooks import DearState, dear_hook
from tests.support.dear.misuse import trained
from tests.support.dear.twins import CONFIG, whole_batches
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


def lanes_alive(existing: set[threading.Thread]) -> int:
    """Threads of lanes that are still there, but for those of other tests; the ones that are ending may do so."""
    lanes = [t for t in threading.enumerate() if t.name.startswith("ddp_hooks lane") and t not in existing]
    for thread in lanes:
        thread.join(5)
    return sum(thread.is_alive() for thread in lanes)


# -- a GAN: two models, and graphs that reach from one into the other -------------------------------------------------


def adversarial(rank: int, world_size: int, with_dear: bool) -> list[Tensor]:
    torch.manual_seed(3)
    nets = [nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, width)).double() for width in (8, 1)]
    nets[1] = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    ddps = [DistributedDataParallel(net, gradient_as_bucket_view=True, broadcast_buffers=False) for net in nets]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]
    states = []
    if with_dear:
        for ddp, optimizer in zip(ddps, optimizers, strict=True):
            states.append(DearState(ddp, optimizer, CONFIG))
            ddp.register_comm_hook(states[-1], dear_hook)
    generator, critic = ddps
    for step in range(12):
        noise = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
        real = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank + 5), dtype=torch.float64)
        fake = generator(noise)
        optimizers[1].zero_grad()
        (critic(fake.detach()).mean() - critic(real).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(fake).mean()).backward()  # through the critic after its step, into the generator's older graph
        optimizers[0].step()
    for state in states:
        state.close()
    return [p.detach().clone() for net in nets for p in net.parameters()]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_models_in_one_process(workers: WorkerPools, world_size: int) -> None:
    ours = workers(world_size).run(adversarial, True)
    theirs = workers(world_size).run(adversarial, False)
    gaps = [float((a - b).abs().max()) for a, b in zip(ours[0], theirs[0], strict=True)]
    assert max(gaps) < 1e-10


# -- copies and pickles -----------------------------------------------------------------------------------------------


def copy_everything(rank: int, world_size: int) -> dict[str, Any]:
    ddp, _optimizer, state = trained(rank, world_size)
    found: dict[str, Any] = {
        "deepcopy of ddp": message_of(lambda: copy.deepcopy(ddp)),
        "pickle of ddp": message_of(lambda: pickle.dumps(ddp)),
        "pickle of state": message_of(lambda: pickle.dumps(state)),
    }
    state.synchronize()
    twin = copy.deepcopy(ddp.module)  # a target network
    found["target"] = all(torch.equal(a, b) for a, b in zip(twin.parameters(), ddp.module.parameters(), strict=True))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    found["independent"] = any(bool(parameter.any()) for parameter in ddp.module.parameters())
    found["runs"] = float(twin(*whole_batches(rank, world_size, 3)).detach()) == 0
    restored = pickle.loads(pickle.dumps(ddp.module))
    found["pickled module"] = all(
        torch.equal(a, b) for a, b in zip(restored.parameters(), ddp.module.parameters(), strict=True)
    )
    state.close()
    return found


def test_copies(workers: WorkerPools) -> None:
    for found in workers(2).run(copy_everything):
        for refused in ("deepcopy of ddp", "pickle of ddp", "pickle of state"):
            assert found[refused].startswith("TypeError") and "ddp.module" in found[refused], found
        assert found["target"] and found["independent"] and found["runs"] and found["pickled module"]


# -- again and again ---------------------------------------------------------------------------------------------------


def wrap_again_and_again(rank: int, world_size: int) -> tuple[list[float], int]:
    """As a hyper-parameter search does; the last state but one is forgotten instead of closed."""
    existing = set(threading.enumerate())
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
    losses = []
    for trial in range(5):
        ddp = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        state = DearState(ddp, optimizer, CONFIG)
        ddp.register_comm_hook(state, dear_hook)
        for _ in range(3):
            optimizer.zero_grad()
            loss = ddp(torch.ones(2, 8)).square().sum()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
        if trial != 3:
            state.close()
            state.close()
        del ddp, optimizer, state, loss
        gc.collect()
    return losses, lanes_alive(existing)


def test_states_come_and_go(workers: WorkerPools) -> None:
    for losses, alive in workers(2).run(wrap_again_and_again):
        assert len(set(losses)) == 1
        assert alive == 0, "threads of lanes are left over"


def rewrap_the_same_module(rank: int, world_size: int) -> bool:
    """Close, wrap the trained module again, go on."""
    ddp, _, state = trained(rank, world_size)
    state.close()
    before = [p.detach().clone() for p in ddp.module.parameters()]
    again = DistributedDataParallel(ddp.module, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.5)
    new_state = DearState(again, optimizer, CONFIG)
    again.register_comm_hook(new_state, dear_hook)
    again(*whole_batches(rank, world_size, 5)).backward()
    optimizer.step()
    new_state.close()
    return not torch.equal(before[1], list(ddp.module.parameters())[1])


def test_a_module_may_be_wrapped_again(workers: WorkerPools) -> None:
    assert all(workers(2).run(rewrap_the_same_module))


# -- beside other machinery -------------------------------------------------------------------------------------------


def with_forked_loader(rank: int, world_size: int) -> list[float]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # may have children
    data = TensorDataset(torch.arange(64.0).reshape(16, 4))
    ddp = DistributedDataParallel(nn.Linear(4, 3), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    state = DearState(ddp, optimizer, CONFIG)
    ddp.register_comm_hook(state, dear_hook)
    losses = []
    for _ in range(2):  # epochs: workers are forked while lanes are at work
        for (batch,) in DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"):
            optimizer.zero_grad()
            loss = ddp(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    state.close()
    return losses


def test_forked_data_loaders(workers: WorkerPools) -> None:
    for losses in workers(2).run(with_forked_loader):
        assert len(losses) == 8 and losses[-1] < losses[0]


def interrupted(rank: int, world_size: int) -> tuple[str, bool]:
    """Ctrl-C between backward and step, on every rank; the user closes and leaves."""
    existing = set(threading.enumerate())
    ddp, optimizer, state = trained(rank, world_size)
    caught = ""
    try:
        optimizer.zero_grad()
        ddp(*whole_batches(rank, world_size, 9)).backward()
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        caught = "interrupted"
    state.close()
    return caught, lanes_alive(existing) == 0


def test_an_interrupt_leaves_nothing_behind(workers: WorkerPools) -> None:
    pool = workers(2)
    assert pool.run(interrupted) == [("interrupted", True)] * 2
    pool.end()


def train_on_empty_batches(rank: int, world_size: int) -> bool:
    """A batch of size zero on one rank counts as zeros in the mean, as with plain DDP."""
    results = []
    for with_dear in (True, False):
        torch.manual_seed(5)
        ddp = DistributedDataParallel(nn.Linear(4, 2), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        if with_dear:
            state = DearState(ddp, optimizer, CONFIG)
            ddp.register_comm_hook(state, dear_hook)
        for step in range(4):
            size = 0 if rank == step % world_size else 3
            optimizer.zero_grad()
            ddp(torch.ones(size, 4) * (step + 1)).sum().backward()
            optimizer.step()
        if with_dear:
            state.close()
        results.append([p.detach().clone() for p in ddp.parameters()])
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_empty_batches(workers: WorkerPools, world_size: int) -> None:
    assert all(workers(world_size).run(train_on_empty_batches))
