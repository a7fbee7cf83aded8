"""The evaluation of the SparDL paper (zhao2024spardl): Table I and Figures 7 to 9 and 12 to 17.

    python -m recipes.paper.spardl
    python -m recipes.paper.spardl --markdown docs/results/paper_spardl.md

Small models are trained with the paper's numbers of workers, in one process; the messages of their exchanges are timed
on the in-process fabric, their bytes multiplied as the paper's model is larger. Nothing is fitted to its results.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from recipes.paper.page import Claim, Page, Section, run
from recipes.paper.spardl_costs import (
    BATCHES,
    CASES,
    MAIN,
    NETWORKS,
    SPARDL,
    WORKERS,
    Lab,
    compute_s,
    figure_8,
    figure_9,
    figure_10,
    figure_12,
    figure_18,
    table_1,
    text_of,
)
from recipes.paper.spardl_training import Method, Network, digits, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VGG_16, VGG_19 = 14.7e6, 20.1e6  # parameters, Table II
TEAMS = {
    14: (SPARDL, Method(teams=2), *(Method(teams=d, sag="b") for d in (2, 7, 14))),
    12: (SPARDL, *(Method(teams=d) for d in (2, 4)), *(Method(teams=d, sag="b") for d in (2, 3, 4, 6, 12))),
}
DENSITIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)
DENSE = Method(None)


def _lines(
    series: Sequence[tuple[str, Sequence[float]]], xlabel: str, ylabel: str, title: str = ""
) -> Callable[[Figure], None]:
    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for label, values in series:
            axes.plot(range(1, len(values) + 1), values, label=label)
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.set_title(title)
        axes.legend(fontsize=8)

    return draw


def figure_7(lab: Lab) -> Section:
    """Entries after gathering among teams."""
    k = 0.01 * lab.run(SPARDL).numel
    watched = {
        f"{method}, {'adjusted' if method.adjusts else 'h = d k / P'}": [each / k for each in lab.run(method).gathered]
        for teams in (2, 7)
        for method in (Method(teams=teams, sag="b", adjusts=False), Method(teams=teams, sag="b"))
    }
    rows = []
    for name, counts in watched.items():
        settled = counts[len(counts) // 2 :]
        changes = [abs(after / before - 1) for before, after in itertools.pairwise(settled)]
        numbers = (min(settled), statistics.fmean(settled), max(settled))
        rows.append((name, *(f"{value:.2f}" for value in numbers), f"{100 * statistics.fmean(changes):.1f} %"))
    text = text_of("Figure 7")
    columns = ("", "least / k", "mean / k", "most / k", "mean change from step to step")
    draw = _lines(list(watched.items()), "step", "entries after gathering among teams / k")
    return Section("Figure 7: entries after gathering among teams", "counted", text, (), columns, rows, draw)


def step_s(lab: Lab, method: Method, workers: int, network: Network, batch: int) -> float:
    """A step of VGG-16: computing, then communication."""
    return compute_s(16, batch) + lab.seconds(method, workers, VGG_16, network)


def figures_13_14(lab: Lab) -> Section:
    """Teams: time and accuracy."""
    claims = []
    for network in MAIN:
        of = {(size, each): step_s(lab, each, size, network, BATCHES[0]) for size in TEAMS for each in TEAMS[size]}
        plain, recursive, _, seven, fourteen = (of[14, each] for each in TEAMS[14])
        claims += [
            Claim.at_least(f"14 workers, {network}: R-SAG, d = 2", plain / recursive, 1),
            Claim.number(f"14 workers, {network}: B-SAG, d = 7", plain / seven, 1.25),
            Claim.number(f"14 workers, {network}: B-SAG, d = 14", plain / fourteen, 1.2),
        ]
        plain, two, four, _, three_b, four_b, *_ = (of[12, each] for each in TEAMS[12])
        claims += [
            Claim.at_least(f"12 workers, {network}: B-SAG, time of d = 4 / d = 3", four_b / three_b, 1),
            Claim.at_least(f"12 workers, {network}: R-SAG, gain to d = 2 / from 2 to 4", plain / two / (two / four), 1),
        ]
    settings = [(network, batch) for network in NETWORKS for batch in BATCHES]
    rows = []
    for size, methods in TEAMS.items():
        for each in methods:
            speeds = (
                step_s(lab, SPARDL, size, network, batch) / step_s(lab, each, size, network, batch)
                for network, batch in settings
            )
            learnt = _learnt(lab, each) if size == WORKERS else ("", "")
            rows.append((f"{size}", str(each), *(f"{speed:.2f}" for speed in speeds), *learnt))
    columns = ("workers", "", *(f"× at {network}, batch {batch}" for network, batch in settings), "accuracy", "loss")

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 4)
        for axes, (size, methods) in zip(figure.subplots(1, 2), TEAMS.items(), strict=True):
            for index, network in enumerate(MAIN):
                values = [1e3 * step_s(lab, each, size, network, BATCHES[0]) for each in methods]
                own = [value / values[0] for value in values]
                axes.bar([place + 0.4 * index for place in range(len(own))], own, 0.4, label=str(network))
            axes.set_xticks(range(len(methods)), [str(each) for each in methods], rotation=60, fontsize=8)
            axes.set_ylabel("training time / d = 1")
            axes.set_title(f"{size} workers")
        figure.axes[0].legend(fontsize=8, loc="lower left")

    text = text_of("Figures 13 and 14", steps=lab.steps(SPARDL, WORKERS), **_overlap())
    return Section("Figures 13 and 14: teams", "simulated", text, claims, columns, rows, draw)


def _overlap() -> dict[str, float]:
    """What the paper's own ratio of TopkDSA says of how entries overlap, and so of B-SAG with 14 teams."""
    share = (WORKERS - 1) / WORKERS
    fill = (CASES[0].communication[0] * 4 * share - 2 * share) / (2 * share)  # Table I, without latency; of k
    return {"fill": fill, "words": 2 * (WORKERS - 1) / fill}


