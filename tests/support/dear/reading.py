"""Code that reads or writes parameters right after step(), outside of any forward, compared with plain DDP."""

from __future__ import annotations

import copy
import functools
import io
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from ddp_hooks import DearConfig, DearState, TopKConfig, TopKState, dear_hook, topk_hook
from ddp_hooks.overlap.waiting import Waiting
from tests.support.dear.twins import CONFIG
from tests.support.devices import rank_device
from tests.support.kept import kept


class Net(nn.Module):
    """Its last layer's weight is also read as a function, before that layer is called, from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(24, 40), nn.Linear(40, 60), nn.Linear(40, 60)
        self.memory = nn.LSTM(60, 8)

    def forward(self, values: Tensor, early: bool) -> Tensor:
        hidden = self.first(values).tanh()
        extra = F.linear(hidden, self.last.weight).square().mean() if early else 0.0
        whole = self.middle(hidden) + self.last(hidden)
        return extra + self.memory(whole)[0].square().mean() + whole.square().mean()


Act = Callable[[DistributedDataParallel, Any], Any]


def flat(values: Any) -> Tensor:
    return torch.cat([value.detach().reshape(-1) for value in values])


def clamp(ddp: DistributedDataParallel, _: Any) -> None:
    for parameter in ddp.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def normalise(ddp: DistributedDataParallel, _: Any) -> None:
    with torch.no_grad():
        weight = ddp.module.first.weight
        weight.div_(weight.norm(dim=1, keepdim=True))


def broadcast(ddp: DistributedDataParallel, _: Any) -> None:
    for parameter in ddp.parameters():
        dist.broadcast(parameter.data, 0)


def average(ddp: DistributedDataParallel, memory: dict[str, Any]) -> Tensor:
    kept = memory.setdefault("average", [torch.zeros_like(p) for p in ddp.parameters()])
    for mean, parameter in zip(kept, ddp.parameters(), strict=True):
        mean.lerp_(parameter.detach(), 0.3)
    return flat(kept)


def averaged_model(ddp: DistributedDataParallel, memory: dict[str, Any]) -> Tensor:
    model = memory.setdefault("model", AveragedModel(ddp.module))
    model.update_parameters(ddp.module)
    return flat(model.parameters())


def save(ddp: DistributedDataParallel, _: Any) -> Tensor:
    file = io.BytesIO()
    torch.save(ddp.module, file)
    file.seek(0)
    return flat(torch.load(file, weights_only=False).parameters())


def log_from_a_thread(ddp: DistributedDataParallel, _: Any) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(flat(ddp.parameters())))
    thread.start()
    thread.join()
    return found[0]


def on_another_stream(ddp: DistributedDataParallel, _: Any) -> Tensor:
    if rank_device().type == "cpu":
        return flat(ddp.parameters())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = flat(ddp.parameters())
    torch.cuda.current_stream().wait_stream(stream)
    return found


def on_rank_0_alone(ddp: DistributedDataParallel, _: Any) -> Tensor | None:
    return torch.from_numpy(ddp.module.first.weight.detach().cpu().numpy().copy()) if dist.get_rank() == 0 else None


def forget_momentum(ddp: DistributedDataParallel, memory: dict[str, Any]) -> None:
    memory["calls"] = memory.get("calls", 0) + 1
    if memory["calls"] == 3:
        memory["optimizer"].state.clear()


ACTS: dict[str, Act] = {
    "forget momentum": forget_momentum,
    "clamp": clamp,
    "normalise": normalise,
    "broadcast": broadcast,
    "average": average,
    "averaged model": averaged_model,
    "deepcopy": lambda ddp, _: flat(copy.deepcopy(ddp.module).parameters()),
    "save": save,
    "vector": lambda ddp, _: nn.utils.parameters_to_vector(ddp.parameters()),
    "a thread": log_from_a_thread,
    "rank 0 alone": on_rank_0_alone,
    "print": lambda ddp, _: torch.tensor([repr(ddp.module.first.weight) == repr(ddp.module.first.weight)]),
    "transform": lambda ddp, _: torch.func.grad(lambda p: p["first.weight"].square().sum())(
        dict(ddp.module.named_parameters())
    )["first.weight"],
    "a stream": on_another_stream,
    "evaluate": lambda ddp, _: torch.no_grad()(ddp.module.eval())(torch.ones(2, 24, device=rank_device()), True),
}

CONFIGS: dict[str, Any] = {
    "sharded": CONFIG,
    "masters": replace(CONFIG, master_dtype=torch.float64),
    "replicated": replace(CONFIG, update="replicated"),
    "topk": TopKConfig(density=1.0, pipeline="forward"),
}


def train(name: str, config: DearConfig | TopKConfig | None) -> tuple[list[Tensor], int]:
    """Take six steps with one of ``ACTS`` after each.

    Returns:
        What the acts found, and the parameters at the end; how many parameters were in flight when an act began.
    """
    torch.manual_seed(5)
    ddp = DistributedDataParallel(Net().to(rank_device()), bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.9)
    state: Any = None
    if isinstance(config, DearConfig):
        state = DearState(ddp, optimizer, config)
        ddp.register_comm_hook(state, dear_hook)
    elif config is not None:
        state = TopKState(ddp, config, optimizer=optimizer)
        ddp.register_comm_hook(state, topk_hook)
    memory: dict[str, Any] = {"optimizer": optimizer}
    found: list[Tensor] = []
    in_flight = 0
    for step in range(6):
        values = torch.randn(4, 24, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        optimizer.zero_grad()
        ddp.train()
        ddp(values.to(rank_device()), step > 2).backward()
        optimizer.step()
        in_flight += sum(isinstance(p, Waiting) for p in ddp.parameters())
        result = ACTS[name](ddp, memory)
        found += [result.detach().clone()] if result is not None else []
    found.append(flat(ddp.parameters()))
    if state is not None:
        state.close()
    return found, in_flight


def differing(rank: int, world_size: int, kind: str) -> list[str]:
    """The acts after which something differs from plain DDP, or for which nothing was in flight."""
    # A GPU's libraries choose kernels by how memory is aligned, and then round otherwise.
    tolerance = 1e-6 if kind == "masters" else 0.0 if rank_device().type == "cpu" else 1e-4
    wrong = []
    for name in ACTS:
        ours, in_flight = train(name, CONFIGS[kind])
        theirs, _ = kept(functools.partial(train, name, None), "reading", name)
        pairs = zip(ours, theirs, strict=True)
        same = all(torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance) for a, b in pairs)
        parameters = [torch.empty_like(ours[-1]) for _ in range(world_size)]
        dist.all_gather(parameters, ours[-1])
        if not same or not in_flight or not all(torch.equal(parameters[0], other) for other in parameters):
            wrong.append(name)
    return wrong
