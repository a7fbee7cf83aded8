"""The hook in training loops, between real processes, with gradients that are whole numbers.

Prevents: gradients that are lost or counted twice between buckets, groups and residuals; replicas that drift apart;
and loops in which the hook is silently another algorithm than the one that was asked for.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TopKState, topk_hook
from ddp_hooks.comm import run_on_fabric
from ddp_hooks.sparse import SparseSum, Sparsity
from ddp_hooks.sparse.codec import EntryCodec
from tests.support.dear.twins import WholeNumbers
from tests.support.messages import message_of
from tests.support.topk.algorithms import returning
from tests.support.topk.hooks import (
    ALGORITHMS,
    CONFIG,
    Pair,
    Sometimes,
    accumulate,
    check,
    conserve,
    gradients_of,
    plain,
    zero_to_zeros,
)
from tests.support.workers import WorkerPools

DENSE: dict[str, Any] = {"algorithm": "dense", "density": None}


# -- loops ------------------------------------------------------------------------------------------------------------


def evaluate(pair: Pair, step: int) -> None:
    plain(pair, step)
    if step % 2 == pair.rank:  # on one rank only
        pair.ours.eval()
        with torch.no_grad():
            pair.ours.module(1)
        pair.ours.train()


def everywhere() -> list[Any]:
    """Every algorithm for every number of ranks that it fits."""
    cases = []
    for world_size in range(2, 9):
        for changes in ALGORITHMS:
            if world_size % changes.get("teams", 1) == 0:
                name = f"{world_size}-{'-'.join(map(str, changes.values()))}"
                quick = world_size == 3 or (world_size == 4 and "teams" in changes)
                cases.append(pytest.param(world_size, changes, marks=[] if quick else pytest.mark.slow, id=name))
    return cases


@pytest.mark.quick("3-", "4-2-b")
@pytest.mark.parametrize(("world_size", "changes"), everywhere())
def test_nothing_is_lost(workers: WorkerPools, world_size: int, changes: dict[str, Any]) -> None:
    pool = workers(world_size)
    check(pool.run(conserve, replace(CONFIG, **changes), plain, 6))
    if world_size > 4:
        pool.end()  # large pools are used once


@pytest.mark.quick("2-*", "3-accumulate")
@pytest.mark.parametrize("loop", [zero_to_zeros, accumulate, evaluate], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_loops(workers: WorkerPools, world_size: int, loop: Any) -> None:
    run = workers(world_size).run
    if world_size == 1:  # plain DDP
        for gap, *_ in run(conserve, CONFIG, loop, 5):
            assert gap == 0.0
        return
    check(run(conserve, CONFIG, loop, 5))


@pytest.mark.parametrize("changes", [
    {"dense_below_numel": 200}, {"warmup_steps": 4}, {"density": 1e-9}, {"group_mb": 1e-6}, {"lanes": 3},
    {"wire": "compact"},
], ids=lambda changes: "-".join(changes))  # fmt: skip
def test_settings(workers: WorkerPools, changes: dict[str, Any]) -> None:
    check(workers(2).run(conserve, replace(CONFIG, **changes), plain, 7))


@pytest.mark.parametrize("world_size", [2, 3])
def test_dense_parts(workers: WorkerPools, world_size: int) -> None:
    """Small parameters have groups of their own, which come last if they are complete last."""
    check(workers(world_size).run(conserve, replace(CONFIG, dense_below_numel=200), plain, 5))


@pytest.mark.parametrize("options", [
    {"gradient_as_bucket_view": False}, {"static_graph": True}, {"bucket_cap_mb": 1e-6}, {"bucket_cap_mb": 25},
    {"find_unused_parameters": True},
], ids=lambda options: "-".join(options))  # fmt: skip
def test_settings_of_ddp(workers: WorkerPools, options: dict[str, Any]) -> None:
    check(workers(2).run(partial(conserve, **options), CONFIG, plain, 5))


@pytest.mark.quick("2-*")
@pytest.mark.parametrize("changes", [{"density": 1.0}, DENSE], ids=["everything", "dense"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_everything_is_plain_ddp(workers: WorkerPools, world_size: int, changes: dict[str, Any]) -> None:
    check(workers(world_size).run(conserve, replace(CONFIG, **changes), accumulate, 5), keeps=False)


@pytest.mark.quick(
    "True-plain-{}", "True-accumulate-{'algorithm': 'oktopk'}", "True-zero_to_zeros-{'dense_below_numel': 200}"
)
@pytest.mark.parametrize("changes", [{}, {"algorithm": "oktopk"}, {"dense_below_numel": 200}], ids=str)
@pytest.mark.parametrize("loop", [plain, zero_to_zeros, accumulate], ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("view", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_unused_parameters(workers: WorkerPools, changes: dict[str, Any], loop: Any, view: bool) -> None:
    """DDP does not apply the result for a parameter that nobody used, so it returns to the residuals."""
    run = partial(conserve, model=Sometimes, find_unused_parameters=True, gradient_as_bucket_view=view)
    check(workers(3).run(run, replace(CONFIG, density=0.3, **changes), loop, 9))


def never_zero(rank: int, world_size: int) -> str:
    """Gradients of an earlier step are still there when nobody uses their parameters."""
    pair = Pair.of(rank, world_size, CONFIG, Sometimes, find_unused_parameters=True)
    pair.ours(pair.seed(0)).backward()
    message = message_of(lambda: pair.ours(pair.seed(1)).backward())
    pair.state.close()
    return message


def test_stale_gradients_of_unused_parameters_are_refused(workers: WorkerPools) -> None:
    for message in workers(2).run(never_zero):
        assert "call zero_grad() for all parameters of the model" in message


# -- the same as the algorithm on whole vectors -----------------------------------------------------------------------


def against_the_fabric(rank: int, world_size: int, algorithm: Any, momentum: float | None) -> list[str]:
    """Where the model's gradients differ from those of the algorithm, run for all ranks in this process."""
    pair = Pair.of(rank, world_size, replace(CONFIG, algorithm=algorithm, wire="compact", momentum=momentum))
    parameters = list(pair.ours.module.parameters())
    kept = [[torch.zeros(p.numel()) for p in parameters] for _ in range(world_size)]  # per rank, per parameter
    velocities = copy.deepcopy(kept)
    sums: dict[Any, SparseSum] = {}
    problems = []
    for step in range(6):
        groups = [group.members for group in pair.state._grouping.groups]
        pair.ours.zero_grad()
        pair.ours(pair.seed(step)).backward()
        fresh = [gradients_of(pair.plain.module, 17 * step + other + 1) for other in range(world_size)]
        for members in groups:
            numels = [parameters[i].numel() for i in members]
            k = max(1, round(CONFIG.density * sum(numels)))
            sparsity = Sparsity(algorithm, k, EntryCodec("compact", torch.float32))
            results: dict[int, Any] = {}
            exchanges, residuals = [], []
            for other in range(world_size):
                key = step > 0, members, other  # groups are formed anew after the first backward
                sums.setdefault(key, SparseSum(sparsity, sum(numels), other, world_size))
                residuals.append(torch.cat([kept[other][i] for i in members]))
                for i in members:
                    velocities[other][i].mul_(momentum or 0.0).add_(fresh[other][i])  # v = m v + g
                gradient = torch.cat([velocities[other][i] for i in members])
                exchanges.append(returning(sums[key].run(residuals[-1], gradient), results, other))
            run_on_fabric(exchanges)
            mean, sent = torch.zeros(sum(numels)), torch.zeros(sum(numels), dtype=torch.bool)
            sent[results[0].indices] = True
            mean[results[0].indices] = results[0].values / world_size
            for i, part in zip(members, mean.split(numels), strict=True):
                gradient = parameters[i].grad
                if gradient is None or not torch.equal(gradient.flatten(), part):
                    problems.append(f"step {step}, parameter {i}")
            for other, residual in enumerate(residuals):
                for i, part, gone in zip(members, residual.split(numels), sent.split(numels), strict=True):
                    kept[other][i] = part.clone()
                    velocities[other][i][gone] = 0.0  # momentum factor masking
    num_groups = len(pair.state._grouping.groups)
    pair.state.close()
    return problems if num_groups > 2 else ["there were too few groups"]


