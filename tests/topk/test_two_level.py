"""Two levels: sums of nodes' sums, on the in-process fabric and between processes.

Prevents: gradients that are lost or counted twice between a node's ranks; residuals that another local rank forgets
when groups, ranks or nodes change; and traffic between nodes that is not sparse.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Generator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import TopKConfig, TopKState, topk_hook
from ddp_hooks.comm import Nodes, Partition, Round, Send, among, run_on_fabric, sum_within_node
from ddp_hooks.sparse import SparseSum, SparseVector, Sparsity, range_counts, sum_between_nodes
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.common import even_bounds
from tests.support.messages import message_of
from tests.support.topk import forward
from tests.support.topk.algorithms import returning, teams_of
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
)
from tests.support.workers import WorkerPools

NODES = replace(CONFIG, node_size=2)

# -- sums of vectors, on the fabric -----------------------------------------------------------------------------------


@st.composite
def jobs(draw: Any) -> tuple[int, int, tuple[int, ...], int, Any, int]:
    """Numbers of nodes and of their ranks, bounds of ranges, entries, an algorithm with its teams, a seed."""
    num_nodes, size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    bounds = (0, *itertools.accumulate(draw(st.lists(st.integers(0, 40), min_size=size, max_size=size))))
    spardl = [("spardl", teams, sag) for teams, sag in teams_of(num_nodes)]
    others = [(name, 1, "r") for name in ("topka", "topkdsa", "gtopk", "oktopk")]
    k = draw(st.integers(1, max(1, bounds[-1])))
    return num_nodes, size, bounds, k, draw(st.sampled_from(spardl + others)), draw(st.integers(0, 10_000))


def both_levels(
    summation: SparseSum, residual: Tensor, vector: Tensor, bounds: tuple[int, ...], nodes: Nodes, sent_bytes: list[int]
) -> Generator[Round, None, tuple[SparseVector, SparseVector]]:
    """All steps of one rank, which counts the bytes that it sends to other nodes."""
    yield from sum_within_node([[each] for each in Partition(vector, bounds).ranges], nodes)
    own = vector[bounds[nodes.local_rank] : bounds[nodes.local_rank + 1]]
    algorithm = sum_between_nodes(summation, residual, own, bounds, nodes)
    while True:
        try:
            exchanges = next(algorithm)
        except StopIteration as end:
            result: tuple[SparseVector, SparseVector] = end.value
            return result
        leaving = [e for e in exchanges if isinstance(e, Send) and e.peer not in nodes.members]
        sent_bytes[nodes.rank] += sum(exchange.tensor.nbytes for exchange in leaving)
        yield exchanges


@pytest.mark.parametrize(("format", "whole"), [("exact", True), ("compact", True), ("compact", False)])
@given(jobs())
@settings(max_examples=20, deadline=None)
def test_ranges_are_summed_between_nodes(format: Any, whole: bool, job: Any) -> None:
    """As by the algorithm on one level, with the nodes' sums, range by range, in several steps."""
    num_nodes, size, bounds, k, (name, teams, sag), seed = job
    world_size, numel, generator = num_nodes * size, bounds[-1], torch.Generator().manual_seed(seed)
    counts, ranges = range_counts(k, bounds), [slice(*pair) for pair in itertools.pairwise(bounds)]
    dtype = torch.float64 if whole else torch.float32
    places = [Nodes(world_size, rank, size) for rank in range(world_size)]

    def sum_of(place: Nodes) -> SparseSum:
        own = bounds[place.local_rank + 1] - bounds[place.local_rank]
        sparsity = Sparsity(name, counts[place.local_rank], EntryCodec(format, dtype), teams, sag)
        return SparseSum(sparsity, own, place.node, num_nodes)

    ours, theirs = [sum_of(place) for place in places], [sum_of(place) for place in places]
    residuals = [torch.zeros(numel, dtype=dtype)[ranges[place.local_rank]] for place in places]
    expected_residuals = copy.deepcopy(residuals)
    total, applied = torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype)
    for _ in range(3):
        gradients = [torch.randn(numel, generator=generator, dtype=dtype) * 9 for _ in places]
        gradients = [gradient.round() for gradient in gradients] if whole else gradients
        by_node = [gradients[first : first + size] for first in range(0, world_size, size)]
        sums = [sum(others, first) for first, *others in by_node]
        total += sum(sums)
        results: dict[int, Any] = {}
        sent_bytes = [0] * world_size
        run_on_fabric([
            returning(both_levels(ours[r], residuals[r], gradients[r].clone(), bounds, place, sent_bytes), results, r)
            for r, place in enumerate(places)
        ])  # fmt: skip
        parts = []
        for local in range(size):
            found: dict[int, SparseVector] = {}
            peers = range(local, world_size, size)
            if bounds[local + 1] > bounds[local]:
                one_level = [
                    returning(theirs[peer].run(expected_residuals[peer], sums[node][ranges[local]]), found, node)
                    for node, peer in enumerate(peers)
                ]
                traffic = run_on_fabric(one_level)
                assert [sent_bytes[peer] for peer in peers] == [each.sent_bytes for each in traffic]
                assert all(torch.equal(results[peer][0].indices, found[0].indices) for peer in peers)
                assert all(torch.equal(results[peer][0].values, found[0].values) for peer in peers)
                parts.append(found[0].shifted(bounds[local]))
        for _, everything in results.values():
            assert torch.equal(everything.indices, torch.cat([part.indices for part in parts] or [torch.empty(0)]))
            assert torch.equal(everything.values, torch.cat([part.values for part in parts] or [torch.empty(0)]))
        applied[results[0][1].indices] += results[0][1].values
        assert all(torch.equal(a, b) for a, b in zip(residuals, expected_residuals, strict=True))
    if whole:
        for place, residual in zip(places, residuals, strict=True):
            applied[ranges[place.local_rank]] += residual
        assert torch.equal(applied, total)


