"""Set-ups that cannot work are refused on every rank, with a remedy.

Prevents: hangs because one rank refuses and the others wait, and settings that are silently something else.
"""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TopKConfig, TopKState, topk_hook
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


@pytest.mark.parametrize(("changes", "expected"), [
    ({"density": 0.0}, "density must be None, or in (0, 1], got 0.0"),
    ({"density": 1.5}, "density must be None, or in (0, 1], got 1.5"),
    ({"warmup_density": 0}, "warmup_density must be None, or in (0, 1]"),
    ({"algorithm": "topk"}, "algorithm must be one of ('spardl', "),
    ({"sag": "c"}, "sag must be one of"),
    ({"collection": "all"}, "collection must be one of"),
    ({"wire": "tiny"}, "wire must be one of"),
    ({"on_nonfinite": "ignore"}, "on_nonfinite must be one of"),
    ({"teams": 0}, 'teams must be a whole number >= 1 or "auto", got 0'),
    ({"teams": "all"}, "teams must be a whole number"),
    ({"momentum": 1.0}, "momentum must be None or in [0, 1)"),
    ({"group_mb": 0}, "group_mb must be > 0"),
    ({"timeout_s": -1}, "timeout_s must be > 0"),
    ({"timeout_s": float("inf")}, "timeout_s must be > 0 and finite, got inf"),
    ({"lanes": 0}, "lanes must be a whole number >= 1"),
    ({"lanes": "two"}, "lanes must be a whole number >= 1, got 'two'"),
    ({"density": "1%"}, "density must be None, or in (0, 1], got '1%'"),
    ({"momentum": True}, "momentum must be None or in [0, 1), got True"),
    ({"node_size": 1}, 'node_size must be None, which is one level, "auto", or a whole number >= 2, got 1'),
    ({"node_size": "hosts"}, "node_size must be None"),
    ({"warmup_steps": -1}, "warmup_steps must be a whole number >= 0"),
])  # fmt: skip
def test_settings(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        TopKConfig(**changes)
    assert expected in str(caught.value)


def test_the_density_falls_by_the_same_factor() -> None:
    config = TopKConfig(density=0.01, warmup_steps=2, warmup_density=1.0)
    assert [round(config.density_at(step), 12) for step in range(4)] == [1.0, 0.1, 0.01, 0.01]


def linear(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(3, 3), **options)


def refusals(rank: int, world_size: int) -> dict[str, str]:
    taken = linear()
    taken.register_comm_hook(None, lambda state, bucket: None)
    sparse = DistributedDataParallel(nn.Embedding(5, 3, sparse=True))
    complex_ones = DistributedDataParallel(nn.Linear(3, 3, dtype=torch.complex64))
    transposed = linear()
    if rank == 1:  # after DDP has compared them
        transposed.module.weight.data = transposed.module.weight.data.t().contiguous().t()
    used = linear()
    used.register_comm_hook(TopKState(used), topk_hook)
    moving = torch.optim.SGD(used.parameters(), lr=0.1, momentum=0.9)
    cases: dict[str, Any] = {
        "module": lambda: TopKState(nn.Linear(3, 3)),  # type: ignore[arg-type]
        "config": lambda: TopKState(linear(), {"density": 0.1}),  # type: ignore[arg-type]
        "hook": lambda: TopKState(taken),
        "sparse": lambda: TopKState(sparse),
        "complex": lambda: TopKState(complex_ones),
        "teams": lambda: TopKState(linear(), TopKConfig(teams=2)),
        "sag": lambda: TopKState(linear(), TopKConfig(teams=3, sag="r")),
        "prime": lambda: TopKState(linear(), TopKConfig(node_size=2)),
        "one node": lambda: TopKState(linear(), TopKConfig(node_size=3)),
        "differing": lambda: TopKState(linear(), TopKConfig(density=0.1 if rank else 0.2)),
        "strides": lambda: TopKState(transposed),
        "optimizer": lambda: TopKState(linear(), optimizer=torch.optim.SGD),  # type: ignore[arg-type]
        "momentum": lambda: TopKState(linear(), TopKConfig(momentum=0.9), optimizer=moving),
        "one rank": lambda: TopKState(linear(), {} if rank == 1 else None),  # type: ignore[arg-type]
        "copy": lambda: copy.deepcopy(used),
        "pickle": lambda: pickle.dumps(used),
    }
    return {name: message_of(case) for name, case in cases.items()}


def test_set_up(workers: WorkerPools) -> None:
    expected = {
        "module": "wrap the model first",
        "config": "TopKConfig(...), got dict",
        "hook": "already has a communication hook",
        "sparse": "sparse=False",
        "complex": "weight is torch.complex64",
        "teams": "teams must divide the number of ranks, 3: got 2, possible are [1, 3]",
        "sag": 'use sag="b" or "auto"',
        "prime": "node_size must divide the number of ranks, 3: got 2, leave it out",
        "one node": "makes all 3 ranks one node, and within a node everything is sent",
        "differing": "make them equal",
        "strides": "strides (3, 1) on ranks [0, 2], (3, 3) torch.float32 strides (1, 3) on ranks [1]",
        "optimizer": "takes the torch.optim.Optimizer that steps on the model, got type",
        "momentum": "SGD has momentum, too: give it to one of the two",
        "one rank": "on ranks [1]: TopKState takes",
        "copy": "Copy ddp.module",
        "pickle": "save ddp.module.state_dict()",
    }
    for found in workers(3).run(refusals):
        for name, part in expected.items():
            assert part in found[name], (name, found[name])


def refuse_nodes(rank: int, world_size: int) -> list[str]:
    configs = TopKConfig(node_size=3), TopKConfig(node_size=2, teams=4), TopKConfig(node_size=2 if rank else None)
    return [message_of(partial(TopKState, linear(), config)) for config in configs]


def test_nodes_that_do_not_fit(workers: WorkerPools) -> None:
    for sizes, teams, differing in workers(4).run(refuse_nodes):
        assert "node_size must divide the number of ranks, 4: got 3, possible are [2]" in sizes
        assert "teams must divide the number of nodes, 2: got 4, possible are [1, 2]" in teams
        assert "node_size is None on ranks [0], 2 on ranks [1, 2, 3]; make them equal" in differing


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, values: torch.Tensor, both: bool) -> torch.Tensor:
        return self.second(self.first(values)) if both else self.first(values)


def leave_out(rank: int, world_size: int) -> list[str]:
    """A parameter without a gradient, and without find_unused_parameters; a state that is closed."""
    ddp = DistributedDataParallel(Part(), bucket_cap_mb=1e-6)
    state = TopKState(ddp)
    ddp.register_comm_hook(state, topk_hook)
    for _ in range(2):
        ddp(torch.ones(1, 3), True).sum().backward()
    ddp(torch.ones(1, 3), False).sum().backward()
    messages = [message_of(lambda: ddp(torch.ones(1, 3), True))]
    state.close()
    state.close()
    other = linear()
    spent = TopKState(other)
    other.register_comm_hook(spent, topk_hook)
    spent.close()
    messages.append(message_of(lambda: other(torch.ones(1, 3)).sum().backward()))
    return messages


def test_loops_that_cannot_go_on(workers: WorkerPools) -> None:
    for unfinished, closed in workers(2).run(leave_out):
        assert "find_unused_parameters=True" in unfinished
        assert "TopKState was closed" in closed
