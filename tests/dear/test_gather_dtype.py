"""Gathers in 16 bits: the bits of whole gathers in every loss, gradient and saved weight, and half the bytes.

Prevents: rounded values that somebody reads with all their bits, norms and embeddings that are rounded, a rank that
hangs because it reads alone.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ddp_hooks import DearConfig, DearState, dear_hook
from ddp_hooks.comm.torch_compat.autocast import _CASTING
from ddp_hooks.overlap import Rounded
from ddp_hooks.overlap.waiting import Waiting
from tests.support.dear.twins import CONFIG
from tests.support.messages import message_of
from tests.support.workers import WorkerPools

ROUNDS = replace(CONFIG, gather_dtype=torch.bfloat16)
STEPS = 7


def autocast(enabled: bool = True) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)


class Block(nn.Module):
    """Attention by functions, a norm, and layers that may be computed again."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projections = nn.Parameter(torch.randn(3, width, width) / width)  # read by matmul
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, values: Tensor) -> Tensor:
        q, k, v = torch.matmul(self.norm(values).unsqueeze(1), self.projections).unbind(1)
        values = values + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        values = values + self.attention(values, values, values, need_weights=False)[0]
        return values + self.down(F.gelu(self.up(values)))


class Language(nn.Module):
    """A small GPT-2: embeddings tied to the head, and a scale that may be read in the forward from some step on."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.recomputes, self.reads_directly = recomputes, False
        self.embed, self.positions = nn.Embedding(50, 16), nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        values = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            values = checkpoint(block, values, use_reentrant=False) if self.recomputes else block(values)
        if self.reads_directly:
            first: Any = self.blocks[0]
            values = values * first.up.weight.mean()
        return F.cross_entropy(self.head(self.norm(values)).float().flatten(0, 1), ids.flatten())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding="same"), nn.GroupNorm(4, 16), nn.ReLU(), nn.ConvTranspose2d(16, 20, 3),
            nn.BatchNorm2d(20), nn.Conv2d(20, 8, 3, bias=False), nn.Flatten(), nn.LazyLinear(10),
        )  # fmt: skip
        self.layers(torch.zeros(2, 3, 6, 6))

    def forward(self, ids: Tensor) -> Tensor:
        images = F.one_hot(ids, 50).float()[:, :, :9].reshape(len(ids), -1)[:, : 3 * 36]
        return self.layers(images.view(-1, 3, 6, 6)).float().square().mean()


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(100 * step + rank))


class Run:
    """A model in training, and all that can be compared of it."""

    bucket_mb = 0.02

    def __init__(self, make: Callable[[], nn.Module], config: DearConfig, optimizer: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(3)
        self.ddp = DistributedDataParallel(make(), bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True)
        self.optimizer = optimizer(self.ddp.module.parameters(), lr=0.01)
        self.state = DearState(self.ddp, self.optimizer, config)
        self.ddp.register_comm_hook(self.state, dear_hook)
        self.seen: list[Tensor] = []
        self.memory: dict[str, Any] = {}
        self.sent_bytes: list[int] = []
        self.most_rounded = 0

    @property
    def model(self) -> Any:
        return self.ddp.module

    def train(self, rank: int, step: int, casts: bool = True, micro_batches: int = 1) -> None:
        self.optimizer.zero_grad()
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with contextlib.nullcontext() if is_last else self.ddp.no_sync(), autocast(casts):
                loss = self.ddp(batch(rank, 10 * step + micro))
            loss.backward()
            self.seen.append(loss.detach())
        with self.state.reduced_gradients() as shards:
            self.seen += [shard.grad.clone() for shard in shards if shard.grad is not None]
        self.optimizer.step()
        self.most_rounded = max(self.most_rounded, self.num_rounded)
        self.sent_bytes.append(self.state.stats().sent_bytes)

    def weights(self) -> None:
        self.seen += [value.clone() for value in self.model.state_dict().values()]

    @property
    def num_rounded(self) -> int:
        rounding = self.state._driver.rounding
        return len(rounding.rounded.now) if rounding is not None else 0


Loop = Callable[[Run, int, int], None]


def plain(run: Run, rank: int, step: int) -> None:
    run.train(rank, step)


def saving(run: Run, rank: int, step: int) -> None:
    run.train(rank, step)
    if step % 2:
        run.weights()


def in_turns(run: Run, rank: int, step: int) -> None:
    run.train(rank, step, casts=step % 3 != 2)


def accumulating(run: Run, rank: int, step: int) -> None:
    run.train(rank, step, micro_batches=1 + step % 3)


def evaluating(run: Run, rank: int, step: int) -> None:
    """On one rank under autocast, which needs no other, and on all without."""
    run.train(rank, step)
    with torch.no_grad(), autocast():
        if step and rank == 0:
            run.seen.append(run.model(batch(5, step)))
    if step % 3 == 1:
        with torch.no_grad():
            run.seen.append(run.ddp(batch(6, step)))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            run.seen.append(run.model.blocks[0].up(torch.ones(1, 16)))


def averaging(run: Run, rank: int, step: int) -> None:
    if step == 2:
        run.memory["average"] = torch.optim.swa_utils.AveragedModel(run.model)
    run.train(rank, step)
    if step >= 2:
        run.memory["average"].update_parameters(run.model)
        run.seen += [p.detach().clone() for p in run.memory["average"].parameters()]


def reading_directly_later(run: Run, rank: int, step: int) -> None:
    run.model.reads_directly = step >= 4
    run.train(rank, step)


def writing(run: Run, rank: int, step: int) -> None:
    run.train(rank, step)
    if step == 3:
        run.memory["saved"] = copy.deepcopy(run.model.state_dict())
    if step == 4:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.mul_(0.75)
    if step == 5:
        run.model.load_state_dict(run.memory["saved"])


def other_reads(run: Run, rank: int, step: int) -> None:
    for number in range(3):  # reads after every second step would end the rounding
        run.train(rank, 3 * step + number)
    assert run.num_rounded or run.state.config == CONFIG
    weight = run.model.blocks[1].up.weight
    reads: list[Callable[[], Tensor]] = [
        lambda: weight.data,
        lambda: copy.deepcopy(weight).detach(),
        lambda: torch.nn.utils.parameters_to_vector([weight]).detach(),
        lambda: torch.stack(torch._foreach_norm([weight])).detach(),
        lambda: torch.func.vmap(lambda row: row * 2)(weight).detach(),
        lambda: torch.mm(torch.eye(64), weight, out=torch.empty(64, 16)),
        lambda: torch.jit.trace(run.model.blocks[1].up, torch.eye(16))(torch.eye(16)),
    ]
    with torch.no_grad(), autocast(enabled=step % 2 == 1):
        run.seen.append(reads[step]().clone())


def regrouping(run: Run, rank: int, step: int) -> None:
    run.train(rank, step)
    run.state.set_fusion("size", mb=0.01 * (step + 1))


def saving_on_one_rank(run: Run, rank: int, step: int) -> None:
    run.train(rank, step)
    if step % 2:
        run.state.consolidate()
    else:
        run.state.synchronize()
    if rank == 0:
        run.weights()


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "plain": (Language, plain),
    "convolutions": (Convolutions, saving),
    "recomputed": (lambda: Language(recomputes=True), saving),
    "in turns": (Language, in_turns),
    "accumulating": (Language, accumulating),
    "evaluating": (Language, evaluating),
    "averaging": (Language, averaging),
    "read directly later": (Language, reading_directly_later),
    "writing": (Language, writing),
    "other reads": (Language, other_reads),
    "regrouping": (Language, regrouping),
    "saving on one rank": (Language, saving_on_one_rank),
}


def compare(rank: int, world_size: int, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    make, loop = LOOPS[name]
    runs = [Run(make, replace(config, **changes)) for config in (CONFIG, ROUNDS)]
    for run in runs:
        for step in range(STEPS):
            torch.manual_seed(step)
            loop(run, rank, step)
        run.weights()
        run.state.close()
    whole, rounded = (run.seen for run in runs)
    differing = [i for i, (a, b) in enumerate(zip(whole, rounded, strict=True)) if not torch.equal(a, b)]
    names = {id(p): n for n, p in runs[1].model.named_parameters()}
    chosen = runs[1].state._driver.layout.rounded
    parameters = runs[1].state._driver.parameters.tensors
    return {
        "differing": differing, "compared": len(whole), "largest": runs[1].most_rounded,
        "rounded": {names[id(parameters[i])] for i in chosen},
        "sent": [run.sent_bytes for run in runs],
        "classes": {type(p) for p in runs[1].model.parameters()},
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name in LOOPS if name != "plain"])  # which is a part of the others
def test_bits_are_those_of_whole_gathers(workers: WorkerPools, name: str) -> None:
    for found in workers(2).run(compare, name, {}):
        assert found["differing"] == [], f"of {found['compared']}"
        assert found["largest"] >= (5 if name == "convolutions" else 16), found["rounded"]
        assert found["classes"] == {nn.Parameter}


@pytest.mark.parametrize(("world_size", "changes"), [
    (4, {"collective": "two-level", "node_size": 2}), (3, {"fusion_mb": 1.0, "lanes": 3}),
])  # fmt: skip
def test_bits_with_other_collectives(workers: WorkerPools, world_size: int, changes: dict[str, Any]) -> None:
    for found in workers(world_size).run(compare, "plain", changes):
        assert found["differing"] == [] and found["largest"] >= 16


def read_in_every_step(rank: int, world_size: int, config: DearConfig) -> list[int]:
    """Bytes of steps whose parameters are read after each, when all gathers have ended."""
    run, totals = Run(Language, replace(config, wire="float32")), [0]
    for step in range(STEPS):
        run.train(rank, step)
        run.weights()
        totals.append(run.state._driver.lanes.traffic.sent_bytes)
    run.state.close()
    return [after - before for before, after in itertools.pairwise(totals)]


def test_what_is_rounded_and_bytes(workers: WorkerPools) -> None:
    found = workers(2).run(compare, "plain", {"wire": "float32"})[0]
    assert found["differing"] == [] and found["largest"] >= 16
    kinds = {name.rpartition("blocks.0.")[2] for name in found["rounded"] if name.startswith("blocks.0.")}
    weights = {"projections", "up.weight", "down.weight", "attention.in_proj_weight", "attention.out_proj.weight"}
    biases = {"up.bias", "down.bias", "attention.in_proj_bias", "attention.out_proj.bias"}
    assert kinds == weights | biases
    assert not any("embed" in name or "norm" in name or "positions" in name for name in found["rounded"])
    whole, rounded = found["sent"]
    assert rounded[-1] < 0.8 * whole[-1]
    plain, sent = (workers(2).run(read_in_every_step, config)[0] for config in (CONFIG, ROUNDS))
    assert sent[4] > plain[4] and sent[5:] == plain[5:], "rounding ends where it is in vain, four steps after a layout"


@pytest.mark.parametrize(("were_read", "ends_after"), [
    ("1111", 4), ("01" * 4, 8), ("001" * 9, None), ("111" + "0" * 9, None), ("111-1001001", None),
])  # fmt: skip
def test_rounding_ends_where_reads_cost_what_it_saves(were_read: str, ends_after: int | None) -> None:
    """In bytes a read after every second step does; those before a new layout ("-") do not count."""
    rounded, found = Rounded(torch.bfloat16, "cpu", lambda _: []), None
    for step, event in enumerate(were_read, start=1):
        if event == "-":
            rounded.count_anew()
            continue
        rounded.launched({0})
        if event == "1":
            rounded.became_whole()
        found = found or (step if rounded.is_in_vain else None)
    assert found == ends_after


@pytest.mark.parametrize("function", sorted(_CASTING, key=str), ids=range(len(_CASTING)))
def test_functions_read_only_what_autocast_has_converted(function: Any) -> None:
    """For a torch whose autocast treats one of them in another way."""
    name = function.__name__
    generator = torch.Generator().manual_seed(0)
    if "conv" in name:
        sizes = [(2, 4, *[5] * int(name[-2])), (4, 4, *[3] * int(name[-2]))]
    else:
        sizes = [(2, 6, 6)] * 3 if "b" in name else [(6, 6)] * 3
        sizes = sizes[: 3 if "add" in name else 2]
        if "addb" in name:
            sizes[0] = (6, 6)
    for place in range(len(sizes)):
        values = [torch.randn(size, generator=generator) for size in sizes]
        with autocast():
            whole = function(*values)
            values[place] = values[place].bfloat16().float()
            assert whole.dtype == torch.bfloat16 and torch.equal(function(*values), whole)


def read_alone(rank: int, world_size: int) -> list[str]:
    """What rank 0 hears that saves alone, and what all hear whose step came in between."""
    run = Run(Language, replace(ROUNDS, timeout_s=1.5, stall_warning_s=1))
    for step in range(3):
        run.train(rank, step)
    said = [message_of(run.model.state_dict)] if rank == 0 else []
    dist.barrier()
    if rank == 1:  # it is too late
        said = [message_of(run.model.state_dict)]
    run.weights()  # together it works, also afterwards
    run.train(rank, 4)
    if rank == 0:  # another call than the other's
        said.append(message_of(lambda: run.model.blocks[0].up.weight.sum()))
    else:
        said.append(message_of(run.state.consolidate))
    dist.barrier()
    run.state.close()
    return [*said, str(all(type(p) is nn.Parameter for p in run.model.parameters()))]


def test_a_rank_that_reads_alone_is_told(workers: WorkerPools) -> None:
    first, second = workers(2).run(read_alone)
    assert first[0].startswith("LaneTimeout: rank 0 reads blocks.0.projections outside of torch.autocast")
    for said in (first, second):
        assert "Call state.synchronize() on all ranks before" in said[0] and "rank 1 has not called it" in said[0]
        assert "consolidate()" in said[1] and "outside of torch.autocast" in said[1]
    assert first[-1] == second[-1] == "True"


def compiled(rank: int, world_size: int, step_of_compilation: int) -> dict[str, Any]:
    """A block that is compiled before the first step is gathered whole; later its entrance makes it whole."""
    runs = []
    for config in (CONFIG, ROUNDS):
        torch._dynamo.reset()
        run = Run(Language, config)
        for step in range(STEPS):
            if step == step_of_compilation:
                run.model.blocks[1].compile(backend="aot_eager")
            run.train(rank, step)
        run.weights()
        run.state.close()
        runs.append(run)
    driver = runs[1].state._driver
    rounded = [driver.parameters.names[index] for index in driver.layout.rounded]
    same = all(map(torch.equal, runs[0].seen, runs[1].seen))
    return {"same": same, "rounded": rounded, "most": runs[1].most_rounded}


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_compiled_blocks(workers: WorkerPools, step: int) -> None:
    for found in workers(2).run(in_large_buckets, step):
        assert found["same"] and found["most"] >= 8
        assert not any("blocks.1" in name for name in found["rounded"])


def in_large_buckets(rank: int, world_size: int, step: int) -> dict[str, Any]:
    """torch compiles for DDP's buckets, and not for the smallest."""
    kept, Run.bucket_mb = Run.bucket_mb, 2
    try:
        return compiled(rank, world_size, step)
    finally:
        Run.bucket_mb = kept