def _learnt(lab: Lab, method: Method) -> tuple[str, str]:
    found = lab.run(method)
    return f"{found.accuracy:.1%}", f"{found.final_loss:.3f}"


def epochs(lab: Lab, method: Method, workers: int, network: Network) -> list[float]:
    """Seconds per step, the mean of every epoch of VGG-16."""
    length = 2 if lab.quick else digits(8).epoch(workers)
    computing_s = compute_s(16, BATCHES[0])
    if not method.follows_data:
        return [computing_s + lab.seconds(method, workers, VGG_16, network)] * (lab.steps(method, workers) // length)
    seconds = lab.run(method, workers).seconds(VGG_16, network)
    return [
        computing_s + statistics.fmean(seconds[start : start + length])
        for start in range(0, len(seconds) - length + 1, length)
    ]


def figure_15(lab: Lab) -> Section:
    """The same in every epoch."""
    network, optimal = MAIN[0], {14: Method(teams=7, sag="b"), 12: Method(teams=6, sag="b")}
    found = {size: {each: epochs(lab, each, size, network) for each in methods} for size, methods in TEAMS.items()}
    claims, rows = [], []
    for size, of in found.items():
        for most, name in ((size, ""), (size - 1, ", with d = P left aside")):
            share = 100 * _part_fastest(optimal[size], {each: of[each] for each in of if each.teams <= most})
            title = f"{size} workers: epochs in which {optimal[size]} is fastest{name}"
            claims.append(Claim.number(title, share, 100, "%"))
        for each, values in of.items():
            times = (f"{1e3 * value:.2f}" for value in (min(values), statistics.fmean(values), max(values)))
            rows.append((f"{size}", str(each), *times))

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9, 4)
        for axes, (size, of) in zip(figure.subplots(1, 2), found.items(), strict=True):
            for each, values in of.items():
                axes.plot(range(1, len(values) + 1), [1e3 * value for value in values], "o-", label=str(each))
            axes.set_title(f"{size} workers, {network}")
            axes.set_xlabel("epoch")
            axes.set_ylabel("ms per step")
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=7, loc="lower left", ncols=2)

    columns = ("workers", "", "least, ms", "mean, ms", "most, ms")
    text = text_of("Figure 15", network=network)
    return Section("Figure 15: time of every epoch", "simulated", text, claims, columns, rows, draw)


def _part_fastest(method: Method, seconds: dict[Method, list[float]]) -> float:
    """The part of epochs in which no other method takes less time."""
    return statistics.fmean(own <= min(others) for own, *others in zip(seconds[method], *seconds.values(), strict=True))


def with_density(lab: Lab, depth: int, density: float, network: Network, batch: int) -> float:
    """A step of SparDL with one team."""
    parameters = {16: VGG_16, 19: VGG_19}[depth]
    return compute_s(depth, batch) + lab.seconds(Method(density=density), WORKERS, parameters, network)


