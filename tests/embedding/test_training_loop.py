"""Sharded tables in what real loops do beside forward, backward and step.

Prevents: norms that leave tables out or count them differently than plain DDP, scaled gradients that are applied, ranks
of which some skip a step, and updates that one of two optimizers makes twice or never.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import (
    DearState,
    GradScaler,
    TableConfig,
    TopKConfig,
    TopKState,
    clip_grad_norm_,
    dear_hook,
    shard_embeddings,
    topk_hook,
)
from tests.support.dear.twins import CONFIG as DEAR_CONFIG
from tests.support.embedding.checkpointed import Checkpointed
from tests.support.embedding.hooks import HOOKS
from tests.support.embedding.twins import CONFIG, Side, Tables, Twins, batches, sum_and_divide
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


def gradients_of(side: Side) -> list[Tensor]:
    """Of a twin with whole tables, as one could clip them; sparse ones as the values of their rows."""
    found = []
    for parameter in side.ddp.module.parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            parameter.grad = gradient.coalesce()
            found.append(parameter.grad.values())
        elif gradient is not None:
            found.append(gradient)
    return found


def clip_plainly(side: Side, max_norm: float, norm_type: float) -> float:
    """What torch.nn.utils.clip_grad_norm_ would do, which does not take sparse gradients."""
    gradients = gradients_of(side)
    norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]).double(), norm_type)
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
    return float(norm)


def clip(rank: int, world_size: int, norm_type: float, hook: str, config: TableConfig) -> tuple[Any, ...]:
    states: list[DearState] = []

    def wrap(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        states.append(HOOKS[hook](ddp, optimizer))

    twins = Twins.of(world_size, "rowwise_adamw", config, wrap=wrap if hook != "ddp" else None)
    tables = twins.ours.tables
    assert tables is not None
    norms: tuple[list[float], list[float]] = [], []

    def loop(side: Side, data: Any) -> None:
        for batch in data:
            side.zero_grad()
            side.ddp(batch).backward()
            if side.tables is None:
                norms[1].append(clip_plainly(side, 5.0, norm_type))
            elif states and len(norms[0]) % 2:
                norms[0].append(float(clip_grad_norm_([states[0]], 5.0, norm_type)))
            elif states:
                norms[0].append(float(states[0].clip_grad_norm_(5.0, norm_type)))
            else:
                sources: list[Any] = [list(side.ddp.parameters()), side.tables]
                norms[0].append(float(clip_grad_norm_(sources, 5.0, norm_type)))
            side.step()

    twins.train(loop, batches(rank, world_size, 6), prefetch=True)
    if states:
        states[0].synchronize()
    result = norms, twins.gap()
    for state in states:
        state.close()
    tables.close()
    return result


@pytest.mark.quick("2-2.0-dear_replicated", "2-2.0-ddp", "3-1.0-dear")
@pytest.mark.parametrize("hook", ["ddp", "dear", "dear_replicated"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
@pytest.mark.parametrize("world_size", [2, 3])  # of three ranks one has no column of the narrow table
def test_clipping_includes_tables(workers: WorkerPools, world_size: int, norm_type: float, hook: str) -> None:
    for (ours, plain), gap in workers(world_size).run(clip, norm_type, hook, CONFIG):
        assert ours == pytest.approx(plain, rel=1e-5)
        assert min(plain) > 5.0  # it has clipped
        assert gap < 1e-5


def test_clipping_may_leave_tables_out(workers: WorkerPools) -> None:
    for (ours, plain), _ in workers(2).run(clip, 2.0, "ddp", replace(CONFIG, clip="dense_only")):
        assert all(one < other for one, other in zip(ours, plain, strict=True))


def scale(rank: int, world_size: int, hook: str) -> tuple[float, int, float, float]:
    """Train with loss scaling; in one step a rank has an overflow, in a table's gradient only."""
    twins = Twins.of(world_size, "sparse_adam", wrap=HOOKS.get(hook))
    tables = twins.ours.tables
    assert tables is not None
    delayed = 0
    scales: list[list[float]] = [[], []]
    for side, found in zip((twins.ours, twins.plain), scales, strict=True):
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=3)
        data = batches(rank, world_size, 7)
        loader = tables.prefetch(data, _ids) if side.tables is not None else data
        for number, batch in enumerate(loader):
            side.zero_grad()
            loss = side.ddp(batch)
            if number == 4 and rank == world_size - 1:
                loss = loss + torch.inf * side.ddp.module.encoder(batch["encoder"][:1]).sum()
            elif number == 4:
                side.ddp.module.encoder(batch["encoder"][:1])
            scaler.scale(loss).backward()
            if side.tables is None:
                overflowed = torch.tensor(float(any(not g.isfinite().all() for g in gradients_of(side))))
                dist.all_reduce(overflowed)
                if overflowed:
                    scaler = GradScaler("cpu", init_scale=found[-1] / 2, growth_interval=3)
                    found.append(found[-1] / 2)
                    continue
                for gradient in gradients_of(side):
                    gradient.mul_(1.0 / scaler.get_scale())
                for optimizer in side.optimizers:
                    optimizer.step()
                found.append(scaler.get_scale())
                continue
            scaler.step(side.optimizers[0])
            scaler.update()
            delayed += tables.stats().num_delayed_rows
            found.append(scaler.get_scale())
    result = twins.gap(), delayed, scales[0][3], scales[0][4]
    tables.close()
    return result