@given(st.integers(0, 300), st.lists(st.integers(0, 40), min_size=1, max_size=9))
def test_counts_of_ranges_add_up(k: int, lengths: list[int]) -> None:
    bounds = (0, *itertools.accumulate(lengths))
    counts = range_counts(min(k, bounds[-1]), bounds)
    assert all(min(1, length) <= count <= length for count, length in zip(counts, lengths, strict=True))
    assert min(k, bounds[-1]) <= sum(counts) <= min(k, bounds[-1]) + len(lengths)
    even = even_bounds(1000, len(lengths))
    assert sum(range_counts(100 + k, even)) == 100 + k


def test_algorithms_run_among_some_ranks() -> None:
    vectors = [torch.full((3,), float(rank)) for rank in range(5)]
    nodes = [Nodes(2, place, 2) for place in range(2)]
    ranges = [[[values[:1]], [values[1:]]] for values in (vectors[4], vectors[1])]
    pair = [among((4, 1), sum_within_node(ranges[place], nodes[place])) for place in range(2)]
    run_on_fabric([iter(()), pair[1], iter(()), iter(()), pair[0]])  # type: ignore[list-item]
    assert vectors[4].tolist() == [5, 4, 4] and vectors[1].tolist() == [1, 5, 5]


# -- the hook, between processes --------------------------------------------------------------------------------------


def everywhere() -> list[Any]:
    """Every algorithm, with its teams of nodes."""
    cases = []
    for world_size, node_size in ((4, 2), (6, 2), (6, 3), (8, 2)):
        for changes in ALGORITHMS:
            if world_size // node_size % changes.get("teams", 1) == 0:
                name = f"{world_size}-{node_size}-{'-'.join(map(str, changes.values()))}"
                marks = [pytest.mark.slow] if world_size > 4 else []
                cases.append(pytest.param(world_size, node_size, changes, marks=marks, id=name))
    return cases