def figure_16(lab: Lab) -> Section:
    """The part that is kept: time and accuracy."""
    paper = {16: (0.21, 0.75), 19: (0.22, 0.70)}
    claims = []
    for network in MAIN:
        for depth, numbers in paper.items():
            times = [with_density(lab, depth, each, network, BATCHES[0]) for each in DENSITIES]
            found = [after / before for before, after in itertools.pairwise(times)]
            pairs = itertools.pairwise(DENSITIES)
            names = [f"VGG-{depth}, {network}: {after:g} / {before:g}" for before, after in pairs]
            claims += [Claim.number(*each) for each in zip(names[:2], found[:2], numbers, strict=True)]
            claims += [Claim.at_least(*each, 0.95) for each in zip(names[2:], found[2:], strict=True)]
    settings = [(network, batch) for network in NETWORKS for batch in BATCHES]
    rows = []
    for density in DENSITIES:
        times = [1e3 * with_density(lab, 16, density, network, batch) for network, batch in settings]
        # Of the small model, 1e-5 would be less than an entry per block.
        learnt = _learnt(lab, Method(density=density)) if density > 1e-5 else ("", "")
        rows.append((f"{density:g}", *(f"{time:.2f}" for time in times), *learnt))
    rows.append(("dense", *([""] * len(settings)), *_learnt(lab, DENSE)))
    columns = ("k/n", *(f"ms at {network}, batch {batch}" for network, batch in settings), "accuracy", "loss")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for network in NETWORKS:
            times = [with_density(lab, 16, each, network, BATCHES[0]) for each in DENSITIES]
            axes.loglog(DENSITIES, [each / times[0] for each in times], "o-", label=str(network))
        words = [1, paper[16][0], paper[16][0] * paper[16][1]]
        axes.loglog(DENSITIES[:3], words, "kx", label="the paper, in words")
        axes.set_xlabel("k/n")
        axes.set_ylabel("training time / that with k/n = 0.1, VGG-16")
        axes.legend(fontsize=8)

    steps = lab.steps(SPARDL, WORKERS)
    many = [with_density(lab, 16, density, MAIN[0], BATCHES[1]) for density in DENSITIES]
    wide = [after / before for before, after in itertools.pairwise(many)]
    text = text_of("Figure 16", steps=steps, wide=wide, sixteen=linear_next(0.21), nineteen=linear_next(0.22))
    return Section("Figure 16: the part that is kept", "simulated", text, claims, columns, rows, draw)


def linear_next(first: float) -> float:
    """T(1e-3) / T(1e-2), if T(1e-2) / T(1e-1) is ``first`` and T is linear in k."""
    slope = (1 - first) / (1e-1 - 1e-2)
    return (first - slope * (1e-2 - 1e-3)) / first


def figure_17(lab: Lab) -> Section:
    """Residuals."""
    teams = {"d = 1": {}, "B-SAG, d = 7": {"teams": 7, "sag": "b"}}
    names = {"global": "global (GRES)", "partial": "partial (PRES)", "local": "local (LRES)"}
    runs = {
        f"{title}, {name}": lab.run(Method(**settings, collection=collection))  # type: ignore[arg-type]
        for title, settings in teams.items()
        for collection, name in names.items()
    }
    rows = [(name, f"{each.accuracy:.1%}", f"{each.final_loss:.3f}") for name, each in runs.items()]
    draw = _lines([(name, _smooth(each.losses)) for name, each in runs.items()], "step", "loss, mean of ten steps")
    columns = ("", "accuracy", "loss in the end")
    text = text_of("Figure 17", steps=lab.steps(SPARDL, WORKERS))
    return Section("Figure 17: residual collection", "measured", text, (), columns, rows, draw)


def _smooth(losses: Sequence[float], length: int = 10) -> list[float]:
    """Means of so many in a row."""
    return [statistics.fmean(losses[start : start + length]) for start in range(max(1, len(losses) - length + 1))]


def _introduction() -> str:
    sizes = {"vgg": digits(8).make(), "lstm": words(64).make()}
    numbers = {name: sum(each.numel() for each in model.parameters()) for name, model in sizes.items()}
    times = {f"of_{depth}": [1e3 * compute_s(depth, batch) for batch in BATCHES] for depth in (16, 19)}
    return text_of("Introduction", **numbers, **times)


def make(options: argparse.Namespace) -> Page:
    """The page."""
    torch.set_num_threads(1)  # sums of short vectors; more threads only wait for each other
    lab = Lab(options.quick)
    sections = (
        table_1(lab),
        figure_7(lab),
        figure_8(lab),
        figure_9(lab),
        figure_10(lab),
        figure_12(lab),
        figures_13_14(lab),
        figure_15(lab),
        figure_16(lab),
        figure_17(lab),
        figure_18(lab),
    )
    return Page("The SparDL paper, simulated", _introduction(), sections, "recipes.paper.spardl")


if __name__ == "__main__":
    run("recipes.paper.spardl", "The evaluation of the SparDL paper.", make)