def _ids(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"encoder": batch["encoder"]}


@pytest.mark.quick("dear")
@pytest.mark.parametrize("hook", ["ddp", "dear", "dear_replicated"])
def test_ranks_skip_a_scaled_step_together(workers: WorkerPools, hook: str) -> None:
    for gap, delayed, before, after in workers(3).run(scale, hook):
        assert gap < 1e-6
        assert delayed > 0
        assert after == before / 2


def stock_scaler(rank: int, world_size: int, follow: bool) -> str:
    twins = Twins.of(world_size)
    side, scaler = twins.ours, torch.amp.GradScaler("cpu", init_scale=4.0)
    assert side.tables is not None
    if not follow:
        side.tables.unfollow()
    (batch,) = batches(rank, world_size, 1)
    scaler.scale(side.ddp(batch)).backward()
    other = nn.Parameter(torch.ones(1))
    scaler.scale(other.sum()).backward()
    scaler.step(torch.optim.SGD([other], lr=1.0))  # another model's, which is none of the tables' business
    message = message_of(lambda: scaler.step(side.optimizers[0]))
    side.tables.close()
    return message


@pytest.mark.parametrize("follow", [True, False])
def test_the_stock_scaler_is_refused(workers: WorkerPools, follow: bool) -> None:
    assert all("use ddp_hooks.GradScaler" in message for message in workers(2).run(stock_scaler, follow))


class OnlyTables(nn.Module):
    """A part of a model whose other part is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Embedding(20, 6, sparse=True))
        self.out = nn.Linear(6, 1)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.out(self.part(ids)).sum()
        return loss


def part_of_a_model(rank: int, world_size: int) -> str:
    """Tables of a part without dense parameters: its optimizer's steps are those of the whole, and so is zeroing."""
    model = OnlyTables()
    tables = shard_embeddings(model.part, None, 1, torch.optim.SGD, config=CONFIG, lr=0.5)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    tables.follow(optimizer)
    for number in range(3):
        for parameter in ddp.parameters():
            parameter.grad = None
        ddp(torch.tensor([1, 2, number])).backward()
        optimizer.step()
    tables.unfollow()
    ddp.zero_grad()
    tables.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(ddp(torch.tensor([1, 2]))).backward()
    message = message_of(lambda: scaler.step(optimizer))
    tables.close()
    return message


def test_tables_of_a_part_of_the_model(workers: WorkerPools) -> None:
    assert all("use ddp_hooks.GradScaler" in message for message in workers(2).run(part_of_a_model))


def scaler_again(rank: int, world_size: int) -> list[str]:
    """A step that the tables refuse is taken again; and what is no model of theirs is scaled beside them."""
    twins = Twins.of(world_size, "adagrad")
    side, scaler = twins.ours, GradScaler("cpu", init_scale=4.0)
    assert side.tables is not None
    first, second = batches(rank, world_size, 2)
    scaler.scale(side.ddp(first)).backward()
    (group,) = side.tables.optimizer.param_groups
    group["weight_decay"] = 0.5
    messages = [message_of(lambda: scaler.step(side.optimizers[0]))]
    group["weight_decay"] = 0
    scaler.step(side.optimizers[0])
    scaler.update()

    side.tables.unfollow()
    side.zero_grad()
    side.tables.zero_grad()
    side.ddp(second).backward()
    other = nn.Parameter(torch.ones(1))
    scaler.scale(other.sum()).backward()
    scaler.step(torch.optim.SGD([other], lr=1.0))
    messages.append(message_of(lambda: scaler.step(side.optimizers[0])))
    side.tables.close()
    return messages