@pytest.mark.quick("4-2-2-b")
@pytest.mark.parametrize(("world_size", "node_size", "changes"), everywhere())
def test_nothing_is_lost(workers: WorkerPools, world_size: int, node_size: int, changes: dict[str, Any]) -> None:
    pool = workers(world_size)
    check(pool.run(conserve, replace(CONFIG, node_size=node_size, **changes), plain, 6))
    if world_size > 4:
        pool.end()  # large pools are used once


def regroup(pair: Pair, step: int) -> None:
    """A tuner's change of groups."""
    if step:
        pair.state._grouping.apply(0.01 * (1 + step % 3))
    plain(pair, step)


@pytest.mark.parametrize(("changes", "loop"), [
    ({"dense_below_numel": 200}, accumulate), ({"warmup_steps": 4, "warmup_density": 1.0}, plain),
    ({"density": 1e-9, "wire": "compact"}, plain), ({}, regroup),
], ids=lambda each: getattr(each, "__name__", str(each)))  # fmt: skip
def test_settings(workers: WorkerPools, changes: dict[str, Any], loop: Any) -> None:
    check(workers(4).run(conserve, replace(NODES, **changes), loop, 6))


def test_everything_is_plain_ddp(workers: WorkerPools) -> None:
    check(workers(4).run(conserve, replace(NODES, density=1.0), accumulate, 4), keeps=False)


@pytest.mark.parametrize("changes", [{}, {"dense_below_numel": 200}], ids=str)
def test_unused_parameters(workers: WorkerPools, changes: dict[str, Any]) -> None:
    run = partial(conserve, model=Sometimes, find_unused_parameters=True)
    check(workers(4).run(run, replace(NODES, density=0.3, **changes), plain, 9))


