"""Extending, restoring, checkpoints, statistics, and what happens when a rank fails."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import LaneError
from ddp_hooks.comm import Lanes
from fsdp_ext import ExtConfig, compat, extend, restore
from fsdp_ext.all_gather import LaneAllGather
from tests.support.fsdp_ext.life import communication, train, train_until_somebody_dies, trained
from tests.support.fsdp_ext.twins import CONFIG, WholeNumbers, mesh_of, momentum_sgd, shard
from tests.support.fsdp_ext.unusual import needs_reset
from tests.support.messages import message_of
from tests.support.workers import WorkerPools

# -- extending and restoring ----------------------------------------------------------------------------------------


def extend_and_restore(rank: int, world_size: int) -> dict[str, Any]:
    model = shard(WholeNumbers(world_size))
    stock = communication(model)
    first = extend(model, CONFIG)
    optimizer = momentum_sgd(model)
    train(model, optimizer, rank, range(3))
    found = {"extended": communication(model), "same again": extend(model, CONFIG) is first}
    other = extend(model, ExtConfig(lanes=1, timeout_s=20))
    train(model, optimizer, rank, range(3, 5))
    found |= {"other": other is not first, "gathers": other.stats().gathers, "extended twice": communication(model)}
    restore(model)
    restore(model)
    train(model, optimizer, rank, range(5, 7))
    found |= {"restored": communication(model) == stock, "after": other.stats().gathers}
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return found | {"lists": any(any(compat.prefetch_lists(each)) for each in modules)}


def test_extend_is_idempotent_and_reversible(workers: WorkerPools) -> None:
    for found in workers(2).run(extend_and_restore):
        assert set(found["extended"]) == {"LaneAllGather", "LaneReduceScatter"} == set(found["extended twice"])
        assert found["same again"] and found["other"] and found["restored"]
        assert found["gathers"] == found["after"] > 0, "a restored model does without"
        assert not found["lists"]


def extend_again_in_vain(rank: int, world_size: int) -> tuple[list[str], list[str], bool]:
    """Settings that cannot be, or that only some ranks change, leave an extended model as it is."""
    model = shard(WholeNumbers(world_size))
    before = extend(model, CONFIG)
    misspelt = replace(CONFIG, reduce_scatter="sparse", density={"blocks.77": 0.1})
    messages = [
        message_of(lambda: extend(model, misspelt)),
        message_of(lambda: extend(model, CONFIG if rank == 0 else replace(CONFIG, lanes=1))),
    ]
    kinds = communication(model)
    same = extend(model, CONFIG) is before
    train(model, momentum_sgd(model), rank, range(2))
    restore(model)
    return messages, kinds, same


def test_what_is_refused_leaves_an_extended_model_as_it_is(workers: WorkerPools) -> None:
    for messages, kinds, same in workers(2).run(extend_again_in_vain):
        assert "'blocks.77', which fits none" in messages[0]
        assert "differs between ranks" in messages[1] and "config.lanes is" in messages[1]
        assert set(kinds) == {"LaneAllGather", "LaneReduceScatter"} and same


def on_another_torch(rank: int, world_size: int) -> str:
    """The problem of a model where torch has moved a name that one of our functions reads."""
    model = shard(WholeNumbers(world_size))
    state: Any = compat.state_of(model.get_submodule("blocks.1"))  # type: ignore[arg-type]
    group = compat._groups(model.get_submodule("blocks.1"))[0]  # type: ignore[arg-type]
    problems = []
    for owner, name in ((group, "_all_gather_comm"), (group, "reduce_grads"), (state, "_states_to_forward_prefetch")):
        found = vars(owner).pop(name)
        problems.append(message_of(lambda: extend(model, CONFIG)))
        setattr(owner, name, found)
        assert f"has no attribute '{name}'" in problems[-1], problems[-1]
    return problems[0]


def test_another_torch_is_refused(workers: WorkerPools) -> None:
    for problem in workers(2).run(on_another_torch):
        assert "keeps facts about blocks.1 where fsdp_ext does not find them" in problem


def test_modules_without_parameters_are_known_in_torch_2_11() -> None:
    """It keeps one group, or None, where later versions keep a list."""
    for single, expected in ((None, 0), ("a group", 1)):
        state = SimpleNamespace(_fsdp_param_group=single)
        module: Any = SimpleNamespace(_get_fsdp_state=lambda state=state: state)
        assert compat.num_param_groups(module) == expected


def statistics(rank: int, world_size: int) -> tuple[Any, int, list[str]]:
    config = ExtConfig(lanes=2, slice_mb=0.002, timeout_s=20, trace=True)
    model, _, extension = trained(rank, world_size, 4, config)
    whole = sum(padded(p, world_size) for p in model.parameters()) * 4
    tracks = sorted({span.track for span in extension.timeline()})
    stats = extension.stats()
    restore(model)
    return stats, whole, tracks


def padded(parameter: torch.Tensor, world_size: int) -> int:
    rows = -(-parameter.shape[0] // world_size) * world_size
    return rows * parameter[0].numel() if parameter.shape[0] else 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_are_those_of_direct_messages(workers: WorkerPools, world_size: int) -> None:
    for stats, whole, tracks in workers(world_size).run(statistics):
        blocks = stats.gathers // 4 - 6  # gathered again in backward: all but the root, and the last one
        share = whole * (world_size - 1) // world_size
        assert share * 4 * 2 < stats.sent_bytes < share * 4 * 3, "one reduce-scatter, one to two gathers"
        assert blocks == 5
        assert stats.sent_bytes == stats.received_bytes
        assert stats.stall_s > 0 and stats.comm_s > 0
        assert {"lane 0", "lane 1", "wait"} <= set(tracks)


def order_of_gathers(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Gathers under way when each block runs, in the second forward; and with no prefetch."""
    ahead = []
    for depth in (2, 0):
        model = shard(WholeNumbers(world_size))
        extension = extend(model, ExtConfig(lanes=1, prefetch=depth, timeout_s=20))
        model(1).backward()
        counts = extension.context.counts
        begun = counts.gathers
        seen: list[int] = []
        for block in model.get_submodule("blocks").children():
            block.register_forward_hook(lambda *_, seen=seen, c=counts, b=begun: seen.append(c.gathers - b))
        model(2)
        ahead.append(seen)
        restore(model)
    return ahead[0], ahead[1]


