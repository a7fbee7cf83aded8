"""Training as in the EmbRace paper: its models, two clusters, and the ways to communicate that it compares.

Sizes are those of its Tables 1 and 3, batches those of section 5.2. What it leaves open, what GPUs make of their peak
and links of their rate, is a :class:`Setting`, of which there are several; latency is assumed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from ddp_hooks.comm import AlphaBeta
from ddp_hooks.planning import Network, Prediction, StepProfile, Strategy, simulate
from ddp_hooks.planning.events import Process, Signal, Slice
from ddp_hooks.planning.network import Round, Rounds, all_to_all
from ddp_hooks.planning.simulation import Run
from recipes.benchmarks import embrace_workloads as workloads
from recipes.benchmarks.embrace_workloads import BACKWARD_PER_FORWARD, FLOAT32_BYTES, EmbraceWorkload
from recipes.benchmarks.workloads import profile_of_layers
from recipes.paper.strategies import ByteScheduler, EmbRace, TableTraffic
from recipes.paper.strategies.queues import PriorityLanes
from recipes.paper.strategies.rounds import all_reduce, gathered

MODELS = workloads.PAPER_MODELS
TITLES = {"lm": "LM", "gnmt": "GNMT-8", "transformer": "Transformer", "bert": "BERT-base"}
GPUS_PER_NODE = 4  # section 5.2.1
INFINIBAND_BYTES_S = 100e9 / 8  # section 5.2.1, line rate
PCIE_BYTES_S = 15.75e9  # PCIe 3.0 × 16, which the Xeon 4214R has: line rate
ALPHA_S = 10e-6  # an assumption; the paper gives no latency
ID_BYTES = 8
ALL_REDUCE_SCALING = {"gnmt": 3.32, "transformer": 2.51, "bert": 3.81}  # from 4 to 16 RTX3090 (section 5.6)


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Args:
        flops_per_s: float32 peak, by its data sheet.
        batch: of each model, as a part of the batch on RTX3090, for which Table 3 holds (section 5.2.2).
    """

    name: str
    flops_per_s: float
    batch: dict[str, float]


GPUS = (
    Gpu("RTX3090", 35.6e12, dict.fromkeys(MODELS, 1.0)),
    Gpu("RTX2080", 10.1e12, {"lm": 1.0, "gnmt": 32 / 128, "transformer": 500 / 5120, "bert": 4 / 32}),
)


@dataclass(frozen=True)
class Setting:
    """What the paper leaves open.

    Args:
        utilisation: part of a GPU's peak that models make use of.
        inside_bytes_s: between GPUs of a node, per GPU and direction.
        between_bytes_s: between nodes, per node and direction.
    """

    utilisation: float
    inside_bytes_s: float = PCIE_BYTES_S
    between_bytes_s: float = INFINIBAND_BYTES_S

    @property
    def name(self) -> str:
        """What tables call it."""
        parts = [f"{100 * self.utilisation:.0f} % of peak"]
        if self.inside_bytes_s != PCIE_BYTES_S:
            parts.append(f"PCIe × {self.inside_bytes_s / PCIE_BYTES_S:.2g}")
        if self.between_bytes_s != INFINIBAND_BYTES_S:
            parts.append(f"{self.between_bytes_s * 8e-9:.0f} Gbit/s")
        return ", ".join(parts)

    def network(self, workers: int, node_size: int = GPUS_PER_NODE) -> Network:
        """So many GPUs, the nodes of which share an InfiniBand link each."""
        inside = AlphaBeta(ALPHA_S, 1 / self.inside_bytes_s) if node_size > 1 else None
        return Network(workers, AlphaBeta(ALPHA_S, 1 / self.between_bytes_s), node_size, inside, native=True)


# Half of PCIe: GeForce cards have no peer access, and what goes from GPU to GPU passes through the node's memory.
LINE_RATES = (Setting(0.25), Setting(0.4), Setting(0.4, PCIE_BYTES_S / 2))
MAIN = LINE_RATES[1]


@dataclass(frozen=True)
class Rows:
    """What one worker's batch has of one table, in bytes.

    Args:
        ids: of the batch.
        original: vectors, or gradients, of all ids (Table 3; before coalescing, as in Table 2).
        coalesced: gradients added up by id.
        prior: of these, what some worker's next batch needs.
    """

    ids: float
    original: float
    coalesced: float
    prior: float