class Odd(nn.Module):
    """Reads parameters in ways that no function tells: not at all, or where functions ask no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.cast, self.island, self.low = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.unseen, self.scale = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.ones(16, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        values = self.cast(ids[:, :1] * torch.linspace(0, 1, 16))
        with autocast(False):
            values = self.island(values.float())
        with torch.autocast("cpu", dtype=torch.float16):
            values = self.low(values)
        with torch._C.DisableTorchFunctionSubclass():
            values = values.float() @ self.unseen.float()
        return (values * self.scale).square().mean()


def odd(rank: int, world_size: int) -> tuple[list[str], bool, list[bool], str]:
    """What of it is rounded; whether a module waits for all bits where overrides are off; what hears who is late."""
    runs = [Run(Odd, config) for config in (CONFIG, ROUNDS)]
    for run in runs:
        for step in range(3):
            run.train(rank, step)
        with torch.no_grad(), autocast(), torch._C.DisableTorchFunctionSubclass():
            run.seen.append(run.model.cast(torch.ones(16)) * run.model.cast.weight.sum())
        run.train(rank, 3)
    driver = runs[1].state._driver
    assert driver.rounding is not None
    rounded = [driver.parameters.names[index] for index in driver.rounding.rounded.now]
    same = all(map(torch.equal, runs[0].seen, runs[1].seen))
    runs[0].state.close()
    runs[1].state._close_at_exit()
    kinds = [isinstance(runs[1].model.cast.weight, Waiting), isinstance(runs[1].model.island.weight, Waiting)]
    return rounded, same, kinds, message_of(runs[1].model.cast.weight.sum)


def test_reads_that_no_function_tells(workers: WorkerPools) -> None:
    for rounded, same, kinds, late in workers(2).run(odd):
        assert sorted(rounded) == ["cast.bias", "cast.weight"] and same
        assert kinds == [True, False], "rounded values must not look like whole ones"
        assert late.startswith("RuntimeError: cast.weight has other ranks' values in torch.bfloat16 only")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gather_dtype": torch.float16}, "gather_dtype must be None or torch.bfloat16 (float16 would round"),
    ({"gather_dtype": torch.bfloat16, "update": "replicated"}, "has no effect with update="),
    ({"gather_dtype": torch.bfloat16, "overlap_forward": False}, "has no effect with overlap_forward=False"),
    (
        {"gather_dtype": torch.bfloat16, "check_replicas": True},
        "has no effect with check_replicas=True, which reads whole parameters after every step: leave one of them out",
    ),
]


@pytest.mark.parametrize(("settings", "expected"), REFUSED)
def test_settings_that_are_refused(settings: dict[str, Any], expected: str) -> None:
    message = message_of(lambda: DearConfig(**settings))
    assert message.startswith("ValueError") and expected in message