def test_prefetches_in_the_order_of_the_first_forward(workers: WorkerPools) -> None:
    for ahead, alone in workers(2).run(order_of_gathers):
        assert alone == [2, 3, 4, 5, 6], "the root, and each when it runs"
        assert ahead == [4, 5, 6, 6, 6], "two more"


# -- checkpoints ------------------------------------------------------------------------------------------------------


def save(rank: int, world_size: int, folder: str, steps: int, extended: bool) -> list[float]:
    model, optimizer, _ = trained(rank, 4, steps)
    if not extended:
        restore(model)
        train(model, optimizer, rank, range(0))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    restore(model)
    return everything(model)


def load(rank: int, world_size: int, folder: str, extended: bool) -> list[float]:
    torch.manual_seed(99)
    model = shard(WholeNumbers(4))
    if extended:
        extend(model, CONFIG)
    optimizer = momentum_sgd(model)
    train(model, optimizer, rank, range(1))
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    found = everything(model)
    train(model, optimizer, rank, range(1, 3))
    restore(model)
    return found


def everything(model: nn.Module) -> list[float]:
    parameters: list[Any] = list(model.parameters())
    return [value for each in parameters for value in each.full_tensor().flatten().tolist()]


@pytest.mark.quick("True-False-3-2")
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1)])
@pytest.mark.parametrize(("extended", "then"), [(True, False), (False, True), (True, True)])
def test_checkpoints_with_other_numbers_of_ranks(
    workers: WorkerPools, tmp_path: Path, before: int, after: int, extended: bool, then: bool
) -> None:
    saved = workers(before).run(save, str(tmp_path), 3, extended)[0]
    for loaded in workers(after).run(load, str(tmp_path), then):
        assert loaded == saved


