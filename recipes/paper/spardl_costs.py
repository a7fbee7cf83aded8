"""What communication costs in the SparDL paper: Table I, and Figures 8, 9 and 12; and what all its sections share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddp_hooks.comm import num_rounds
from recipes.benchmarks import workloads
from recipes.benchmarks.sparse_costs import Cost, lines
from recipes.paper.page import Claim, Section, prose
from recipes.paper.spardl_training import Messages, Method, Network, Run, digits, messages_of_noise, train, vgg, words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROSE = prose(Path(__file__).with_name("spardl.md"))
WORKERS = 14  # the paper's cluster
NETWORKS = tuple(Network(gbit_s, alpha_s) for gbit_s in (1, 10) for alpha_s in (50e-6, 200e-6))
MAIN = NETWORKS[0], NETWORKS[2]  # those of claims: both rates, with the lower latency
A40_FLOP_S, UTILISATION = 37.4e12, 0.3  # float32, NVIDIA's data sheet; an assumption
BATCHES = (32, 128)  # per worker, an assumption; the first is that of claims
BACKWARD = 2  # times the forward's operations

SPARDL, TOPKA, TOPKDSA, OKTOPK, GTOPK = (
    Method(name) for name in ("spardl", "topka", "topkdsa", "oktopk", "gtopk")
)
BASELINES = (TOPKDSA, TOPKA, OKTOPK)  # in the order of section IV-B


@dataclass(frozen=True)
class Case:
    """A case of Table II, and times over SparDL's in words: of communication, and of training.

    Args:
        name: of the model.
        parameters: of it.
        task: whose gradients stand for its own.
        communication: section IV-B, of TopkDSA, TopkA, Ok-Topk.
        training: section IV-C, of what it calls TopkA, TopkDSA, Ok-Topk.
        depth: of a VGG.
    """

    name: str
    parameters: float
    task: str
    communication: tuple[float, float, float]
    training: tuple[float, float, float]
    depth: int | None = None


CASES = (
    Case("VGG-19", 20.1e6, "VGG", (6.4, 5.1, 1.6), (4.9, 4.0, 1.4), 19),
    Case("VGG-11", 9.2e6, "VGG", (5.6, 4.7, 2.2), (3.9, 3.3, 1.7), 11),
    Case("LSTM-IMDB", 35.2e6, "LSTM", (2.7, 3.8, 1.8), (2.6, 3.6, 1.7)),
    Case("LSTM-PTB", 66e6, "LSTM", (5.0, 4.5, 2.3), (4.6, 4.3, 2.2)),
)


@cache
def compute_s(depth: int, batch: int) -> float:
    """Forward and backward of a VGG on images of 32 × 32 pixels, at the assumed part of an A40's operations."""
    with torch.device("meta"):
        layers = workloads.trace(vgg(depth, 100), lambda model: model(torch.empty(1, 3, 32, 32)))
    flops = sum(layer.forward_flops for layer in layers)
    return (1 + BACKWARD) * flops * batch / (A40_FLOP_S * UTILISATION)


@dataclass(frozen=True)
class Lab:
    """Trainings, each done once, and what their messages take.

    Args:
        quick: a smoke test: smaller models, and a few steps.
    """

    quick: bool = False

    def steps(self, method: Method, workers: int) -> int:
        """Of a training: ten epochs with 14 workers, which learn, and in which Ok-Topk estimates all anew; else half.

        TopkDSA has as many entries as it will have long before, and with other numbers of workers only time is shown.
        """
        short = method.name == "topkdsa" or not method.adjusts or (method.name == "spardl" and workers != WORKERS)
        return 3 if self.quick else 64 if short else 130

    def run(self, method: Method, workers: int = WORKERS, task: str = "VGG") -> Run:
        """Train the small model."""
        return _trained(self, method, workers, task)

    def seconds(
        self,
        method: Method,
        workers: int,
        parameters: float,
        network: Network,
        task: str = "VGG",
        waiting: bool = True,
    ) -> float:
        """Of one exchange of a model with so many parameters; the mean over steps, where they differ."""
        if not method.follows_data:
            messages = _of_any_data(method, workers, self.noise_entries)
            return messages.seconds(network.cost(method.density * parameters / self.noise_entries))
        every = 1 if method.name == "oktopk" else 8
        return self.run(method, workers, task).mean_s(parameters, network, every, waiting)

    @property
    def noise_entries(self) -> int:
        """Of exchanges whose lengths depend on nothing else."""
        return 280 if self.quick else 5000


