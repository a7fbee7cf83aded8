"""Table 2 and Figures 4 and 7 to 10 of the EmbRace paper: what sparse gradients of tables cost, and what hides them.

    python -m recipes.paper.embrace
    python -m recipes.paper.embrace --markdown docs/results/paper_embrace.md

Table 2 is counted on the collectives that it describes; the rest is simulated. Nothing is fitted to EmbRace's results.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ddp_hooks.planning import Network
from ddp_hooks.planning.events import Slice, clock_of
from ddp_hooks.planning.network import Round, Rounds, all_to_all
from recipes.benchmarks import embrace_workloads as workloads
from recipes.paper import embrace_model as model
from recipes.paper.embrace_counts import APPROACHES, DENSITY, DIM, Count, count, table_2
from recipes.paper.embrace_model import MAIN, Scope, Setting, scope_of, served
from recipes.paper.embrace_training import ablation, end_to_end, scalability, stalls
from recipes.paper.page import Claim, Page, Section, run
from recipes.paper.strategies.rounds import all_reduce, gathered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE_BYTES = 252.5e6  # Figure 4
SPARSITY = {"lm": 99.7, "gnmt": 89.7, "transformer": 86.6, "bert": 59.7}  # section 4.1.2, in %


# -- Table 2 -----------------------------------------------------------------------------------------------------------


def counted_costs(scope: Scope) -> Section:
    """Table 2, formula by formula."""
    found = {(name, workers): count(name, workers) for workers in scope.counted for name in APPROACHES}
    claims = []
    for (name, workers), counted in found.items():
        unit, size = ("M", 1.0) if name == "AllReduce" else ("αM", DENSITY)
        formula = table_2(name, workers)
        claims += [
            Claim.number(f"{name}, {workers} workers, bytes", counted.sent / size, formula.sent / size, unit),
            Claim.number(f"{name}, {workers} workers, messages", counted.messages, formula.messages, "β"),
        ]
    for name in scope.models:
        what = f"sparsity of a batch's gradients, {model.TITLES[name]}"
        claims.append(Claim.number(what, sparsity_of(name), SPARSITY[name], "%"))
    return Section(
        "Table 2: communication overhead of a sparse tensor",
        "counted",
        f"""\
Every approach as generators of `ddp_hooks.comm` that run for all workers in one process: bytes and messages that one
worker sends, the mean. M is a whole table, α the part of it that a batch looks up, before coalescing; {DENSITY:g}
here.

* AlltoAll, AllReduce and AllGather send exactly what the paper says. Of AlltoAll's messages N − 1 leave in one round:
  a library that sends them at once pays the latency β twice per step, and not 2 (N − 1) times.
* PS is counted with a server beside each worker, n = N. The paper has N workers send to every server; the one beside
  it sends nothing over the network, and (N − 1) / N remains of bytes and messages. That is as much as AlltoAll sends:
  PS loses to it only where servers stand apart, or where their processors or memory are slow.
* The sparsities follow from the paper's own Tables 1 and 3, so these lines only check the paper against itself. They
  are those before coalescing: every id of a batch counts, also where it occurs
  again (BERT: 12,288 ids and 30,522 rows). After coalescing BERT's is 94 %.
* Table 2 leaves ids out: with AlltoAll those of all workers are gathered, with AllGather they travel beside their
  rows, and with PS they ask for rows. The last column is theirs, for rows of {DIM} numbers and ids of 8 bytes.""",
        claims,
        ("approach", "workers", "bytes / M", "messages", "rounds", "ids beside it"),
        [_count_cells(name, workers, counted) for (name, workers), counted in found.items()],
    )


def sparsity_of(name: str) -> float:
    """Of the gradients of a model's tables before coalescing, in %: ids of a batch beside the rows of a table."""
    table = workloads.load(name).tables[0]
    return 100 - 100 * len(workloads.make_ids(table, world_size=1, rank=0, step=0)) / table.num_rows


def _count_cells(name: str, workers: int, counted: Count) -> list[str]:
    ids = f"{counted.ids / counted.sent:.2%}" if counted.ids else "none"
    return [name, f"{workers}", f"{counted.sent:.4g}", f"{counted.messages:g}", f"{counted.rounds}", ids]


# -- Figure 4 ----------------------------------------------------------------------------------------------------------

ALL_TO_ALL, SERVERS, APART = "AlltoAll", "PS", "PS, apart"
EXCHANGES = (ALL_TO_ALL, "AllReduce", "AllGather", SERVERS, APART)


