"""The evaluation of the Horovod paper (Romero et al., NSDI 2022), simulated on up to 27,600 GPUs of Summit.

    python -m recipes.paper.horovod
    python -m recipes.paper.horovod --markdown docs/results/paper_horovod.md

Figures 2, 3 and 6 to 11, and the cost of coordination behind them. What the paper leaves open is in
:mod:`recipes.paper.horovod_summit`, with sources; nothing is fitted to a result. The texts are in horovod.md.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from recipes.paper.horovod_summit import (
    BACKENDS,
    BASELINE,
    CACHING,
    IMAGE_MODELS,
    RESNET,
    STEMDL,
    STEMDL_FLOPS_S,
    Assumed,
    Extent,
    Outcome,
    Way,
    images_per_s,
    outcome,
    pflops,
    speedup,
    utilisation,
)
from recipes.paper.page import Claim, Page, Section, prose, run
from recipes.paper.strategies import DdpOn
from recipes.paper.strategies.horovod import Agreement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AGREEMENTS: tuple[Agreement, ...] = ("coordinator", "tree", "bitvector")
NUM_GROUPS = (None, 1, 2, 5, 10, 20)  # None: as the cycles have it, the paper's 0
GROUPS = 5  # Fig. 9 has as many, and Fig. 10 "4 or 5 buffers"
DDP = DdpOn(25.0, "two-level-log")  # section 4.3.2
BOTH = Way(groups=GROUPS)
MB = 1e6
PROSE = prose(Path(__file__).with_name("horovod.md"))

Lines: TypeAlias = "dict[str, tuple[Sequence[float], Sequence[float]]]"


def assumptions(extent: Extent) -> Section:
    """The models as they are simulated."""
    rows = []
    for model in (*extent.models, "stemdl", *(() if extent.quick else ("stemdl_deep",))):
        step = Assumed("", model).step
        used = f"{utilisation(model):.0%} of 15.7" if model in IMAGE_MODELS else "the paper's 59.67"
        cells = f"{len(step.tensors)}", f"{step.num_bytes / MB:.0f}", f"{step.compute_s * 1e3:.0f} ms"
        rows.append((model, *cells, used))
    columns = ("model", "tensors", "MB", "forward and backward", "TFLOP/s")
    sizes = {"efficientnet_b0": 21.0, "resnet50": 102.0, "vgg19": 574.0, "stemdl": 880.0, "stemdl_deep": 880.0}
    claims = [
        Claim.number(f"{model}, MB", Assumed("", model).step.num_bytes / MB, sizes[model], "MB") for model, *_ in rows
    ]
    return _section("Section 4.1: the models", claims, columns, rows, origin="counted")


def coordination(extent: Extent) -> Section:
    """Section 2.2.3: what agreeing costs in each step."""
    counts = extent.workers(27_600)
    once = {name: [one_agreement_s(name, workers) for workers in counts] for name in AGREEMENTS}
    steps = {name: [outcome(STEMDL, Way(agreement=name), workers) for workers in counts] for name in AGREEMENTS}
    columns = ("GPUs", *(f"{name}: one" for name in AGREEMENTS), *(f"{name}: a step" for name in AGREEMENTS))
    rows = []
    for i, workers in enumerate(counts):
        of_steps = (f"{_ms(seen[i].agreement_s)} in {seen[i].agreements:.0f}" for seen in steps.values())
        rows.append((f"{workers:,}", *(_ms(seconds[i]) for seconds in once.values()), *of_steps))
    one: Lines = {name: (counts, seconds) for name, seconds in once.items()}
    step: Lines = {name: (counts, [each.agreement_s for each in seen]) for name, seen in steps.items()}
    plots = [
        partial(_plot, lines=lines, label=f"seconds of {label}", logs=True)
        for lines, label in ((one, "one agreement on all tensors"), (step, "all agreements of a step"))
    ]
    draw = partial(_panels, plots=plots)
    return _section("Section 2.2.3: the cost of coordination", (), columns, rows, draw)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def one_agreement_s(agreement: Agreement, workers: int) -> float:
    """Of a coordinator that hears of all tensors of STEMDL at once."""
    horovod = STEMDL.horovod(Way(agreement=agreement))
    return horovod.agreement_on(workers, STEMDL.network(workers).link.alpha_s, len(STEMDL.step.tensors))


def figure_2(extent: Extent) -> Section:
    """Sizes of messages as cycles make them."""
    sizes = {name: outcome(RESNET, way, 96).buffers for name, way in (("cycles", BASELINE), ("5 groups", BOTH))}
    edges = [0.0, 0.25, 1.0, 4.0, 16.0, 64.0, float("inf")]
    columns = ("MB", *sizes)
    rows = []
    for low, high in itertools.pairwise(edges):
        counted = [sum(low * MB < size <= high * MB for size in made) / len(made) for made in sizes.values()]
        rows.append((f"{low:g} to {high:g}", *(f"{part:.0%}" for part in counted)))
    smallest = [f"{min(made) / MB:.3g} MB" for made in sizes.values()]
    largest = [f"{max(made) / MB:.3g} MB" for made in sizes.values()]
    rows += [("smallest", *smallest), ("largest", *largest)]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.hist([size / MB for size in sizes["cycles"]], bins=30)
        axes.set(xlabel="MB of an all-reduce", ylabel="all-reduces of four steps")

    return _section("Figure 2: sizes of fused messages", (), columns, rows, draw)


def figure_3(extent: Extent) -> Section:
    """STEMDL with three backends, by coordinator."""
    counts = extent.workers(6000)
    ways = {name: Way(name, "coordinator") for name in BACKENDS}
    last = counts[-1]
    claims = [
        *(
            Claim.number(f"NCCL ÷ {name}, {last:,} GPUs", speedup(STEMDL, ways["NCCL"], ways[name], last), paper)
            for name, paper in (("Hierarchical", 3.2), ("MPI", 5.4))
        ),
        *(
            Claim.at_most(f"computing, NCCL, {n:,} GPUs", 100 * outcome(STEMDL, ways["NCCL"], n).efficiency, 55, "%")
            for n in (counts[0], last)
        ),
    ]
    return _throughputs("Figure 3: existing strategies on STEMDL", claims, ways, counts)


def figure_6(extent: Extent) -> Section:
    """STEMDL with caching and grouping."""
    counts = extent.workers(6000)
    ways = {"NCCL": BASELINE, "Caching": CACHING, "Caching+Grouping": BOTH}
    last = counts[-1]
    busy = {name: outcome(STEMDL, way, last).busy for name, way in ways.items()}
    used = {name: 100 * outcome(STEMDL, way, last).efficiency for name, way in ways.items()}
    derived = 100 * 175e15 / 6000 / STEMDL_FLOPS_S
    claims = [
        Claim.number("Caching ÷ NCCL", speedup(STEMDL, CACHING, BASELINE, last), 1.64),
        Claim.number("Caching+Grouping ÷ NCCL", speedup(STEMDL, BOTH, BASELINE, last), 1.97),
        Claim.number("utilisation, Caching ÷ NCCL", busy["Caching"] / busy["NCCL"], 1.48),
        Claim.number("utilisation, Caching+Grouping ÷ NCCL", busy["Caching+Grouping"] / busy["NCCL"], 1.48),
        Claim.number("Caching+Grouping", pflops(STEMDL, BOTH, last), 175, "PFLOP/s"),
        Claim.number("NCCL, of one GPU's rate (derived)", used["NCCL"], derived / 1.97, "%"),
        Claim.number("Caching+Grouping, of one GPU's rate (derived)", used["Caching+Grouping"], derived, "%"),
    ]
    return _throughputs("Figure 6: caching and grouping on STEMDL", claims, ways, counts)


def _throughputs(title: str, claims: Sequence[Claim], ways: dict[str, Way], counts: Sequence[int]) -> Section:
    columns = ("GPUs", *(f"{name}, PFLOP/s" for name in ways), *(f"{n}: computing, busy, all-reduces" for n in ways))
    rows = []
    for workers in counts:
        rates = (f"{pflops(STEMDL, way, workers):.3g}" for way in ways.values())
        rows.append((f"{workers:,}", *rates, *(_used(outcome(STEMDL, way, workers)) for way in ways.values())))
    seen_of = {name: [outcome(STEMDL, way, n) for n in counts] for name, way in ways.items()}
    rates_of: Lines = {name: (counts, [pflops(STEMDL, way, n) for n in counts]) for name, way in ways.items()}
    used: Lines = {name: (counts, [100 * each.efficiency for each in seen]) for name, seen in seen_of.items()}
    plots = [partial(_plot, lines=rates_of, label="PFLOP/s"), partial(_plot, lines=used, label="computing, %")]
    return _section(title, claims, columns, rows, partial(_panels, plots=plots))


def _used(seen: Outcome) -> str:
    return f"{seen.efficiency:.0%}, {seen.busy:.0%}, {seen.all_reduce_s:.2f} s"


def figure_3_and_6_varied(extent: Extent) -> Section:
    """The ratios of figures 3 and 6, with other assumptions."""
    last = extent.workers(6000)[-1]
    columns = ("assumption", "NCCL ÷ Hierarchical", "NCCL ÷ MPI", "computing, NCCL", "Caching ÷ NCCL", "Both ÷ NCCL")
    rows: list[tuple[str, ...]] = [("the paper", "3.2×", "5.4×", "< 55%", "1.64×", "1.97×")]
    for assumed in extent.varied(STEMDL):
        others = [Way(name, "coordinator") for name in ("Hierarchical", "MPI")]
        ratios = [speedup(assumed, BASELINE, other, last) for other in others]
        gains = [speedup(assumed, way, BASELINE, last) for way in (CACHING, BOTH)]
        computing = outcome(assumed, BASELINE, last).efficiency
        cells = (*(f"{r:.2f}×" for r in ratios), f"{computing:.0%}", *(f"{g:.2f}×" for g in gains))
        rows.append((assumed.name, *cells))
    return _section("Figures 3 and 6: what the paper leaves open", (), columns, rows)


def figure_7(extent: Extent) -> Section:
    """ResNet-50 with caching on and off."""
    counts = extent.workers(768)
    last = counts[-1]
    ways = {backend: (Way(backend), Way(backend, "coordinator")) for backend in ("NCCL", "MPI")}
    claims = [
        Claim(f"on ÷ off, NCCL, {last} GPUs", speedup(RESNET, *ways["NCCL"], last), 1.6, 2.5),
        Claim(f"on ÷ off, MPI, {last} GPUs", speedup(RESNET, *ways["MPI"], last), 1.15, 1.53),
        Claim.number("on ÷ off, NCCL, 192 GPUs", speedup(RESNET, *ways["NCCL"], 192), 1.0),
        Claim.number("on ÷ off, MPI, 192 GPUs", speedup(RESNET, *ways["MPI"], 192), 1.0),
        Claim.at_least("on ÷ off, NCCL, 384 GPUs", speedup(RESNET, *ways["NCCL"], 384), 1.0),
    ]
    named = {f"{backend}, {state}": pair[i] for backend, pair in ways.items() for i, state in enumerate(("on", "off"))}
    columns = ("GPUs", *(f"{name}, images/s" for name in named))
    rows = [(f"{n:,}", *(f"{images_per_s(RESNET, way, n):,.0f}" for way in named.values())) for n in counts]

    def lines(backend: str) -> Lines:
        own = {name: way for name, way in named.items() if name.startswith(backend)}
        return {name: (counts, [images_per_s(RESNET, way, n) for n in counts]) for name, way in own.items()}

    plots = [partial(_plot, lines=lines(backend), label="images/s") for backend in ways]
    return _section("Figure 7: caching on ResNet-50", claims, columns, rows, partial(_panels, plots=plots))


def figure_7_varied(extent: Extent) -> Section:
    """The ratios of figures 7 to 9, with other assumptions."""
    last = extent.workers(768)[-1]
    columns = ("assumption", "on ÷ off, NCCL", "on ÷ off, MPI", "5 ÷ no groups, NCCL", "its all-reduces, ÷")
    rows: list[tuple[str, ...]] = [
        ("the paper, TensorFlow", "2.5×", "1.53×", "1.05×", "almost 0.5×"),
        ("the paper, PyTorch", "1.6×", "1.15×", "less", ""),
    ]
    for assumed in extent.varied(RESNET):
        gains = [speedup(assumed, Way(b), Way(b, "coordinator"), last) for b in ("NCCL", "MPI")]
        grouped = speedup(assumed, BOTH, CACHING, last)
        shorter = outcome(assumed, BOTH, last).all_reduce_s / outcome(assumed, CACHING, last).all_reduce_s
        rows.append((assumed.name, *(f"{ratio:.2f}×" for ratio in (*gains, grouped, shorter))))
    return _section("Figures 7 to 9: what the paper leaves open", (), columns, rows)


def figure_8(extent: Extent) -> Section:
    """ResNet-50 on 768 GPUs, in groups."""
    states: dict[str, Agreement] = {"on": "bitvector", "off": "coordinator"}
    rates = {
        f"{backend}, {state}": [images_per_s(RESNET, Way(backend, agreement, groups), 768) for groups in NUM_GROUPS]
        for state, agreement in states.items()
        for backend in ("NCCL", "MPI")
    }
    some = [NUM_GROUPS.index(5), NUM_GROUPS.index(10)]
    best = max(rates["NCCL, on"][i] for i in some)
    claims = [Claim.number("5 or 10 ÷ no groups, NCCL, on", best / rates["NCCL, on"][0], 1.05)]
    columns = ("groups", *(f"{name}, images/s" for name in rates))
    labels = [str(groups or 0) for groups in NUM_GROUPS]
    rows = [(label, *(f"{rate[i]:,.0f}" for rate in rates.values())) for i, label in enumerate(labels)]

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 6)
        for axes, (name, rate) in zip(figure.subplots(2, 2, sharey=True).flat, rates.items(), strict=True):
            axes.bar(labels, rate)
            axes.set(title=f"caching: {name}", xlabel="groups", ylabel="images/s")

    return _section("Figure 8: grouping on ResNet-50", claims, columns, rows, draw)


def figure_9(extent: Extent) -> Section:
    """Where the time of control and data plane goes."""
    ways = {"off": BASELINE, "on": CACHING, "off, 5 groups": replace(BASELINE, groups=GROUPS), "on, 5 groups": BOTH}
    seen = {name: outcome(RESNET, way, 768) for name, way in ways.items()}
    shorter = seen["on, 5 groups"].all_reduce_s / seen["on"].all_reduce_s
    claims = [Claim.number("seconds of all-reduces, 5 ÷ no groups, on", shorter, 0.5)]
    columns = ("caching", "cycles", "coordination", "all-reduces", "seconds of them", "exposed", "step")
    rows = [(name, *_breakdown(each)) for name, each in seen.items()]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        agreed = [1e3 * each.agreement_s for each in seen.values()]
        axes.bar(list(seen), agreed, label="coordination")
        axes.bar(list(seen), [1e3 * each.all_reduce_s for each in seen.values()], bottom=agreed, label="all-reduces")
        axes.set(xlabel="caching", ylabel="ms per step")
        axes.legend()

    return _section("Figure 9: control plane and data plane on ResNet-50", claims, columns, rows, draw)


def _breakdown(seen: Outcome) -> tuple[str, ...]:
    seconds = (seen.all_reduce_s, seen.step_s - seen.compute_s, seen.step_s)
    return f"{seen.agreements:.0f}", _ms(seen.agreement_s), f"{seen.all_reduces:.0f}", *map(_ms, seconds)


def figure_10(extent: Extent) -> Section:
    """Three models, with Horovod and with DistributedDataParallel."""
    counts = extent.workers(1536)
    last = counts[-1]
    ways: dict[str, Way | DdpOn] = {"Horovod": BOTH, "DDP": DDP}
    resnet = {name: outcome(RESNET, way, last) for name, way in ways.items()}
    claims = [
        Claim("Horovod, efficiency", 100 * resnet["Horovod"].efficiency, 93, 96, "%"),
        Claim.number("DDP, efficiency", 100 * resnet["DDP"].efficiency, 97, "%"),
        *(Claim.at_least(f"{name}, all-reduces hidden", 100 * each.overlap, 95, "%") for name, each in resnet.items()),
        *(Claim(f"{name}, all-reduces per step", each.all_reduces, 4, 5, "") for name, each in resnet.items()),
    ]
    heads = [f"{name}: efficiency, hidden" for name in ways]
    columns = ("model", "GPUs", *heads, *(f"{head}, long latency" for head in heads))
    rows = []
    for model in extent.models:
        for workers in counts[-1:] if model != "resnet50" else counts:
            seen = [outcome(Assumed("", model), way, workers) for way in ways.values()]
            slow = [outcome(Assumed("", model, latency="long"), way, workers) for way in ways.values()]
            cells = (f"{each.efficiency:.1%}, {each.overlap:.0%}" for each in (*seen, *slow))
            rows.append((model, f"{workers:,}", *cells))
    draw = partial(_scaling, ways=ways, extent=extent)
    return _section("Figure 10: scaling of three models", claims, columns, rows, draw)


def _scaling(figure: Figure, ways: dict[str, Way | DdpOn], extent: Extent) -> None:
    counts = extent.workers(1536)
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, way), marker in zip(ways.items(), "os", strict=True):
        left.plot(counts, [_percent(RESNET, way, n) for n in counts], marker=marker, label=name)
        of_models = [_percent(Assumed("", model), way, counts[-1]) for model in extent.models]
        right.plot(extent.models, of_models, linestyle="none", marker=marker, label=name)
    left.set(xscale="log", xlabel="GPUs, ResNet-50", ylabel="scaling efficiency, %", ylim=(90, 100.5))
    right.set(xlabel=f"{counts[-1]:,} GPUs")
    right.legend(loc="lower right")
    figure.set_size_inches(11, 4.5)


def _percent(assumed: Assumed, way: Way | DdpOn, workers: int) -> float:
    return 100 * outcome(assumed, way, workers).efficiency


def figure_11(extent: Extent) -> Section:
    """STEMDL on the whole of Summit."""
    counts = extent.workers(27_600)
    last = counts[-1]
    claims = [
        Claim.number("efficiency", 100 * outcome(STEMDL, BOTH, last).efficiency, 93, "%"),
        Claim.number("sustained", pflops(STEMDL, BOTH, last) / 1e3, 1.54, "EFLOP/s"),
    ]
    varied = [assumed for assumed in extent.varied(STEMDL) if assumed.coordinator == 1.0]  # it has none
    columns = ("assumption", *(f"{workers:,}" for workers in counts))
    rows = [(each.name, *(f"{outcome(each, BOTH, n).efficiency:.1%}" for n in counts)) for each in varied]
    lines: Lines = {each.name: (counts, [outcome(each, BOTH, n).efficiency for n in counts]) for each in varied}
    draw = partial(_panels, plots=[partial(_plot, lines=lines, label="efficiency")])
    return _section("Figure 11: STEMDL on the whole of Summit", claims, columns, rows, draw)


def _section(
    title: str,
    claims: Sequence[Claim],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    draw: Callable[[Figure], None] | None = None,
    origin: Literal["simulated", "counted"] = "simulated",
) -> Section:
    return Section(title, origin, PROSE[title], claims, columns, rows, draw)


def _panels(figure: Figure, plots: Sequence[Callable[[Axes], None]]) -> None:
    figure.set_size_inches(1 + 5 * len(plots), 4.5)
    for axes, plot in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
        plot(axes)


def _plot(axes: Axes, lines: Lines, label: str, logs: bool = False) -> None:
    for name, (workers, values) in lines.items():
        axes.plot(workers, values, marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log" if logs else "linear", xlabel="GPUs", ylabel=label)
    axes.legend(fontsize="small")


SECTIONS = (
    assumptions,
    coordination,
    figure_2,
    figure_3,
    figure_6,
    figure_3_and_6_varied,
    figure_7,
    figure_8,
    figure_9,
    figure_7_varied,
    figure_10,
    figure_11,
)


def make(options: argparse.Namespace) -> Page:
    """Everything."""
    extent = Extent(options.quick)
    sections = [section(extent) for section in SECTIONS]
    title = "Horovod's caching and grouping, simulated"
    return Page(title, PROSE["Introduction"], sections, "recipes.paper.horovod")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    run("recipes.paper.horovod", "Figures 2, 3 and 6 to 11 of the Horovod paper, simulated.", make, arguments)


if __name__ == "__main__":
    main()
