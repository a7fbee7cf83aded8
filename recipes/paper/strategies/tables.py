"""Strategies for models with large embedding tables: EmbRace, and DDP with sparse gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_hooks.planning import Strategy
from ddp_hooks.planning.events import Process, Signal, SimulatedLane, Slice
from ddp_hooks.planning.network import all_to_all
from ddp_hooks.planning.simulation import Run
from ddp_hooks.planning.strategies.in_backward import DDP_HOOK_S, ddp_buckets, launcher
from recipes.paper.strategies.rounds import gathered

Scheduling = Literal["none", "horizontal", "2d"]


@dataclass(frozen=True)
class TableTraffic:
    """Bytes that the tables of one worker's step send."""

    tables: tuple[str, ...]  #: names of their tensors in the step's profile
    ids: float  #: of a batch
    lookup: float  #: vectors of the different ids of a batch
    rows: float  #: gradients of these vectors, added up by id
    raw_rows: float  #: gradients of all ids, not added up
    prior: float = 1.0  #: part of ``rows`` that some worker's next batch looks up (Algorithm 1)

    def __post_init__(self) -> None:
        if not self.tables:
            raise ValueError("tables must name at least one tensor of the step")
        if not 0 <= self.prior <= 1:
            raise ValueError(f"prior is a part of the rows, from 0 to 1, got {self.prior}")

    def split(self, run: Run) -> tuple[list[int], list[int]]:
        """Return the tables and the dense tensors, in the order of the backward."""
        names = [tensor.name for tensor in run.step.tensors]
        missing = set(self.tables) - set(names)
        if missing:
            raise ValueError(f"the step has no tensor {', '.join(sorted(missing))}")
        tables = [index for index in run.step.backward_order if names[index] in self.tables]
        return tables, [index for index in run.step.backward_order if names[index] not in self.tables]


def _alltoall(run: Run, num_bytes: float) -> list[Slice]:
    return [Slice(all_to_all(run.network.workers, run.network.node_size, num_bytes))]


def _all_gather(run: Run, num_bytes: float) -> list[Slice]:
    return [Slice(gathered(run.network.workers, run.network.node_size, num_bytes))]


def _backward_and_update(
    run: Run,
    tables: Sequence[int],
    dense_groups: Sequence[Sequence[int]],
    lanes: Sequence[SimulatedLane],
    table_lane: SimulatedLane,
    rows: list[Slice],
) -> Process:
    """Run a backward with DDP's all-reduces of dense groups, send the rows of all tables together, and update."""
    reduced: list[Signal] = []
    sent: list[Signal] = []

    def launch(number: int) -> None:
        slices = run.all_reduce(run.num_bytes(dense_groups[number]))
        reduced.append(lanes[number % len(lanes)].submit(slices, f"all-reduce of group {number}"))

    group_ready = launcher(dense_groups, launch)
    rows_ready = launcher([tables], lambda _: sent.append(table_lane.submit(rows, "rows of tables")))

    def ready(tensor: int) -> None:
        group_ready(tensor)
        rows_ready(tensor)

    yield from run.backward(ready, DDP_HOOK_S)
    yield from run.wait_all(reduced, "all-reduces")
    yield from run.wait_all(sent, "rows of tables")
    yield from run.optimizer()
    run.end_step()


@dataclass(frozen=True)
class EmbRace(Strategy):
    """Tables by columns; lookups and rows by AlltoAll (EmbRace, section III)."""

    traffic: TableTraffic
    #: With ``"none"`` everything is sent beside plain DDP, in the order of its making. With ``"horizontal"`` lookups go
    #: ahead, and dense layers by DeAR. With ``"2d"`` also prior rows go first, and delayed rows last.
    scheduling: Scheduling = "2d"
    bucket_mb: float = 5.0  #: of DDP
    lanes: int = 3  #: streams of communication
    slice_mb: float = 1.0  #: largest message of dense layers, in MiB

    @property
    def name(self) -> str:
        return f"EmbRace, {self.scheduling}"

    @property
    def line(self) -> str:
        return "tables = shard_embeddings(model, optimizer_class=...)"

    def train(self, run: Run) -> Process:
        tables, dense = self.traffic.split(run)
        groups = ddp_buckets(run, self.bucket_mb, dense)
        lookup = [*_all_gather(run, self.traffic.ids), *_alltoall(run, self.traffic.lookup)]
        if self.scheduling == "none":
            yield from self._train_beside_ddp(run, tables, groups, lookup)
        else:
            yield from self._train_scheduled(run, tables, groups, lookup)

    def _train_beside_ddp(
        self, run: Run, tables: Sequence[int], groups: Sequence[Sequence[int]], lookup: list[Slice]
    ) -> Process:
        lanes, (table_lane,) = run.lanes(2, window=1), run.lanes(1)
        rows = _alltoall(run, self.traffic.rows)
        while not run.is_over:
            yield from run.forward(dict.fromkeys(tables, table_lane.submit(lookup, "lookup")))
            yield from _backward_and_update(run, tables, groups, lanes, table_lane, rows)

    def _train_scheduled(
        self, run: Run, tables: Sequence[int], groups: Sequence[Sequence[int]], lookup: list[Slice]
    ) -> Process:
        """Send prior rows, lookups, dense groups in the order of the forward, then delayed rows (section IV)."""
        message_bytes = self.slice_mb * (1 << 20)
        lanes, (table_lane,) = run.lanes(self.lanes), run.lanes(1)
        prior = self.traffic.prior if self.scheduling == "2d" else 1.0
        prior_rows, delayed_rows = (_alltoall(run, self.traffic.rows * part) for part in (prior, 1 - prior))
        arrived: dict[int, Signal] = {}
        scattered: list[Signal] = []
        delayed: list[Signal] = []

        def launch(number: int) -> None:
            slices = run.collective("reduce-scatter", run.num_bytes(groups[number]), message_bytes)
            scattered.append(lanes[number % self.lanes].submit(slices, f"reduce-scatter of group {number}"))

        while not run.is_over:
            yield from run.forward(arrived)
            scattered.clear()
            yield from run.backward(launcher(groups, launch))
            first = table_lane.submit(prior_rows, "prior rows")
            yield from run.wait_all([*scattered, *delayed, first], "gradients")
            yield from run.optimizer(1 / run.network.workers)
            looked_up = table_lane.submit(lookup, "lookup")
            arrived = dict.fromkeys(tables, looked_up)
            gathers: list[Signal] = []
            for number, group in enumerate(reversed(groups)):
                slices = run.collective("all-gather", run.num_bytes(group), message_bytes)
                name = f"all-gather of group {number}"
                gathers.append(lanes[number % self.lanes].submit(slices, name, after=[looked_up]))
                arrived.update(dict.fromkeys(group, gathers[-1]))
            if prior < 1:
                delayed = [table_lane.submit(delayed_rows, "delayed rows", after=gathers)]
            run.end_step()


@dataclass(frozen=True)
class SparseDdp(Strategy):
    """Plain DDP with sparse gradients of tables: gloo gathers all rows of all workers."""

    traffic: TableTraffic
    bucket_mb: float = 25.0
    name = "DDP, sparse gradients"

    def train(self, run: Run) -> Process:
        tables, dense = self.traffic.split(run)
        groups = ddp_buckets(run, self.bucket_mb, dense)
        lanes = run.lanes(2, window=1)
        rows = _all_gather(run, self.traffic.raw_rows)
        while not run.is_over:
            yield from run.forward({})
            yield from _backward_and_update(run, tables, groups, lanes, lanes[0], rows)