def against_the_twin(rank: int, world_size: int, changes: dict[str, Any]) -> list[str]:
    """Where gradients and residuals differ from those of the algorithm on one level, with nodes' sums as gradients."""
    config = replace(NODES, **changes)
    pair, momentum = Pair.of(rank, world_size, config), config.momentum or 0.0
    names, parameters = zip(*pair.ours.module.named_parameters(), strict=True)
    size, num_nodes = 2, world_size // 2
    kept = [[torch.zeros(p.numel()) for p in parameters] for _ in range(num_nodes)]  # per node, per parameter
    velocities = copy.deepcopy(kept)
    sums: dict[Any, SparseSum] = {}
    problems = []
    for step in range(5):
        groups = list(pair.state._grouping.groups)
        pair.ours.zero_grad()
        pair.ours(pair.seed(step)).backward()
        fresh = [gradients_of(pair.plain.module, 17 * step + other + 1) for other in range(world_size)]
        for node, of_node in enumerate(velocities):
            for i, velocity in enumerate(of_node):
                velocity.mul_(momentum).add_(fresh[size * node][i] + fresh[size * node + 1][i])
        for group in groups:
            members, means = group.members, {i: torch.zeros(parameters[i].numel()) for i in group.members}
            cuts = [{i: slice(*even_bounds(p.numel(), size)[part : part + 2]) for i, p in enumerate(parameters)}
                    for part in range(size)]  # fmt: skip
            lengths = [sum(cut[i].stop - cut[i].start for i in members) for cut in cuts]
            counts = range_counts(max(1, round(config.density_at(step) * sum(lengths))), (0, lengths[0], sum(lengths)))
            for part, cut in enumerate(cuts):
                vectors = [torch.cat([v[i][cut[i]] for i in members]) for v in velocities]
                residuals = [torch.cat([r[i][cut[i]] for i in members]) for r in kept]
                if group.is_dense:
                    mean, sent = torch.stack(vectors).sum(0) / world_size, torch.zeros(lengths[part], dtype=torch.bool)
                else:
                    sparsity = Sparsity("spardl", counts[part], EntryCodec("exact", torch.float32))
                    results: dict[int, Any] = {}
                    exchanges = []
                    for node in range(num_nodes):
                        one = sums.setdefault(
                            (step > 0, members, part, node), SparseSum(sparsity, lengths[part], node, num_nodes)
                        )
                        exchanges.append(returning(one.run(residuals[node], vectors[node]), results, node))
                    run_on_fabric(exchanges)
                    mean, sent = torch.zeros(lengths[part]), torch.zeros(lengths[part], dtype=torch.bool)
                    sent[results[0].indices] = True
                    mean[results[0].indices] = results[0].values / world_size
                splits = [cut[i].stop - cut[i].start for i in members]
                for i, values, gone in zip(members, mean.split(splits), sent.split(splits), strict=True):
                    means[i][cut[i]] = values
                    for node in range(num_nodes):
                        velocities[node][i][cut[i]] *= ~gone
                for node, residual in enumerate(residuals):
                    for i, values in zip(members, residual.split(splits), strict=True):
                        kept[node][i][cut[i]] = values
            for i, mean in means.items():
                gradient = parameters[i].grad
                if gradient is None or not torch.equal(gradient.flatten(), mean):
                    problems.append(f"step {step}, gradient of {names[i]}")
    state = pair.state.state_dict()
    for kind, expected in (("residual", kept), ("velocity", velocities)):
        for i, p in enumerate(parameters):
            own = slice(*even_bounds(p.numel(), size)[rank % size : rank % size + 2])
            saved = state[kind].get(names[i])
            if saved is not None and not torch.equal(saved.flatten()[own], expected[rank // size][i][own]):
                problems.append(f"{kind} of {names[i]}")
    assert len(groups) > 2 and len(state["residual"]) > 2
    pair.state.close()
    return problems


@pytest.mark.parametrize("changes", [{}, {"momentum": 0.5, "dense_below_numel": 200}], ids=str)
def test_equal_to_the_algorithm_with_nodes_for_ranks(workers: WorkerPools, changes: dict[str, Any]) -> None:
    for problems in workers(4).run(against_the_twin, changes):
        assert problems == []


def test_the_next_forward(workers: WorkerPools) -> None:
    for same, updates in workers(4).run(forward.outcomes, forward.plain, replace(forward.CONFIG, node_size=2)):
        assert same and updates > 5


# -- gradients that are not finite ------------------------------------------------------------------------------------


def skip(rank: int, world_size: int, changes: dict[str, Any]) -> tuple[list[str], int]:
    """Return the parameters whose residuals are not what a skipped step should leave, and the skipped steps."""
    pair = Pair.of(rank, world_size, replace(NODES, **changes))
    for step in range(3):
        plain(pair, step)
    before = pair.residuals()
    fresh = gradients_of(pair.plain.module, pair.seed(3))
    spoilt = rank == world_size - 1
    pair.ours.zero_grad()
    (pair.ours(pair.seed(3)) * (float("nan") if spoilt else 1.0)).backward()
    after = pair.residuals()
    wrong = []
    for (name, old), gradient in zip(before.items(), fresh, strict=True):
        finite = gradient.double() * (not spoilt)
        dist.all_reduce(finite)
        if not torch.equal(after[name], old + finite.view(old.shape)):
            wrong.append(name)
    skipped = pair.state.stats().skipped_steps
    plain(pair, 4)
    assert pair.replicas_agree()
    pair.state.close()
    return wrong, skipped


def test_a_skipped_step_keeps_finite_gradients(workers: WorkerPools) -> None:
    assert workers(4).run(skip, {}) == [([], 1)] * 4


def overflow(rank: int, world_size: int) -> str:
    """All elements are in the range of the second local ranks."""
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    state = TopKState(ddp, NODES)
    ddp.register_comm_hook(state, topk_hook)
    message = message_of(lambda: ddp(torch.tensor([[3e38]])).sum().backward())
    state.close()
    return message


def test_sums_that_are_not_finite_are_told_on_all_ranks(workers: WorkerPools) -> None:
    pool = workers(4)
    for message in pool.run(overflow):
        assert "finite on every rank, and their sum over the ranks is not" in message
    pool.end()


# -- states -----------------------------------------------------------------------------------------------------------


def save(rank: int, world_size: int, config: TopKConfig) -> tuple[dict[str, Any], dict[str, Tensor]]:
    pair = Pair.of(rank, world_size, config)
    for step in range(4):
        plain(pair, step)
    result = pair.state.state_dict(), pair.residuals()
    pair.state.close()
    return result


def load(rank: int, world_size: int, saved: list[dict[str, Any]], config: TopKConfig) -> dict[str, Tensor]:
    """Return the residuals' sum; after two more steps nothing of it is lost."""
    pair = Pair.of(rank, world_size, config)
    pair.state.load_state_dict(saved)
    total, before = pair.residuals(), [p.detach().clone() for p in pair.ours.parameters()]
    for step in range(4, 6):
        plain(pair, step)
    after, ours = pair.residuals(), pair.ours.module.named_parameters()
    for (name, p), q, old in zip(ours, pair.plain.module.parameters(), before, strict=True):
        applied = world_size * (old.double() - p.double())
        assert torch.equal(applied + after[name], world_size * (old - q) + total[name])
    assert pair.replicas_agree()
    pair.state.close()
    return total


def test_other_ranks_and_nodes_take_over_all_residuals(workers: WorkerPools) -> None:
    everything = replace(NODES, density=1.0)
    for num_saved, saved, loads in (
        (4, NODES, [(4, CONFIG), (4, NODES), (2, CONFIG)]), (4, CONFIG, [(4, NODES)]), (3, CONFIG, [(4, everything)]),
    ):  # fmt: skip
        outcomes = workers(num_saved).run(save, saved)
        states, total = [state for state, _ in outcomes], outcomes[0][1]
        assert any(values.any() for values in total.values())
        for num_loading, config in loads:
            for found in workers(num_loading).run(load, states, config):
                assert found.keys() == total.keys(), (num_saved, saved, num_loading, config)
                assert all(torch.equal(found[name] / num_loading, total[name] / num_saved) for name in total)


def load_with_other_nodes(rank: int, world_size: int) -> str:
    pair, other = Pair.of(rank, world_size, NODES), Pair.of(rank, world_size, CONFIG)
    plain(pair, 0)
    message = message_of(lambda: other.state.load_state_dict(pair.state.state_dict()))
    pair.state.close()
    other.state.close()
    return message


def test_a_state_of_other_nodes_is_refused(workers: WorkerPools) -> None:
    for message in workers(4).run(load_with_other_nodes):
        assert "saved with 2 ranks per node, and there are 1 now: pass the states of all ranks" in message


def found_nodes(rank: int, world_size: int, hosts: str) -> tuple[int, int]:
    """Ranks per node, by host name, and elements of all residuals."""
    with mock.patch("socket.gethostname", lambda: hosts[rank]):
        pair = Pair.of(rank, world_size, replace(CONFIG, node_size="auto"))
    for step in range(2):
        plain(pair, step)
    kept = [group.residual.numel() for group in pair.state._grouping.groups if group.residual is not None]
    pair.state.close()
    return pair.state._lanes.node_size, sum(kept)


def test_nodes_are_found_and_share_residuals(workers: WorkerPools) -> None:
    """The elements that a rank keeps are its share of the model."""
    whole = {kept for size, kept in workers(4).run(found_nodes, "aabc") if size == 1}
    assert len(whole) == 1
    outcomes = workers(4).run(found_nodes, "aabb")
    assert all(size == 2 for size, _ in outcomes) and sum(kept for _, kept in outcomes[:2]) == whole.pop()
    assert all(size == 1 for size, _ in workers(4).run(found_nodes, "aaaa"))