def test_a_scaled_step_is_taken_again(workers: WorkerPools) -> None:
    for refused, unfollowed in workers(2).run(scaler_again):
        assert "weight_decay of Adagrad does not work" in refused
        assert "follow no optimizer" in unfollowed


def nonfinite(rank: int, world_size: int) -> tuple[int, bool, float, float]:
    """DearConfig(on_nonfinite="skip") and max_grad_norm look at tables, too; the last norm, and plain DDP's."""
    model = Tables(world_size)
    plain = DistributedDataParallel(copy.deepcopy(model))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=CONFIG, lr=0.5)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    state = DearState(ddp, optimizer, replace(DEAR_CONFIG, on_nonfinite="skip", max_grad_norm=5.0))
    ddp.register_comm_hook(state, dear_hook)
    for number, batch in enumerate(batches(rank, world_size, 5)):
        optimizer.zero_grad()
        loss = ddp(batch)
        extra = model.narrow(torch.tensor([3]))
        if number == 2 and rank == 0:
            loss = loss + torch.inf * extra.sum()
        loss.backward()
        optimizer.step()
        plain_optimizer.zero_grad()
        (plain(batch) + 0.0 * plain.module.narrow(torch.tensor([3])).sum()).backward()
        # torch 2.11 has no norm of sparse gradients.
        gradients = [p.grad.to_dense() for p in plain.parameters() if p.grad is not None]
        plain_norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(plain.parameters(), 5.0, plain_norm)
        if number != 2:
            plain_optimizer.step()
    full = tables.full_state_dict()
    finite = all(bool(torch.isfinite(value).all()) for value in full.values())
    norm = state.stats().grad_norm
    result = state.stats().skipped_steps, finite, norm if norm is not None else 0.0, float(plain_norm)
    state.close()
    tables.close()
    return result


def test_dear_looks_at_tables(workers: WorkerPools) -> None:
    results = workers(2).run(nonfinite)
    for skipped, finite, norm, expected in results:
        assert skipped == 1 and finite and norm == pytest.approx(expected, rel=1e-6)
    assert len(set(results)) == 1