@cache
def _trained(lab: Lab, method: Method, workers: int, task: str) -> Run:
    tasks = {"VGG": lambda: digits(32 if lab.quick else 8), "LSTM": lambda: words(8 if lab.quick else 64)}
    steps = lab.steps(method, workers)
    # Steps 64 to 127 hold one estimate of Ok-Topk's regions, and two of its thresholds.
    timed = slice(64, 128) if steps > 64 else slice(steps // 2, steps)
    return train(tasks[task](), method, workers, steps, timed)


@cache
def _of_any_data(method: Method, workers: int, k: int) -> Messages:
    return messages_of_noise(method, workers, k)


def text_of(title: str, **numbers: Any) -> str:
    """The text of a section, with numbers in it."""
    return PROSE[title].format(**numbers)


def bars(
    names: Sequence[str], groups: Sequence[tuple[str, Sequence[float]]], ylabel: str, turned: int = 0
) -> Callable[[Figure], None]:
    """Groups of bars, side by side; their names turned by so many degrees."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, (label, values) in enumerate(groups):
            width = 0.8 / len(groups)
            axes.bar([place + index * width for place in range(len(names))], values, width, label=label)
        places = [place + 0.4 - 0.4 / len(groups) for place in range(len(names))]
        axes.set_xticks(places, names, fontsize=8, rotation=turned)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_ylabel(ylabel)
        axes.legend(fontsize=8)

    return draw


def table_1(lab: Lab) -> Section:
    """Rounds and words of the algorithms themselves."""
    counted = lines(4 if lab.quick else WORKERS)
    claims: list[Claim] = []
    for each in counted:
        claims.append(_between(f"{each.name}: rounds", each.counted.rounds, each.least.rounds, each.most.rounds))
        words_k = (round(cost.words / each.k, 6) for cost in (each.counted, each.least, each.most))
        claims.append(_between(f"{each.name}: words / k", *words_k))
    names = [each.name.replace("SparDL, ", "") for each in counted]
    ours = [each.counted.words / each.k for each in counted]
    most = [each.most.words / each.k for each in counted]
    draw = bars(names, [("counted", ours), ("Table I, at most", most)], "words / k", turned=60)
    title = f"Table I: rounds and words, {counted[0].world_size} workers"
    return Section(title, "counted", text_of("Table I"), claims, draw=draw)


def _between(what: str, ours: float, least: float, most: float) -> Claim:
    return Claim.at_most(what, ours, most, "") if least == 0 else Claim(what, ours, least, most, "")


def ratios(lab: Lab, case: Case, network: Network, waiting: bool = True) -> tuple[float, ...]:
    """Communication of the baselines over SparDL's."""
    own = lab.seconds(SPARDL, WORKERS, case.parameters, network)
    return tuple(lab.seconds(each, WORKERS, case.parameters, network, case.task, waiting) / own for each in BASELINES)


def formula_s(cost: Cost, parameters: float, network: Network) -> float:
    """Of rounds and of words per k, at k/n = 0.01."""
    price = network.cost()
    return cost.rounds * price.alpha_s + cost.words * 4 * 0.01 * parameters * price.beta_s_per_byte


def figure_8(lab: Lab) -> Section:
    """Communication of the four cases."""
    claims = [
        Claim.number(f"{case.name}, {network}: {method} / SparDL", ours, paper)
        for case in CASES
        for network in MAIN
        for method, ours, paper in zip(BASELINES, ratios(lab, case, network), case.communication, strict=True)
    ]
    rows = [_row_8(lab, case, network) for case in CASES for network in NETWORKS]
    baselines = (f"{each}, ×" for each in BASELINES)
    without = (f"{each}, × without waiting" for each in (TOPKDSA, OKTOPK))
    columns = ("model", "gradients", "network", "SparDL, ms", *baselines, *without)
    columns += ("Ok-Topk by Table I, ×", "besides messages, ms")
    rows += _of_noise(lab, len(columns))
    dsa, ok = ({task: _entries(lab, method, task) for task in ("VGG", "LSTM")} for method in (TOPKDSA, OKTOPK))
    text = text_of("Figure 8", dsa=dsa, ok=ok)

    def draw(figure: Figure) -> None:
        figure.set_size_inches(8, 6)
        for axes, case in zip(figure.subplots(2, 2).flat, CASES, strict=True):
            for index, network in enumerate(MAIN):
                places = [place + 0.4 * index for place in range(3)]
                axes.bar(places, ratios(lab, case, network), 0.4, label=f"ours, {network}")
            axes.plot([place + 0.2 for place in range(3)], case.communication, "kx", label="the paper, in words")
            axes.axhline(1, color="grey", linewidth=0.8)
            axes.set_xticks([place + 0.2 for place in range(3)], [str(each) for each in BASELINES])
            axes.set_title(case.name)
            axes.set_ylabel("communication / SparDL's")
        figure.axes[0].legend(fontsize=7)

    return Section("Figure 8: communication per update, 14 workers", "simulated", text, claims, columns, rows, draw)


def _entries(lab: Lab, method: Method, task: str) -> float:
    """Of the sum, over k; the mean of the timed steps."""
    found = lab.run(method, WORKERS, task)
    return statistics.fmean(found.filled[found.timed])


def _row_8(lab: Lab, case: Case, network: Network) -> tuple[str, ...]:
    own = lab.seconds(SPARDL, WORKERS, case.parameters, network)
    found = ratios(lab, case, network)
    dsa, _, ok = ratios(lab, case, network, waiting=False)
    rounds, share = 2 * (WORKERS + num_rounds(WORKERS)), (WORKERS - 1) / WORKERS
    ends = (formula_s(Cost(rounds, words_k * share), case.parameters, network) / own for words_k in (2, 6))
    besides = implied_addition(found[1], case.communication[1]) * own
    numbers = (*found, dsa, ok)
    formula = " to ".join(f"{ratio:.2f}" for ratio in ends)
    cells = (f"{ratio:.2f}" for ratio in numbers)
    return case.name, case.task, str(network), f"{1e3 * own:.2f}", *cells, formula, f"{1e3 * besides:.1f}"


def _of_noise(lab: Lab, num_columns: int) -> Iterable[tuple[str, ...]]:
    """TopkDSA, if gradients were noise of which workers have a part in common."""
    network, k = MAIN[0], lab.noise_entries
    case = CASES[0]
    own = lab.seconds(SPARDL, WORKERS, case.parameters, network)
    for shared in (0.0, 0.5, 0.9, 1.0):
        messages = messages_of_noise(TOPKDSA, WORKERS, k, 0.01, shared)
        seconds = messages.seconds(network.cost(0.01 * case.parameters / k))
        gradients = f"noise, {shared:.0%} in common"
        found = case.name, gradients, str(network), f"{1e3 * own:.2f}", f"{seconds / own:.2f}"
        yield *found, *([""] * (num_columns - len(found)))


def implied_addition(before: float, after: float) -> float:
    """What, added to both sides of a ratio, makes it ``after``; in units of the denominator.

    If training is computing plus communication and nothing overlaps, it is computing that makes the ratio of training
    times from that of communication.
    """
    return (before - after) / (after - 1)


def figure_9(lab: Lab) -> Section:
    """Training of the four cases, and what follows from the paper's own numbers."""
    claims: list[Claim] = []
    rows = []
    for case in CASES:
        printed = (case.training[1], case.training[0], case.training[2])  # in the order of BASELINES
        for method, *numbers in zip(BASELINES, case.communication, printed, case.training, strict=True):
            communication, first, second = numbers
            computing = [f"{implied_addition(communication, each):.2f}" for each in (first, second)]
            cells = f"{communication:g}", f"{first:g}", computing[0], f"{second:g}", computing[1]
            rows.append((case.name, str(method), *cells))
        if case.depth is not None:
            computing_s = compute_s(case.depth, BATCHES[0])
            claims += [claim for network in MAIN for claim in _claims_9(lab, case, network, computing_s)]
    given = "communication", "training as printed", "so computing", "names exchanged", "so computing"
    columns = ("model", "method", *given)
    names = [f"{case.name}, {method}" for case in CASES for method in BASELINES]
    orders = [("as printed", [float(row[4]) for row in rows]), ("names exchanged", [float(row[6]) for row in rows])]
    draw = bars(names, orders, "computing that follows / SparDL's communication", turned=90)
    text = text_of("Figure 9", **_of_the_papers_numbers(lab))
    return Section("Figure 9: training time, 14 workers", "simulated", text, claims, columns, rows, draw)


def _claims_9(lab: Lab, case: Case, network: Network, computing_s: float) -> Iterable[Claim]:
    own = lab.seconds(SPARDL, WORKERS, case.parameters, network)
    for method, ratio, paper in zip(BASELINES, ratios(lab, case, network), case.training, strict=True):
        ours = (computing_s + ratio * own) / (computing_s + own)
        yield Claim.number(f"{case.name}, {network}: {method} / SparDL", ours, paper)


def _of_the_papers_numbers(lab: Lab) -> dict[str, float]:
    """Computing of VGG-19 that follows from TopkDSA's and TopkA's ratios, and the images for which it is enough."""
    case = CASES[0]
    pairs = zip(case.communication[:2], case.training[:2], strict=True)
    part = statistics.fmean(implied_addition(*pair) for pair in pairs)
    slow_s, fast_s = (part * lab.seconds(SPARDL, WORKERS, case.parameters, network) for network in MAIN)
    image_s = compute_s(19, 1)
    return {"ms": 1e3 * slow_s, "batch": slow_s / image_s, "fast_ms": 1e3 * fast_s, "fast_batch": fast_s / image_s}


def speeds(lab: Lab, network: Network) -> dict[tuple[int, Method], float]:
    """Epochs per second over those of TopkDSA with 8 workers, by workers and method; VGG-19."""
    case, sizes = CASES[0], (8, 14) if lab.quick else (8, 10, 12, 14)
    computing_s = compute_s(19, BATCHES[0])

    def epochs_s(method: Method, workers: int) -> float:
        return workers / (computing_s + lab.seconds(method, workers, case.parameters, network))

    reference = epochs_s(TOPKDSA, 8)
    chosen = [(size, each) for size in sizes for each in (GTOPK, *BASELINES, SPARDL) if size == 8 or each != GTOPK]
    return {(size, each): epochs_s(each, size) / reference for size, each in chosen}


def figure_12(lab: Lab) -> Section:
    """Speed with more workers."""
    found = {network: speeds(lab, network) for network in NETWORKS}
    claims = []
    for network in MAIN:
        of = found[network]
        claims.append(Claim.at_least(f"{network}, 8 workers: SparDL / gTopk", of[8, SPARDL] / of[8, GTOPK], 1))
        for each in BASELINES:
            lead = {size: of[size, SPARDL] / of[size, each] for size in (8, 14)}
            claims.append(Claim.at_least(f"{network}: lead over {each}, 14 / 8 workers", lead[14] / lead[8], 1))
    keys = list(found[MAIN[0]])
    rows = [(f"{key[0]}", str(key[1]), *(f"{found[network][key]:.2f}" for network in NETWORKS)) for key in keys]

    def draw(figure: Figure) -> None:
        figure.set_size_inches(8, 4)
        for axes, network in zip(figure.subplots(1, 2), MAIN, strict=True):
            for method in (GTOPK, *BASELINES, SPARDL):
                points = [(size, found[network][size, each]) for size, each in keys if each == method]
                axes.plot(*zip(*points, strict=True), "o-", label=str(method))
            axes.set_title(str(network))
            axes.set_xlabel("workers")
            axes.set_ylabel("speed / TopkDSA's with 8 workers")
        figure.axes[0].legend(fontsize=8)

    columns = ("workers", "method", *(str(network) for network in NETWORKS))
    title = "Figure 12: speed with more workers, VGG-19"
    return Section(title, "simulated", text_of("Figure 12"), claims, columns, rows, draw)


LARGE = {"ResNet-50": (23.5e6, 2.3), "BERT": (133.5e6, 2.0)}  # section IV-D: parameters, and Ok-Topk over SparDL


def figure_10(lab: Lab) -> Section:
    """Communication of two larger models."""
    found = {
        (name, network): (lab.seconds(SPARDL, WORKERS, size, network), lab.seconds(OKTOPK, WORKERS, size, network))
        for name, (size, _) in LARGE.items()
        for network in NETWORKS
    }
    claims = [
        Claim.number(f"{name}, {network}: Ok-Topk / SparDL", found[name, network][1] / found[name, network][0], paper)
        for name, (_, paper) in LARGE.items()
        for network in MAIN
    ]
    rows = [
        (name, str(network), *(f"{1e3 * seconds:.1f}" for seconds in times), f"{times[1] / times[0]:.2f}")
        for (name, network), times in found.items()
    ]
    columns = ("model", "network", "SparDL, ms", "Ok-Topk, ms", "Ok-Topk / SparDL")
    title = "Figure 10: communication per update of larger models, 14 workers"
    return Section(title, "simulated", text_of("Figure 10"), claims, columns, rows)


FEW_WORKERS = 5
RDMA = tuple(Network(100, alpha_s) for alpha_s in (5e-6, 50e-6))
OF_FIVE = (4.0, 3.4, 3.0)  # section IV-J, VGG-19, in the order of BASELINES
BERT_OF_FIVE = 4.2  # Ok-Topk


def figure_18(lab: Lab) -> Section:
    """Communication of five workers on a fast network."""
    size, bert = CASES[0].parameters, LARGE["BERT"][0]
    claims, rows = [], []
    for network in RDMA:
        own, bert_own = (lab.seconds(SPARDL, FEW_WORKERS, each, network) for each in (size, bert))
        ratios = [lab.seconds(each, FEW_WORKERS, size, network) / own for each in BASELINES]
        of_bert = lab.seconds(OKTOPK, FEW_WORKERS, bert, network) / bert_own
        pairs = zip(BASELINES, ratios, OF_FIVE, strict=True)
        claims += [Claim.number(f"VGG-19, {network}: {method} / SparDL", ours, paper) for method, ours, paper in pairs]
        claims.append(Claim.number(f"BERT, {network}: Ok-Topk / SparDL", of_bert, BERT_OF_FIVE))
        cells = (f"{ratio:.2f}" for ratio in (*ratios, of_bert))
        rows.append((str(network), f"{1e3 * own:.2f}", *cells, f"{1e3 * bert_own:.2f}"))
    baselines = (f"{each}, ×" for each in BASELINES)
    columns = ("network", "SparDL, VGG-19, ms", *baselines, "Ok-Topk with BERT, ×", "SparDL, BERT, ms")
    title = "Figure 18: communication per update, 5 workers with RDMA"
    return Section(title, "simulated", text_of("Figure 18"), claims, columns, rows)