def save_replicas(rank: int, world_size: int, folder: str) -> list[float]:
    torch.manual_seed(7)
    model = shard(WholeNumbers(world_size), mesh_of(world_size, 2))
    extend(model, CONFIG)
    optimizer = momentum_sgd(model)
    train(model, optimizer, rank, range(3))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    restore(model)
    return everything(model)


@pytest.mark.slow
def test_checkpoints_of_replicas(workers: WorkerPools, tmp_path: Path) -> None:
    """All ranks save one model, which fits any number of ranks."""
    first, *others = workers(4).run(save_replicas, str(tmp_path))
    assert all(each == first for each in others), "replicas are the same"
    for loaded in workers(3).run(load, str(tmp_path), True):
        assert loaded == first


# -- refusals ---------------------------------------------------------------------------------------------------------


replicate: Any = None
with contextlib.suppress(ImportError):
    from torch.distributed._composable.replicate_with_fsdp import replicate


class SymmMemAllGather(DefaultAllGather):
    """Named as what set_symm_mem_for_comm() makes, which needs an accelerator, and a torch newer than 2.11."""


def refuse(rank: int, world_size: int, case: str) -> str:
    model: Any = WholeNumbers(world_size)
    config: Any = CONFIG
    if case == "no fsdp":
        pass
    elif case == "ddp":
        model = DistributedDataParallel(model)
    elif case == "fsdp1":
        # FSDP1 itself needs an accelerator; that is no reason to miss it.
        model.blocks[0] = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
        nn.Module.__init__(model.blocks[0])
    elif case == "other settings":
        model, config = shard(model), ExtConfig(prefetch=rank)
    elif case == "other model":
        model = shard(model)
        model.blocks[1].layers[1].weight.requires_grad_(rank == 0)
    elif case == "own communication":
        model = shard(model)
        model.blocks[2].set_custom_all_gather(_Own())
    elif case == "process group memory":
        model = shard(model)
        model.blocks[2].set_allocate_memory_from_process_group_for_comm(True)
    elif case == "symmetric memory":
        model = shard(model)
        model.blocks[2].set_custom_all_gather(SymmMemAllGather())
    elif case == "two meshes":
        group: Any = dist.new_group()
        other = FSDPMeshInfo(DeviceMesh.from_group(group, "cpu"), shard_mesh_dim=0)
        places = {model.blocks[1].layers[1].weight: _fsdp_common.ShardPlacementResult(Shard(0), other)}
        fully_shard(model.blocks[1], shard_placement_fn=places.get)
    elif case == "twice":
        model = shard(model)
        extend(model.blocks[1], CONFIG)
    elif case == "replicated":
        model = replicate(model)
    elif case == "config":
        model, config = shard(model), {"lanes": 2}
    elif case == "one rank only":
        model = shard(model)
        if rank == 1:
            model.blocks[2].set_custom_all_gather(_Own())
    before = communication(model)
    message = message_of(lambda: extend(model, config))
    assert communication(model) == before, "nothing is changed"
    if case == "twice":
        restore(model.blocks[1])
    return message


class _Own(LaneAllGather):
    def __init__(self) -> None:
        pass


_Own.__name__ = "MyAllGather"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("no fsdp", "call fully_shard(module) on its blocks and on itself first"),
        ("ddp", "no module of DistributedDataParallel is wrapped by FSDP2"),
        ("fsdp1", "blocks.0 is wrapped by FSDP1 (FullyShardedDataParallel), which cannot be extended: wrap with"),
        ("other settings", "config.prefetch is 0 on ranks [0], 1 on ranks [1]"),
        ("other model", "blocks.1.layers.1.weight is ((5, 7), torch.float32, True) on ranks [0], ((5, 7), torch"),
        ("own communication", "blocks.2 already has a communication object of its own, MyAllGather"),
        ("process group memory", "blocks.2 takes memory from its process group"),
        ("symmetric memory", "blocks.2 communicates through symmetric memory (set_symm_mem_for_comm)"),
        pytest.param(
            "two meshes",
            "blocks.1 has 2 groups of parameters, on meshes of their own (shard_placement_fn)",
            marks=pytest.mark.skipif(
                not hasattr(_fsdp_common, "ShardPlacementResult"), reason="this torch has one mesh per module"
            ),
        ),
        ("twice", "blocks.1 is extended already, with another module"),
        pytest.param(
            "replicated",
            "the root module is not sharded, but replicated (replicate_with_fsdp)",
            marks=pytest.mark.skipif(replicate is None, reason="this torch has no replicate_with_fsdp"),
        ),
        ("config", "config must be an ExtConfig(...), got dict"),
        ("one rank only", "on ranks [1]: blocks.2 already has a communication object of its own"),
    ],
)
def test_refusals(workers: WorkerPools, case: str, expected: str) -> None:
    messages = workers(2).run(refuse, case)
    assert expected in messages[0] and len(set(messages)) == 1, messages
    assert messages[0].startswith("ValueError: ") and "docs/troubleshooting.md#" in messages[0]