def with_a_hook(rank: int, world_size: int, hook: str, prefetch: bool) -> tuple[float, float, int]:
    closing: list[Any] = []

    def wrap(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        if hook == "dear":
            closing.append(HOOKS["dear"](ddp, optimizer))
        else:
            closing.append(TopKState(ddp, TopKConfig(density=1.0, timeout_s=20)))
            ddp.register_comm_hook(closing[0], topk_hook)

    twins = Twins.of(world_size, "sparse_adam", wrap=wrap)
    tables = twins.ours.tables
    assert tables is not None
    delayed = 0

    def loop(side: Side, data: Any) -> None:
        nonlocal delayed
        for batch in data:
            side.zero_grad()
            side.ddp(batch).backward()
            side.step()
            delayed += tables.stats().num_delayed_rows if side.tables is not None else 0

    twins.train(loop, batches(rank, world_size, 8), prefetch)
    closing[0].synchronize()
    result = twins.gap(), twins.optimizer_gap(), delayed
    closing[0].close()
    tables.close()
    return result


@pytest.mark.quick("2-*-prefetch", "3-dear-no_prefetch")
@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("hook", ["dear", "topk"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_beside_the_other_hooks(workers: WorkerPools, world_size: int, hook: str, prefetch: bool) -> None:
    for gap, optimizer_gap, delayed in workers(world_size).run(with_a_hook, hook, prefetch):
        assert (gap, optimizer_gap) == (0.0, 0.0)
        assert (delayed > 0) == prefetch


def dear_first(rank: int, world_size: int) -> tuple[list[str], bool]:
    """In which order work is done after a step: prior rows and vectors before gathers, delayed rows after them."""
    states: list[DearState] = []
    twins = Twins.of(world_size, wrap=lambda ddp, optimizer: states.append(HOOKS["dear"](ddp, optimizer)))
    tables = twins.ours.tables
    assert tables is not None
    order: list[str] = []
    followed = False
    run, launch = tables._channels.run, states[0]._driver.pipe.launched

    def noted_run(kind: Any, algorithm: Any, label: str, after: Any = ()) -> Any:
        nonlocal followed
        order.append(kind)
        if kind == "delayed":
            gathers = states[0]._driver.pipe.under_way
            followed = bool(gathers) and all(work in after for work in gathers)
        return run(kind, algorithm, label, after)

    def noted_launch(*args: Any, **kwargs: Any) -> None:
        order.append("gathers")
        launch(*args, **kwargs)

    for number, batch in enumerate(tables.prefetch(batches(rank, world_size, 5), _all_ids)):
        if number == 3:
            tables._channels.run = noted_run  # type: ignore[method-assign]
            states[0]._driver.pipe.launched = noted_launch  # type: ignore[method-assign]
        twins.ours.zero_grad()
        twins.ours.ddp(batch).backward()
        twins.ours.step()
        if number == 3:
            break
    states[0].close()
    tables.close()
    return order, followed


def _all_ids(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {**_ids(batch), "decoder.words": [batch["decoder"], batch["decoder"]], "narrow": batch["narrow"]}


def test_order_of_what_travels(workers: WorkerPools) -> None:
    for order, followed in workers(2).run(dear_first):
        assert order == ["id", "prior", "prior", "prior", "lookup", "gathers", "delayed"]
        assert followed


def recompute(rank: int, world_size: int, reentrant: bool, prefetch: bool) -> float:
    torch.manual_seed(3)
    model = Checkpointed(reentrant).double()
    plain = copy.deepcopy(model)
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=CONFIG, lr=0.01)
    ours, other = (DistributedDataParallel(m, static_graph=reentrant) for m in (model, plain))
    other.register_comm_hook(None, sum_and_divide)
    optimizers = [torch.optim.SGD(ours.parameters(), lr=0.01), torch.optim.SGD(other.parameters(), lr=0.01)]
    tables.follow(optimizers[0])
    data = [torch.randint(0, 20, (5,), generator=torch.Generator().manual_seed(9 * rank + i)) for i in range(6)]
    for ddp, optimizer, loader in (
        (ours, optimizers[0], tables.prefetch(data, lambda ids: ids) if prefetch else data),
        (other, optimizers[1], data),
    ):
        for ids in loader:
            optimizer.zero_grad()
            ddp(ids).backward()
            optimizer.step()
    full = tables.full_state_dict()
    tables.close()
    return max(float((full[name] - value).abs().max()) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("prefetch", [True, False], ids=["prefetch", "no_prefetch"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(workers: WorkerPools, reentrant: bool, prefetch: bool) -> None:
    assert all(gap < 1e-12 for gap in workers(2).run(recompute, reentrant, prefetch))


class Net(nn.Module):
    """A small language model, in float64, so that parity is sharp."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 12, sparse=True)
        self.hidden = nn.Linear(12, 12)
        self.output = nn.Linear(12, 50)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.tanh(self.hidden(self.table(ids[:, :-1])))
        return nn.functional.cross_entropy(self.output(hidden).flatten(0, 1), ids[:, 1:].flatten())


def real_model(rank: int, world_size: int, kind: str) -> tuple[float, float]:
    """A real loss, under autocast, FSDP2, torch.compile or as it is: weights after some steps, and the loss."""
    kind, _, option = kind.partition(" ")
    clips = option == "clipped"
    torch.manual_seed(5)
    model = Net() if kind == "autocast" else Net().double()
    plain = copy.deepcopy(model)
    tables = shard_embeddings(model, None, ["table"], torch.optim.SparseAdam, config=CONFIG, lr=0.01)
    ours: Any
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        ours = fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    elif kind == "compile":
        ours = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    else:
        ours = DistributedDataParallel(model)
    other = DistributedDataParallel(plain)
    other.register_comm_hook(None, sum_and_divide)
    adam = torch.optim.SparseAdam([plain.table.weight], lr=0.01)
    rest = [parameter for name, parameter in plain.named_parameters() if not name.startswith("table")]
    optimizers = [torch.optim.SGD(ours.parameters(), lr=0.1), torch.optim.SGD(rest, lr=0.1)]
    tables.follow(optimizers[0])
    data = [torch.randint(0, 50, (3, 5), generator=torch.Generator().manual_seed(9 * rank + i)) for i in range(6)]
    losses = []
    for ids in tables.prefetch(data, lambda ids: ids):
        optimizers[0].zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = ours(ids)
        loss.backward()
        if clips:
            clip_grad_norm_([list(ours.parameters()), tables], 0.01)
        optimizers[0].step()
        losses.append(loss.item())
    for number, ids in enumerate(data):
        optimizers[1].zero_grad()
        adam.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            loss = other(ids)
        loss.backward()
        if clips:
            clip_plainly(Side(other, [], None), 0.01, 2.0)
        optimizers[1].step()
        adam.step()
        losses[number] -= loss.item()
    with tables.local():
        gap = float((model.table.weight - plain.table.weight).abs().max())
    tables.close()
    return gap, max(map(abs, losses))


@pytest.mark.quick("plain", "autocast", "fsdp2 clipped")
@pytest.mark.parametrize("kind", ["plain", "autocast", "fsdp2", "fsdp2 clipped", "compile"])
def test_real_models(workers: WorkerPools, kind: str) -> None:
    tolerance = 1e-2 if kind == "autocast" else 1e-6 if "clipped" in kind else 1e-12
    for gap, loss_gap in workers(2).run(real_model, kind):
        assert gap < tolerance
        assert loss_gap < tolerance


def evaluate(rank: int, world_size: int) -> tuple[bool, str, str]:
    """Every rank evaluates as many batches as it likes, after a step that has delayed rows."""
    twins = Twins.of(world_size)
    tables = twins.ours.tables
    assert tables is not None
    seen: list[list[float]] = [[], []]
    refused = ""

    def loop(side: Side, data: Any) -> None:
        nonlocal refused
        for number, batch in enumerate(data):
            side.zero_grad()
            side.ddp(batch).backward()
            side.step()
            if number != 3:
                continue
            side.ddp.eval()
            mine = batches(rank, world_size, rank + 1)
            with torch.no_grad():
                if side.tables is None:
                    seen[1] += [float(side.ddp.module(one)) for one in mine]
                else:
                    with side.tables.local():
                        seen[0] += [float(side.ddp.module(one)) for one in mine]
            side.ddp.train()
            if side.tables is not None:
                with side.tables.local():
                    refused = message_of(lambda batch=batch: side.ddp.module(batch))  # type: ignore[misc]

    twins.train(loop, batches(rank, world_size, 6), prefetch=True)
    result = seen[0] == seen[1] and twins.gap() == 0.0, refused, str(len(seen[0]))
    tables.close()
    return result


def test_evaluation_with_other_numbers_of_batches(workers: WorkerPools) -> None:
    results = workers(3).run(evaluate)
    assert [(equal, count) for equal, _, count in results] == [(True, "1"), (True, "2"), (True, "3")]
    assert all("leave it before training on" in refused for _, refused, _ in results)


def without_following(rank: int, world_size: int) -> tuple[float, str]:
    """The user calls tables.step(); one forgotten step is found in the next forward."""
    twins = Twins.of(world_size)
    tables = twins.ours.tables
    assert tables is not None
    tables.unfollow()

    def loop(side: Side, data: Any) -> None:
        for batch in data:
            side.zero_grad()
            side.ddp(batch).backward()
            side.step()
            if side.tables is not None:
                side.tables.step()

    twins.train(loop, batches(rank, world_size, 6), prefetch=True)
    gap = twins.gap()
    for batch in batches(rank, world_size, 1):
        twins.ours.zero_grad()
        twins.ours.ddp(batch).backward()
        twins.ours.step()
        message = message_of(lambda batch=batch: twins.ours.ddp(batch))  # type: ignore[misc]
    tables.zero_grad()
    tables.close()
    return gap, message


def test_without_following(workers: WorkerPools) -> None:
    for gap, message in workers(2).run(without_following):
        assert gap == 0.0
        assert "call tables.step() after optimizer.step(), or tables.follow(optimizer)" in message


def closures(rank: int, world_size: int) -> float:
    """Backward inside of step(closure), as Lightning has it."""
    twins = Twins.of(world_size)
    tables = twins.ours.tables
    assert tables is not None

    def loop(side: Side, data: Any) -> None:
        for batch in data:

            def closure(batch: Any = batch) -> Tensor:
                side.zero_grad()
                loss: Tensor = side.ddp(batch)
                loss.backward()
                return loss

            side.optimizers[0].step(closure)  # type: ignore[arg-type]
            for optimizer in side.optimizers[1:]:
                optimizer.step()

    twins.train(loop, batches(rank, world_size, 6), prefetch=True)
    gap = twins.gap()
    tables.close()
    return gap


def test_backward_inside_of_step(workers: WorkerPools) -> None:
    assert workers(2).run(closures) == [0.0, 0.0]