@dataclass(frozen=True)
class Job:
    """One model on one kind of GPU."""

    gpu: Gpu
    model: str

    @property
    def workload(self) -> EmbraceWorkload:
        """Its blocks and tables, and the batch on RTX3090."""
        return workloads.load(self.model)

    @property
    def tables(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(table.name for table in self.workload.tables)

    @property
    def rows(self) -> Rows:
        """Of each table; all tables of a model are alike. What is used again is the same part of a smaller batch."""
        table = self.workload.tables[0]
        row_bytes = table.dim * FLOAT32_BYTES * self.gpu.batch[self.model]
        counts = (table.num_ids, table.num_rows_used, table.num_prior)
        original, coalesced, prior = (count * row_bytes for count in counts)
        return Rows(table.num_ids * ID_BYTES * self.gpu.batch[self.model], original, coalesced, prior)

    def compute_s(self, utilisation: float) -> float:
        """Forward and backward: two operations per parameter of dense blocks and id, and four."""
        ids = self.workload.tables[0].num_ids * self.gpu.batch[self.model]
        operations = 2 * (1 + BACKWARD_PER_FORWARD) * sum(self.workload.block_numels) * ids
        return operations / (self.gpu.flops_per_s * utilisation)

    def step(self, utilisation: float) -> StepProfile:
        """Blocks that take equally long, a tensor each, and tables, whose lookup takes no time."""
        blocks, tables = self.workload.block_numels, self.workload.tables
        forward_s = self.compute_s(utilisation) / (1 + BACKWARD_PER_FORWARD) / len(blocks)
        layers: list[tuple[float, float, Sequence[int]]] = []
        names: list[str] = []
        sizes: list[int] = []

        def add(name: str, numel: int, forward_s: float) -> None:
            layers.append((forward_s, BACKWARD_PER_FORWARD * forward_s, [len(names)]))
            names.append(name)
            sizes.append(numel * FLOAT32_BYTES)

        for place in range(len(blocks) + 1):
            for table in tables:
                if table.before_block == place:
                    add(table.name, table.num_rows * table.dim, 0.0)
            if place < len(blocks):
                add(f"block {place}", blocks[place], forward_s)
        return profile_of_layers(layers, names, sizes)


def served(network: Network, num_bytes: float) -> Rounds:
    """What all workers push to servers in the memory of all nodes, or pull from them.

    Where a node has several GPUs, all of it passes a GPU's PCIe; with one, the network has no such level.
    """
    nodes = network.workers // network.node_size
    others_bytes = (network.workers - network.node_size) * num_bytes / nodes
    return (Round(1, others_bytes, num_bytes if network.node_size > 1 else 0.0),)


# -- ways to communicate -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InOrder:
    """One queue, first come, first served: dense blocks are all-reduced, and the next forward waits for all (Fig. 6a).

    Args:
        name: what tables call it.
        tables: which tensors are tables.
        lookup: rounds before a table's vectors are there; none where every worker holds all of it.
        gradient: rounds for those of a table.
    """

    name: str
    tables: tuple[str, ...]
    lookup: Rounds
    gradient: Rounds
    line = effect = ""

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        (lane,) = run.lanes(1, window=1)
        while not run.is_over:
            done_s = 0.0
            for index in run.step.forward_order:
                tensor = run.step.tensors[index]
                if tensor.name in self.tables and self.lookup:
                    yield from run.compute("forward", tensor.needed_s - done_s)
                    done_s = tensor.needed_s
                    yield from run.wait(lane.submit([Slice(self.lookup)], "lookup"), "lookup")
            yield from run.compute("forward", run.step.forward_s - done_s)
            sent: list[Signal] = []

            def send(index: int, sent: list[Signal] = sent) -> None:
                tensor = run.step.tensors[index]
                slices = [Slice(self.gradient)] if tensor.name in self.tables else run.all_reduce(tensor.num_bytes)
                sent.append(lane.submit(slices, tensor.name))

            yield from run.backward(send)
            for signal in sent:
                yield from run.wait(signal, "gradients")
            run.end_step()


@dataclass(frozen=True)
class ByPriority:
    """One queue: prior rows, then lookups, then dense blocks as the forward reads them, then delayed rows (Fig. 6c).

    Args:
        name: what tables call it.
        tables: which tensors are tables.
        lookup, prior, delayed: rounds for each table. No delayed ones: horizontal scheduling only (Fig. 6b); rows are
            not split, and need not wait for the end of the backward.
    """

    name: str
    tables: tuple[str, ...]
    lookup: Rounds
    prior: Rounds
    delayed: Rounds
    line = effect = ""

    def train(self, run: Run) -> Process:
        """See :class:`~ddp_hooks.planning.simulation.Strategy`."""
        lane = PriorityLanes(run)
        names = [tensor.name for tensor in run.step.tensors]
        last = len(names) + 2
        arrived: dict[int, Signal] = {}
        delayed = Signal(happened=True)
        while not run.is_over:
            yield from run.forward(arrived)
            arrived = {}

            def send(index: int, arrived: dict[int, Signal] = arrived) -> None:
                if names[index] not in self.tables:
                    slices = run.all_reduce(run.num_bytes([index]))
                    arrived[index] = lane.submit(slices, names[index], 2 + run.step.forward_order.index(index))
                elif not self.delayed:
                    lane.submit([Slice(self.prior)], names[index], 0)

            yield from run.backward(send)
            yield from run.wait(delayed, "delayed rows")  # the lookup below may read them
            if self.delayed:
                lane.submit([Slice(self.prior)] * len(self.tables), "prior rows", 0)
            for index in run.step.forward_order:
                if names[index] in self.tables:
                    arrived[index] = lane.submit([Slice(self.lookup)], "lookup", 1)
            delayed = lane.submit([Slice(self.delayed)] * len(self.tables), "delayed rows", last)
            run.end_step()


ALL_REDUCE, ALL_GATHER, BYTE_PS, PARALLAX = "Horovod AllReduce", "Horovod AllGather", "BytePS", "Parallax"
HYBRID, HORIZONTAL, SCHEDULED = "EmbRace, no scheduling", "EmbRace, horizontal", "EmbRace"
UNIQUE = "EmbRace, ids once"  # an id that occurs again in a batch is looked up once
OURS = "ddp_hooks"
HOROVOD = (ALL_REDUCE, ALL_GATHER)
BASELINES = (*HOROVOD, BYTE_PS, PARALLAX)
NAMES = (*BASELINES, HYBRID, HORIZONTAL, SCHEDULED, UNIQUE, OURS)


def strategy_of(name: str, job: Job, network: Network) -> Strategy:
    """How one of :data:`NAMES` communicates.

    EmbRace coalesces gradients where it splits them (Algorithm 1), and not otherwise; ids are gathered before lookups.
    BytePS reduces within a node, and its servers are in the memory of all nodes: it sends what an all-reduce on two
    levels does.
    """
    rows, tables, place = job.rows, job.tables, (network.workers, network.node_size)
    if name == BYTE_PS:
        return ByteScheduler(schedule="two-level")
    if name == OURS:
        sizes = (rows.ids, rows.coalesced, rows.coalesced, rows.original)
        ids, lookup_bytes, row_bytes, raw_bytes = (len(tables) * size for size in sizes)
        traffic = TableTraffic(tables, ids, lookup_bytes, row_bytes, raw_bytes, rows.prior / rows.coalesced)
        return EmbRace(traffic, "2d", lanes=1)
    if name == ALL_REDUCE:
        table = job.workload.tables[0]
        return InOrder(name, tables, (), all_reduce("ring", *place, table.num_rows * table.dim * FLOAT32_BYTES))
    if name == ALL_GATHER:
        return InOrder(name, tables, (), gathered(*place, rows.original + rows.ids))
    if name == PARALLAX:
        return InOrder(name, tables, served(network, rows.original), served(network, rows.original))
    lookup = (*gathered(*place, rows.ids), *all_to_all(*place, rows.original))
    if name == HYBRID:
        return InOrder(name, tables, lookup, all_to_all(*place, rows.original))
    if name == HORIZONTAL:
        return ByPriority(name, tables, lookup, all_to_all(*place, rows.original), ())
    assert name in (SCHEDULED, UNIQUE), name
    if name == UNIQUE:
        lookup = (*gathered(*place, rows.ids), *all_to_all(*place, rows.coalesced))
    prior, delayed = (all_to_all(*place, size) for size in (rows.prior, rows.coalesced - rows.prior))
    return ByPriority(name, tables, lookup, prior, delayed)


@cache
def predicted(name: str, gpu: str, model: str, workers: int, setting: Setting = MAIN) -> Prediction:
    """A step of one of :data:`NAMES`."""
    job = Job(next(each for each in GPUS if each.name == gpu), model)
    network = setting.network(workers)
    return simulate(strategy_of(name, job, network), job.step(setting.utilisation), network)


def scaling(name: str, model: str, setting: Setting, gpu: str = "RTX3090") -> float:
    """How many times as fast 16 GPUs are as 4."""
    four, sixteen = (predicted(name, gpu, model, workers, setting).step_s for workers in (4, 16))
    return 16 / 4 * four / sixteen


@cache
def link_by_the_baseline(model: str) -> float:
    """Bytes per second between nodes with which Horovod AllReduce scales a model as it does in the paper's Fig. 10."""
    low, high = 1e8, INFINIBAND_BYTES_S
    for _ in range(30):
        middle = (low * high) ** 0.5
        enough = scaling(ALL_REDUCE, model, replace(MAIN, between_bytes_s=middle)) > ALL_REDUCE_SCALING[model]
        low, high = (low, middle) if enough else (middle, high)
    return low


def by_the_baseline() -> Setting:
    """With the median of these links: what a baseline, not EmbRace, says about the paper's network."""
    return replace(MAIN, between_bytes_s=statistics.median(map(link_by_the_baseline, ALL_REDUCE_SCALING)))


# -- how much of it ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scope:
    """What a page shows.

    Args:
        models, settings: of what is trained; pictures show the last setting.
        sparsities: of Figure 4, ascending.
        counted: numbers of workers for Table 2.
        by_baseline: which of the settings has a link that a baseline's results give.
    """

    models: tuple[str, ...]
    settings: tuple[Setting, ...]
    sparsities: tuple[float, ...]
    counted: tuple[int, ...]
    by_baseline: Setting | None = None


def scope_of(quick: bool) -> Scope:
    """All of it, or of everything a little."""
    if quick:
        return Scope(("gnmt", "bert"), (MAIN,), (0.0, 0.25, 0.5, 0.75, 0.99), (4,))
    slower = by_the_baseline()
    sparsities = tuple(percent / 100 for percent in range(100))
    return Scope(MODELS, (*LINE_RATES, slower), sparsities, (4, 8, 16), slower)