@pytest.mark.quick("3-*-None", "2-spardl-0.5")
@pytest.mark.parametrize(
    ("algorithm", "momentum"), [("spardl", None), ("spardl", 0.5), ("topka", None), ("oktopk", None), ("oktopk", 0.5)]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_to_the_algorithm_on_whole_vectors(
    workers: WorkerPools, world_size: int, algorithm: str, momentum: float | None
) -> None:
    for problems in workers(world_size).run(against_the_fabric, algorithm, momentum):
        assert problems == []


class WithNothing(WholeNumbers):
    """One of its parameters has no elements, and follows one that fills a group by itself."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, seed: int) -> Tensor:
        return super().forward(seed) + self.nothing.sum()


@pytest.mark.parametrize("changes", [{}, {"density": 1.0}, DENSE, {"group_mb": 1e-6}], ids=str)
def test_parameters_without_elements(workers: WorkerPools, changes: dict[str, Any]) -> None:
    run = partial(conserve, model=WithNothing)
    check(workers(2).run(run, replace(CONFIG, **changes), plain, 4), keeps=changes in ({}, {"group_mb": 1e-6}))


# -- gradients that are not finite ------------------------------------------------------------------------------------


def spoil(rank: int, world_size: int, on_nonfinite: Any, scaled: bool) -> dict[str, Any]:
    """A step in which one gradient of one rank is not finite."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(WholeNumbers(world_size), bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0, momentum=0.5, weight_decay=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000, enabled=scaled)
    state = TopKState(ddp, replace(CONFIG, on_nonfinite=on_nonfinite), scaler=scaler)
    ddp.register_comm_hook(state, topk_hook)
    found: dict[str, Any] = {"changed": [], "error": "", "scales": []}
    for step in range(6):
        optimizer.zero_grad()
        loss = ddp(17 * step + rank + 1)
        if step == 3 and rank == world_size - 1:
            loss = loss + float("nan") * ddp.module.layers[7].weight.sum()
        before = [p.detach().clone() for p in ddp.parameters()]
        try:
            scaler.scale(loss).backward()
        except RuntimeError as error:
            found["error"] = str(error)
            break
        scaler.step(optimizer)
        scaler.update()
        found["scales"].append(scaler.get_scale())
        found["changed"].append(any(not torch.equal(b, p) for b, p in zip(before, ddp.parameters(), strict=True)))
    saved = state.state_dict()
    found["finite"] = all(torch.isfinite(values).all() for values in (*saved["residual"].values(), *ddp.parameters()))
    found["skipped"] = state.stats().skipped_steps
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(everyone, flat)
    found["agree"] = all(torch.equal(flat, other) for other in everyone)
    state.close()
    return found


@pytest.mark.quick("scaled-3", "scaler disabled-2")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("scaled", [False, True], ids=["scaler disabled", "scaled"])
def test_all_ranks_skip_together(workers: WorkerPools, world_size: int, scaled: bool) -> None:
    for found in workers(world_size).run(spoil, "skip", scaled):
        assert found["changed"] == [True, True, True, False, True, True]
        assert found["finite"] and found["agree"] and found["skipped"] == 1
        assert found["scales"] == ([8.0, 8.0, 8.0, 4.0, 4.0, 4.0] if scaled else [1.0] * 6)


def test_all_ranks_raise_together(workers: WorkerPools) -> None:
    for found in workers(3).run(spoil, "raise", False):
        assert "not finite on ranks [2]" in found["error"] and found["finite"] and found["agree"]


def overflow(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    state = TopKState(ddp, CONFIG)
    ddp.register_comm_hook(state, topk_hook)
    message = message_of(lambda: ddp(torch.tensor([[3e38]])).sum().backward())
    state.close()
    return message


def test_sums_that_are_not_finite_are_told_on_all_ranks(workers: WorkerPools) -> None:
    pool = workers(2)
    for message in pool.run(overflow):
        assert "finite on every rank, and their sum over the ranks is not" in message
    pool.end()


def scaled_loop(scaler: torch.amp.GradScaler, pair: Pair, step: int) -> None:
    (ddp, optimizer), (twin, twins_optimizer) = pair.sides()
    optimizer.zero_grad()
    scaler.scale(ddp(pair.seed(step))).backward()
    scaler.step(optimizer)
    scaler.update()
    twins_optimizer.zero_grad()
    twin(pair.seed(step)).backward()
    twins_optimizer.step()


def conserve_scaled(rank: int, world_size: int, changes: dict[str, Any]) -> tuple[float, bool, float, int]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)  # it grows twice
    pair = Pair.of(rank, world_size, replace(CONFIG, **changes))
    pair.state._scaler = scaler
    for step in range(6):
        scaled_loop(scaler, pair, step)
    assert scaler.get_scale() == 16.0
    kept = sum(float(values.abs().sum()) for values in pair.residuals().values())
    result = pair.gap(), pair.replicas_agree(), kept, pair.state.stats().num_groups
    pair.state.close()
    return result


@pytest.mark.parametrize("changes", [{}, {"dense_below_numel": 200}, {"node_size": 2}], ids=str)
def test_residuals_are_kept_without_the_scale(workers: WorkerPools, changes: dict[str, Any]) -> None:
    check(workers(4 if "node_size" in changes else 2).run(conserve_scaled, changes))


class Half(nn.Module):
    """A bfloat16 model."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)).bfloat16()

    def forward(self, seed: int) -> Tensor:
        values = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
        return self.layers(values).float().square().mean() * (float("nan") if seed == 54 else 1.0)  # step 3, rank 2


def train_half(rank: int, world_size: int, changes: dict[str, Any]) -> tuple[int, bool, bool]:
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Half(world_size))
    state = TopKState(ddp, replace(CONFIG, wire="compact", **changes))
    ddp.register_comm_hook(state, topk_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        ddp(17 * step + rank + 1).backward()
        optimizer.step()
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    everyone = [torch.empty_like(flat) for _ in range(world_size)]
    dist.all_gather(everyone, flat)
    skipped = state.stats().skipped_steps
    kept = state.state_dict()["residual"].values()
    state.close()
    same = all(torch.equal(flat, other) for other in everyone)
    return skipped, same, all(values.dtype == torch.float32 and torch.isfinite(values).all() for values in kept)


@pytest.mark.parametrize("changes", [
    {}, {"momentum": 0.5, "dense_below_numel": 100}, {"dense_below_numel": 100},
    {"warmup_steps": 5, "warmup_density": 1.0}, {"node_size": 2, "momentum": 0.5, "dense_below_numel": 100},
], ids=lambda changes: "-".join(changes))  # fmt: skip
def test_sixteen_bits(workers: WorkerPools, changes: dict[str, Any]) -> None:
    for skipped, same, kept in workers(4 if "node_size" in changes else 3).run(train_half, changes):
        assert skipped == 1 and same and kept


# -- momentum correction ----------------------------------------------------------------------------------------------


def with_momentum(rank: int, world_size: int, changes: dict[str, Any]) -> float:
    """How far momentum correction is from the optimizer's own momentum."""
    pair = Pair.of(rank, world_size, replace(CONFIG, momentum=0.5, **changes))
    theirs = torch.optim.SGD(pair.plain.parameters(), lr=1.0, momentum=0.5)
    for step in range(6):
        for ddp, optimizer in ((pair.ours, pair.optimizers[0]), (pair.plain, theirs)):
            optimizer.zero_grad()
            ddp(pair.seed(step)).backward()
            optimizer.step()
    gap = max(float((a - b).abs().max()) for a, b in zip(pair.ours.parameters(), pair.plain.parameters(), strict=True))
    assert pair.replicas_agree()
    pair.state.close()
    return gap


def test_momentum_correction(workers: WorkerPools) -> None:
    """Where everything travels it is plain momentum; where little does, something else."""
    for changes, same in (({"density": 1.0}, True), ({"dense_below_numel": 10**9}, True), ({}, False)):
        for gap in workers(2).run(with_momentum, changes):
            assert (gap < 1e-3) == same, changes
    assert workers(1).run(with_momentum, {}) == [0.0], "one rank has nobody to leave it to"


def skip_with_momentum(rank: int, world_size: int) -> list[str]:
    """Where the velocity is not what a step that all skip should leave."""
    pair = Pair.of(rank, world_size, replace(CONFIG, momentum=0.5))
    for step in range(3):
        plain(pair, step)
    before = pair.state.state_dict()["velocity"]
    fresh = gradients_of(pair.plain.module, pair.seed(3))
    pair.ours.zero_grad()
    spoilt = rank == world_size - 1
    (pair.ours(pair.seed(3)) * (float("nan") if spoilt else 1.0)).backward()
    after = pair.state.state_dict()["velocity"]
    skipped = pair.state.stats().skipped_steps
    pair.state.close()
    names = [name for name, _ in pair.ours.module.named_parameters()]
    expected = {
        name: before[name] if spoilt else 0.5 * before[name] + gradient.view(before[name].shape)
        for name, gradient in zip(names, fresh, strict=True)
    }
    return [name for name in names if not torch.equal(after[name], expected[name])] + ["skipped"] * (skipped - 1)


def test_a_skipped_step_keeps_momentum(workers: WorkerPools) -> None:
    """Also of entries that had been sent."""
    assert workers(2).run(skip_with_momentum) == [[], []]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def resume(rank: int, world_size: int, changes: dict[str, Any], before: int, after: int) -> bool:
    """True if stopping and going on ends in the same bits."""
    config = replace(CONFIG, **changes)
    straight = Pair.of(rank, world_size, config)
    for step in range(before + after):
        plain(straight, step)
    first = Pair.of(rank, world_size, config)
    for step in range(before):
        plain(first, step)
    saved, weights = copy.deepcopy(first.state.state_dict()), copy.deepcopy(first.ours.module.state_dict())
    first.state.close()
    second = Pair.of(rank, world_size, config)
    second.ours.module.load_state_dict(weights)
    second.state.load_state_dict(saved)
    for step in range(before, before + after):
        plain(second, step)
    ends = [list(pair.ours.parameters()) for pair in (straight, second)]
    same = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    for kind in ("residual", "velocity"):
        ours, theirs = straight.state.state_dict()[kind], second.state.state_dict()[kind]
        same &= ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    straight.state.close()
    second.state.close()
    return same


@pytest.mark.quick("spardl-3")
@pytest.mark.parametrize("before", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("changes", [
    {}, {"teams": 2, "sag": "b"}, {"algorithm": "oktopk"}, {"momentum": 0.5, "warmup_steps": 5},
    {"algorithm": "oktopk", "warmup_steps": 5}, {"teams": 2, "sag": "b", "warmup_steps": 5},
    {"dense_below_numel": 200, "momentum": 0.5}, {"algorithm": "oktopk", "momentum": 0.5, "node_size": 2},
], ids=lambda changes: "-".join(changes) or "spardl")  # fmt: skip
def test_resuming_ends_in_the_same_bits(workers: WorkerPools, changes: dict[str, Any], before: int) -> None:
    assert all(workers(4).run(resume, changes, before, 4))


def save(rank: int, world_size: int, changes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    pair = Pair.of(rank, world_size, replace(CONFIG, **changes))
    for step in range(4):
        plain(pair, step)
    result = pair.state.state_dict(), pair.residuals()
    pair.state.close()
    return result


def load(rank: int, world_size: int, saved: list[dict[str, Any]], changes: dict[str, Any]) -> dict[str, Tensor]:
    pair = Pair.of(rank, world_size, replace(CONFIG, **changes))
    pair.state.load_state_dict(saved)
    total = pair.residuals()
    before = [p.detach().clone() for p in pair.ours.parameters()]
    for step in range(4, 6):
        plain(pair, step)
    after = pair.residuals()
    for (name, p), q, old in zip(
        pair.ours.module.named_parameters(), pair.plain.module.parameters(), before, strict=True
    ):  # the plain one has begun where ours had: what has been applied since, and what is kept, is all there was
        assert torch.equal(world_size * (old.double() - p.double()) + after[name], world_size * (old - q) + total[name])
    assert pair.replicas_agree()
    pair.state.close()
    return total


@pytest.mark.quick("sparse-3-2", "auto-3-1")
@pytest.mark.parametrize(("before", "after"), [(3, 2), (3, 4), (3, 1), (1, 3)])
@pytest.mark.parametrize("changes", [{}, {"density": 1.0}, {"algorithm": "auto"}], ids=["sparse", "dense", "auto"])
def test_to_another_number_of_ranks_the_mean_owes_the_same(
    workers: WorkerPools, before: int, after: int, changes: dict[str, Any]
) -> None:
    outcomes = workers(before).run(save, {})
    states, total = [state for state, _ in outcomes], outcomes[0][1]
    if before == 1:
        assert not any(values.any() for values in total.values()), "on one rank nothing is left out"
        workers(after).run(load, states, changes)
        return
    for found in workers(after).run(load, states, changes):
        assert found.keys() == total.keys() and any(values.any() for values in total.values())
        assert all(torch.equal(found[name] / after, total[name] / before) for name in total)


def load_wrongly(rank: int, world_size: int) -> list[str]:
    pair = Pair.of(rank, world_size, CONFIG)
    plain(pair, 0)
    saved = pair.state.state_dict()
    everyones: list[Any] = [None] * world_size
    dist.all_gather_object(everyones, saved)
    wrong: list[Any] = [
        {**saved, "rank": 1 - rank},
        {**saved, "world_size": 5},
        [saved, saved],
        [],
        {"rank": rank},
        {**saved, "residual": {"elsewhere": torch.zeros(1)}},
        {**saved, "residual": {**saved["residual"], "layers.0.weight": torch.zeros(5)}},
        {**saved, "step": rank},
        {**saved, "order": saved["order"][1:]},
        saved if rank == 0 else everyones,
    ]
    messages = []
    for state in wrong:
        try:
            pair.state.load_state_dict(state)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    pair.state.close()
    return messages


def test_states_that_do_not_fit_are_refused(workers: WorkerPools) -> None:
    expected = [
        "was given the state of rank", "pass the states of all", "each once, got those of",
        "there is no state", "it lacks", "which the model has not", "has shape (5,)", "step is",
        "the state is of other parameters", "what is loaded is",
    ]  # fmt: skip
    for messages in workers(2).run(load_wrongly):
        for message, part in zip(messages, expected, strict=True):
            assert part in message, (message, part)


def load_what_was_chosen(rank: int, world_size: int, changes: dict[str, Any]) -> list[str]:
    """Return the algorithms in use after loading a state in which dense sums had been chosen."""
    pair = Pair.of(rank, world_size, replace(CONFIG, **changes))
    plain(pair, 0)
    saved = pair.state.state_dict()
    saved["chosen"] = [["dense", 1, "r"]] * len(saved["memories"])
    pair.state.load_state_dict(saved)
    plain(pair, 1)
    used = {pair.state._chooser.variant_of(group, 9).name for group in range(len(saved["chosen"]))}
    pair.state.close()
    return sorted(used)


@pytest.mark.parametrize(
    ("changes", "used"), [({"algorithm": "auto"}, "dense"), ({}, "spardl"), ({"algorithm": "topka"}, "topka")]
)
def test_a_choice_that_is_excluded_now_is_not_taken_over(
    workers: WorkerPools, changes: dict[str, Any], used: str
) -> None:
    assert workers(2).run(load_what_was_chosen, changes) == [[used]] * 2


# -- choosing ---------------------------------------------------------------------------------------------------------


def choose(rank: int, world_size: int, changes: dict[str, Any]) -> tuple[Any, float, bool]:
    pair = Pair.of(rank, world_size, replace(CONFIG, **changes))
    for step in range(29):
        plain(pair, step)
        if step in (9, 28):  # in the middle of the trials, and after them
            pair.state.load_state_dict(copy.deepcopy(pair.state.state_dict()))
    plain(pair, 29)
    result = pair.state._chooser.chosen, pair.gap(), pair.replicas_agree()
    pair.state.close()
    return result


@pytest.mark.slow
@pytest.mark.quick("changes0")
@pytest.mark.parametrize("changes", [
    {"algorithm": "auto"}, {"teams": "auto"}, {"algorithm": "auto", "teams": "auto"},
    {"algorithm": "auto", "node_size": 2},
])  # fmt: skip
def test_all_ranks_choose_the_same(workers: WorkerPools, changes: dict[str, Any]) -> None:
    outcomes = workers(4).run(choose, changes)
    for chosen, gap, agree in outcomes:
        assert chosen is not None and chosen == outcomes[0][0] and gap == 0.0 and agree
        assert all(variant.teams < 4 for variant in chosen)