def refuse_on_a_mesh(rank: int, world_size: int, case: str) -> str:
    model = shard(WholeNumbers(world_size), mesh_of(world_size, 2))
    config: Any = CONFIG
    if case == "one rank" and rank == 3:
        config = replace(CONFIG, reduce_scatter="sparse", density={"nope": 0.1})
    elif case == "other settings" and rank == 3:
        config = replace(CONFIG, lanes=1)
    elif case == "type" and rank == 0:
        config = {}
    return message_of(lambda: extend(model, config))


@pytest.mark.parametrize(
    ("case", "expected"),
    [("one rank", "on ranks [3]: density names 'nope'"), ("other settings", "on ranks [3]"), ("type", "on ranks [0]")],
)
def test_ranks_of_a_mesh_are_refused_alike(workers: WorkerPools, case: str, expected: str) -> None:
    messages = workers(4).run(refuse_on_a_mesh, case)
    assert expected in messages[0] and len(set(messages)) == 1, messages


def test_needs_a_process_group() -> None:
    assert not dist.is_initialized()
    assert "no module of Linear is wrapped by FSDP2" in message_of(lambda: extend(nn.Linear(2, 2)))


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick("2-0-in forward", "3-1-in backward")
@pytest.mark.parametrize("phase", ["in forward", "in backward", "before step"])
@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (3, 1)])
def test_survivors_name_the_dead(workers: WorkerPools, world_size: int, victim: int, phase: str) -> None:
    pool = workers(world_size)
    outcomes = pool.outcomes(train_until_somebody_dies, victim, phase, timeout_s=40)
    pool.end()
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome[0] == "ok" and f"rank {victim} died" in outcome[1], outcome
            assert "blocks." in outcome[1] or "root module" in outcome[1], f"does not say what: {outcome[1]}"


def restore_after_a_death(rank: int, world_size: int) -> tuple[list[str], int, bool, bool]:
    """Restore while several reduce-scatters are under way, each of which fails."""
    model, optimizer, extension = trained(rank, world_size, 2, replace(CONFIG, timeout_s=5, stall_warning_s=2))
    optimizer.zero_grad()
    loss = model(rank)
    if rank == 0:
        loss.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    failed = False
    try:
        loss.backward()
    except LaneError:
        failed = True
    (transport,) = extension.context.transports.values()
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(LaneError):  # of what was gathered ahead
        patch.setattr(Lanes.close, "__defaults__", (1.0,))  # seconds to wait for a dead rank's farewell
        restore(model)
    ended = len(transport.gathers) == len(transport.scatters) == 0
    return communication(model), len(extension.context.pending), failed, ended


def test_restoring_after_a_death(workers: WorkerPools) -> None:
    pool = workers(2)
    _, (kind, found) = pool.outcomes(restore_after_a_death, timeout_s=60)
    pool.end()
    assert kind == "ok", found
    kinds, num_pending, failed, ended = found
    assert set(kinds) == {"DefaultAllGather", "DefaultReduceScatter"}
    assert num_pending == 0 and failed and ended