def exchange_patterns(name: str, network: Network, density: float) -> list[Rounds]:
    """What makes every worker's rows of a table known, one collective after the other."""
    place, num_bytes = (network.workers, network.node_size), density * TABLE_BYTES
    if name == "AllReduce":
        return [all_reduce("ring", *place, TABLE_BYTES)]
    if name == "AllGather":
        return [gathered(*place, num_bytes)]
    if name == SERVERS:
        return [served(network, num_bytes)] * 2
    if name == APART:  # n of them, as Table 2 has it: everything of all workers passes their links
        return [(Round(1, num_bytes * network.node_size),)] * 2
    return [all_to_all(*place, num_bytes)] * 2


def exchange_s(name: str, network: Network, density: float) -> float:
    """Seconds of it, with nothing beside it."""
    return clock_of([Slice(sum(exchange_patterns(name, network, density), ()))], network)


def fastest_from(network: Network, others: Iterable[str], sparsities: Sequence[float]) -> float:
    """The least of these sparsities, in %, from which on AlltoAll is no slower than any other; 100 for none."""
    others = list(others)
    found = 100.0
    for sparsity in sorted(sparsities, reverse=True):
        ours_s = exchange_s(ALL_TO_ALL, network, 1 - sparsity)
        if any(exchange_s(name, network, 1 - sparsity) < ours_s * (1 - 1e-9) for name in others):
            break
        found = 100 * sparsity
    return found


def by_sparsity(scope: Scope) -> Section:
    """Figure 4."""
    half = Setting(MAIN.utilisation, model.PCIE_BYTES_S / 2)
    networks = {
        "2 nodes with 4 GPUs each": MAIN.network(8),
        "2 nodes with 4 GPUs each, half PCIe": half.network(8),
        "4 nodes with 1 GPU each": MAIN.network(4, 1),
    }
    paper = dict(zip(networks, (40.0, 40.0, 0.0), strict=True))
    turning = 1.75 / (4 * (1 - 0.4)) * model.INFINIBAND_BYTES_S / 1e9
    claims = []
    for title, network in networks.items():
        found = fastest_from(network, EXCHANGES, scope.sparsities)
        claims.append(Claim.number(f"AlltoAll is fastest from this sparsity on, {title}", found, paper[title], "%"))
    shown = [sparsity for sparsity in scope.sparsities if round(100 * sparsity) % 10 == 0 or sparsity == 0.99]
    return Section(
        "Figure 4: communication time by sparsity",
        "simulated",
        f"""\
The lookup and the gradients of one table of 252.5 MB, alone on the network. GPUs of a node share 100 Gbit/s, and each
has PCIe 3.0 × 16 within it (15.75 GB/s); line rates, and {model.ALPHA_S * 1e6:g} µs per round, an assumption. What
crosses a node's link is read off the generators. `PS` has a server in every node's memory; `PS, apart` as many
servers on nodes of their own, as Table 2 counts. OmniReduce is not simulated.

* **4 nodes with one GPU.** AlltoAll is as fast as anything at every sparsity, as in the paper. PS on the nodes ties
  with it, since it sends the same bytes; one whose servers stand apart needs a third longer.
* **2 nodes with 4 GPUs.** By Table 2 AlltoAll would win here, too, at every sparsity, for it has links of their own
  between any two workers. Where four GPUs share one, a ring crosses it with 1.75 M, and both exchanges of AlltoAll
  with 4 αM: AlltoAll wins from a sparsity of 1 − 1.75 / 4 = 56 % on. So that there is a turning point at all follows
  from sharing. Half of PCIe slows the ring, but not AlltoAll. The paper's 40 % lies between our two networks: it
  would be that of a ring at {turning:.1f} GB/s. GeForce cards, which have no peer access, pass what goes from GPU to
  GPU through the node's memory; the paper gives no rate for that.
* **AllGather** crosses the link with 7 αM, and is slower than AlltoAll at every sparsity in both networks.

The same exchanges were measured with four workers at 1 Gbit/s, see [the benchmark of sharded tables](embrace.md):
there AlltoAll was faster than all-reduce up to a density of 0.6, where the model says 1. What is measured also packs,
sums and updates rows, on a processor, and the backend's all-reduce is C++.""",
        claims,
        ("network", "sparsity", *(f"{name}, ms" for name in EXCHANGES)),
        [
            [title, f"{sparsity:.0%}", *(f"{1e3 * exchange_s(name, network, 1 - sparsity):.2f}" for name in EXCHANGES)]
            for title, network in networks.items()
            for sparsity in shown
        ],
        lambda figure: _draw_sparsity(figure, networks, scope.sparsities),
    )


