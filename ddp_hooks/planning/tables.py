"""Strategies for models whose gradients are mostly those of embedding tables: EmbRace, DDP with sparse gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ddp_hooks.planning.all_reduce import all_reduced_in_backward
from ddp_hooks.planning.events import Process, Signal, Slice
from ddp_hooks.planning.groups import Launcher, ddp_buckets
from ddp_hooks.planning.patterns import all_to_all, gathered
from ddp_hooks.planning.simulation import Run

Scheduling = Literal["none", "horizontal", "2d"]


@dataclass(frozen=True)
class TableTraffic:
    """What the tables of one worker's step send, in bytes.

    Args:
        tables: names of their tensors in the step's profile.
        ids: of a batch.
        lookup: vectors of the different ids of a batch.
        rows: gradients of these, added up by id.
        raw_rows: gradients of all ids, as they come.
        prior: part of ``rows`` that somebody's next batch looks up (Algorithm 1).
    """

    tables: tuple[str, ...]
    ids: float
    lookup: float
    rows: float
    raw_rows: float
    prior: float = 1.0

    def __post_init__(self) -> None:
        if not self.tables:
            raise ValueError("tables must name at least one tensor of the step")
        if not 0 <= self.prior <= 1:
            raise ValueError(f"prior is a part of the rows, from 0 to 1, got {self.prior}")

    def split(self, run: Run) -> tuple[list[int], list[int]]:
        """The tensors that are tables, and the others, in the order of the backward."""
        names = [tensor.name for tensor in run.step.tensors]
        missing = set(self.tables) - set(names)
        if missing:
            raise ValueError(f"the step has no tensor {', '.join(sorted(missing))}")
        tables = [index for index in run.step.backward_order if names[index] in self.tables]
        return tables, [index for index in run.step.backward_order if names[index] not in self.tables]


def _alltoall(run: Run, num_bytes: float) -> list[Slice]:
    """Each worker keeps its own share of the columns, and sends every other one theirs."""
    return [Slice(all_to_all(run.network.workers, run.network.node_size, num_bytes))]


def _all_gather(run: Run, num_bytes: float) -> list[Slice]:
    """Everything of everyone, in a ring."""
    return [Slice(gathered(run.network.workers, run.network.node_size, num_bytes))]


@dataclass(frozen=True)
class EmbRace:
    """Tables by columns, lookups and rows by AlltoAll (EmbRace, section III).

    Args:
        traffic: of the tables.
        scheduling: ``"none"``: beside plain DDP, everything when it comes up. ``"horizontal"``: lookups ahead, dense
            layers by DeAR. ``"2d"``: also prior rows before, delayed rows after all that the next forward waits for.
        bucket_mb: of DDP.
        lanes: streams of communication.
        slice_mb: largest message of dense layers, in MiB.
    """

    traffic: TableTraffic
    scheduling: Scheduling = "2d"
    bucket_mb: float = 5.0
    lanes: int = 3
    slice_mb: float = 1.0

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"EmbRace, {self.scheduling}"

    @property
    def line(self) -> str:
        """What a user writes."""
        return "tables = shard_embeddings(model, optimizer_class=...)"

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        tables, dense = self.traffic.split(run)
        if self.scheduling == "none":
            yield from self._beside_ddp(run, tables, dense)
        else:
            yield from self._scheduled(run, tables, dense)

    def _beside_ddp(self, run: Run, tables: Sequence[int], dense: Sequence[int]) -> Process:
        groups = ddp_buckets(run, self.bucket_mb, dense)
        dense_lanes, (lane,) = run.lanes(2, window=1), run.lanes(1)
        while not run.is_over:
            looked_up = lane.submit(
                [*_all_gather(run, self.traffic.ids), *_alltoall(run, self.traffic.lookup)], "lookup"
            )
            yield from run.forward(dict.fromkeys(tables, looked_up))
            sent: list[Signal] = []

            def send(number: int, sent: list[Signal] = sent) -> None:
                sent.append(lane.submit(_alltoall(run, self.traffic.rows), "rows of tables"))

            rows = Launcher([list(tables)], send)
            yield from all_reduced_in_backward(run, groups, dense_lanes, "ring", rows.ready)
            for signal in sent:
                yield from run.wait(signal, "rows of tables")
            yield from run.optimizer()
            run.end_step()

    def _scheduled(self, run: Run, tables: Sequence[int], dense: Sequence[int]) -> Process:
        """Prior rows, then lookups, then dense groups in the order of the forward, then delayed rows (section IV)."""
        traffic, message_bytes = self.traffic, self.slice_mb * (1 << 20)
        groups = ddp_buckets(run, self.bucket_mb, dense)
        forward_groups = groups[::-1]
        lanes, (table_lane,) = run.lanes(self.lanes), run.lanes(1)
        prior = traffic.prior if self.scheduling == "2d" else 1.0
        arrived: dict[int, Signal] = {}
        delayed: list[Signal] = []
        while not run.is_over:
            yield from run.forward(arrived)
            scattered: list[Signal] = []

            def launch(number: int, scattered: list[Signal] = scattered) -> None:
                slices = run.collective("reduce-scatter", run.num_bytes(groups[number]), message_bytes)
                lane = lanes[number % self.lanes]
                scattered.append(lane.submit(slices, f"reduce-scatter of group {number}"))

            yield from run.backward(Launcher(groups, launch).ready)
            first = table_lane.submit(_alltoall(run, traffic.rows * prior), "prior rows")
            for signal in (*scattered, *delayed, first):
                yield from run.wait(signal, "gradients")
            yield from run.optimizer(1 / run.network.workers)
            looked_up = table_lane.submit(
                [*_all_gather(run, traffic.ids), *_alltoall(run, traffic.lookup)], "lookup"
            )
            arrived = dict.fromkeys(tables, looked_up)
            gathers: list[Signal] = []
            for number, group in enumerate(forward_groups):
                slices = run.collective("all-gather", run.num_bytes(group), message_bytes)
                name = f"all-gather of group {number}"
                gathers.append(lanes[number % self.lanes].submit(slices, name, after=[looked_up]))
                arrived.update(dict.fromkeys(group, gathers[-1]))
            if prior < 1:
                rest = _alltoall(run, traffic.rows * (1 - prior))
                delayed = [table_lane.submit(rest, "delayed rows", after=gathers)]
            run.end_step()


@dataclass(frozen=True)
class SparseDdp:
    """Plain DDP with sparse gradients of tables: gloo gathers all rows of all workers, as they come.

    Args:
        traffic: of the tables.
        bucket_mb: of DDP.
    """

    traffic: TableTraffic
    bucket_mb: float = 25.0

    @property
    def name(self) -> str:
        """What tables call it."""
        return "DDP, sparse gradients"

    line = ""

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        tables, dense = self.traffic.split(run)
        groups = ddp_buckets(run, self.bucket_mb, dense)
        lanes = run.lanes(2, window=1)
        while not run.is_over:
            yield from run.forward({})
            sent: list[Signal] = []

            def send(number: int, sent: list[Signal] = sent) -> None:
                sent.append(lanes[0].submit(_all_gather(run, self.traffic.raw_rows), "rows of tables"))

            rows = Launcher([list(tables)], send)
            yield from all_reduced_in_backward(run, groups, lanes, "ring", rows.ready)
            for signal in sent:
                yield from run.wait(signal, "rows of tables")
            yield from run.optimizer()
            run.end_step()