def train_replicas_until_somebody_dies(rank: int, world_size: int) -> str:
    model = shard(WholeNumbers(world_size), mesh_of(world_size, 2))
    extend(model, replace(CONFIG, timeout_s=6))
    optimizer = momentum_sgd(model)
    try:
        train(model, optimizer, rank, range(3))
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, rank, range(3, 1000))
    except LaneError as error:
        return str(error)
    return "nobody noticed"


@pytest.mark.slow
def test_survivors_among_replicas(workers: WorkerPools) -> None:
    """Rank 3 talks to rank 0 in no group: it waits for ranks 1 and 2, whose processes live on here."""
    pool = workers(4)
    outcomes = pool.outcomes(train_replicas_until_somebody_dies, timeout_s=60)
    pool.end()
    assert [kind for kind, *_ in outcomes] == ["lost", "ok", "ok", "ok"]
    assert all("rank 0 died" in message for _, message in outcomes[1:3]), outcomes
    assert "timed out waiting for rank" in outcomes[3][1] or "died" in outcomes[3][1], outcomes


def raise_in_backward(rank: int, world_size: int, set_to_none: bool) -> bool:
    """An exception half-way through every rank's backward; then training goes on, as with stock FSDP2."""
    ends = []
    for extended in (True, False):
        model, optimizer, extension = trained(rank, world_size, 2)
        if not extended:
            restore(model)
        before = everything(model)
        block: Any = model.get_submodule("blocks.2")
        handle = block.register_forward_hook(lambda _, inputs, output: output.register_hook(_fail) and None)
        reduced = extension.context.counts.reduce_scatters
        with pytest.raises(ZeroDivisionError):
            model(5 + rank).backward()
        assert extension.context.counts.reduce_scatters == reduced + 2 * extended, "the two blocks behind it"
        handle.remove()
        assert isinstance(model, FSDPModule)
        model.reset_iter_state()
        assert everything(model) == before
        optimizer.zero_grad(set_to_none=set_to_none)
        train(model, optimizer, rank, range(2, 4))
        assert everything(model) != before and len(extension.context.pending) == 0
        ends.append(everything(model))
        restore(model)
    return ends[0] == ends[1]


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@needs_reset
@pytest.mark.quick("False")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_goes_on_after_an_exception_in_backward(workers: WorkerPools, set_to_none: bool) -> None:
    assert all(workers(2).run(raise_in_backward, set_to_none))


class SkipsInEvaluation(nn.Module):
    """One of its layers runs in training mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if self.training or index != 2:
                x = layer(x)
        return x


def load_after_evaluation(rank: int, world_size: int) -> bool:
    """A gather ahead for a layer that did not run is not used for later values of its parameters."""
    torch.manual_seed(0)
    model = SkipsInEvaluation()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    extension = extend(model, CONFIG)
    x = torch.ones(2, 8)
    for _ in range(3):
        model(x).sum().backward()
    model.eval()
    with torch.no_grad():
        model(x)
    ahead = dict(extension.prefetcher._unused)
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    model.train()
    found = model(x).detach()
    restore(model)
    return not ahead and torch.equal(found, model(x).detach())


def test_what_was_gathered_ahead_for_nothing(workers: WorkerPools) -> None:
    assert all(workers(2).run(load_after_evaluation))


def load_after_one_layer(rank: int, world_size: int) -> bool:
    """Nor is anything, when a layer is called by itself, for layers that would have run after it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    extend(model, CONFIG)
    x = torch.ones(2, 8)
    for _ in range(3):
        model(x).sum().backward()
    with torch.no_grad():
        model[0](x)
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})
    found = model(x).detach()
    restore(model)
    return torch.equal(found, model(x).detach())


def test_one_layer_gathers_nothing_ahead(workers: WorkerPools) -> None:
    assert all(workers(2).run(load_after_one_layer))


def let_go(rank: int, world_size: int) -> bool:
    """A model that is dropped takes its extension along."""
    model, _, extension = trained(rank, world_size, 2)
    dropped = weakref.ref(extension)
    extension.close()
    again = extend(model, CONFIG) is not extension
    del model, extension
    gc.collect()
    return again and dropped() is None


def test_models_are_let_go_of(workers: WorkerPools) -> None:
    assert all(workers(2).run(let_go))