def _draw_sparsity(figure: Figure, networks: dict[str, Network], sparsities: Sequence[float]) -> None:
    figure.set_size_inches(12, 4)
    for ax, (title, network) in zip(figure.subplots(1, len(networks)), networks.items(), strict=True):
        for name in EXCHANGES:
            times = [1e3 * exchange_s(name, network, 1 - sparsity) for sparsity in sparsities]
            style = "--" if name in (SERVERS, APART) else "-"
            ax.plot([100 * sparsity for sparsity in sparsities], times, style, label=name)
        ax.set(title=title, xlabel="sparsity, %", ylabel="ms", ylim=(0, None))
        ax.legend(fontsize=7)


# -- the page ----------------------------------------------------------------------------------------------------------

SECTIONS = (counted_costs, by_sparsity, end_to_end, stalls, ablation, scalability)


def introduction() -> str:
    """What all sections share."""
    links = {name: model.link_by_the_baseline(name) * 8e-9 for name in model.ALL_REDUCE_SCALING}
    by_model = ", ".join(f"{rate:.0f} for {model.TITLES[name]}" for name, rate in links.items())
    return f"""\
*EmbRace: Accelerating Sparse Communication for Distributed Training of Deep Neural Networks* (ICPP 2022). Table 2 is
counted; all else is simulated by `ddp_hooks.planning`, step by step and round by round, with as many bytes within and
between nodes as the collectives of this package send. Nothing is fitted to EmbRace's results.

* **Sizes** are those of Tables 1 and 3: tables, dense blocks, rows as they come, coalesced and prior. Batches on
  RTX2080 are smaller by the ratios of section 5.2.2 (LM 1, GNMT-8 1/4, Transformer 500/5120, BERT 1/8). That the same
  part of a smaller batch is coalesced and prior is an assumption.
* **Tokens** follow from Table 3: BERT's 36 MB are 12,288 vectors, 384 for each of 32 questions. Likewise a step has
  2,227 for LM, 3,328 for GNMT-8 and 4,506 for Transformer.
* **Computing time** is not in the paper. Here it is two operations per dense parameter and token forwards, and four
  backwards, at {100 * MAIN.utilisation:.0f} % of the GPU's float32 peak by its data sheet (RTX3090 35.6 TFLOP/s,
  RTX2080 10.1), and at 25 %; both are assumptions. Blocks take equally long. Updates, lookups in local memory and the
  splitting of rows take no time.
* **Network**: 4 GPUs of a node share 100 Gbit/s InfiniBand, and each has PCIe 3.0 × 16 (15.75 GB/s) within it, both
  at line rate; a further setting has half of PCIe. Nodes of both kinds of GPU are alike here, though the paper says
  that those of RTX2080 have less bandwidth within. Latency is an assumption, {model.ALPHA_S * 1e6:g} µs per round.
* **The network as a baseline shows it.** From how Horovod AllReduce scales in the paper's Fig. 10 follows how fast
  links between nodes are, if all else is as above, and computing at {100 * MAIN.utilisation:.0f} % of the peak:
  {by_model}, in Gbit/s. The last setting has their median. It uses no result of EmbRace, and the number that it
  reproduces by construction is no claim here.
* **Baselines** have one queue, first come, first served: dense blocks by ring all-reduce, and tables all-reduced as
  dense ones (Horovod AllReduce), all rows of all workers gathered, not coalesced (Horovod AllGather), or pushed to
  and pulled from servers in the memory of all nodes (Parallax). BytePS sends everything dense, in parts of 4 MB by
  priority, reduced within nodes first. Horovod's cycles and copies through host memory are left out.
* **EmbRace** is the paper's: AlltoAll for the lookups of all ids and for gradients, rows that are coalesced where
  they are split (Algorithm 1), blocks by all-reduce, one queue by priority. `EmbRace, ids once` looks up an id that a
  batch has several times only once. `ddp_hooks` is this package: ids once, dense layers in two halves (DeAR)."""


def page(options: argparse.Namespace) -> Page:
    """The page."""
    scope = scope_of(options.quick)
    sections = [make(scope) for make in SECTIONS]
    return Page("EmbRace, counted and simulated", introduction(), sections, "recipes.paper.embrace")


def main(arguments: Sequence[str] | None = None) -> None:
    run("recipes.paper.embrace", "Table 2 and Figures 4 and 7 to 10 of the EmbRace paper.", page, arguments)


if __name__ == "__main__":
    main()
