"""Figures 6 to 11 of the DeAR paper, simulated: five models on 64 workers, at 10GbE and 100GbIB.

    python -m recipes.paper.dear_figures
    python -m recipes.paper.dear_figures --markdown docs/results/paper_dear_figures.md

Computing times and networks are those of :mod:`recipes.paper.dear_table2`; nothing is fitted to any result.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ddp_hooks.comm import AlphaBeta
from ddp_hooks.planning import Ddp, Network, Strategy, simulate
from ddp_hooks.planning.step import collective_s
from recipes.benchmarks.tuner_replay import Curve, SearchName, trials_needed
from recipes.paper.bounds import baseline_bound_s, dear_bound_s
from recipes.paper.dear_table2 import ALPHA_S, NETWORKS, SIZES_MB, TENSOR_WISE, the_papers_dear
from recipes.paper.models import NAMES, WORKERS, step_of
from recipes.paper.page import Claim, Page, Section, prose, run
from recipes.paper.strategies import ByteScheduler, Horovod, MgWfbp

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODULE = "recipes.paper.dear_figures"
BUFFER_MB = 25.0  # section VI-D, of all systems
FIXED_MB = 5.0  # section VI-G, DeAR-FB
NEARBY_LAYERS = 4  # section VI-G, DeAR-NL
HOROVOD_MB = 64.0  # section VI-G, Horovod-FB
TUNED_MODELS = ("resnet50", "densenet201", "bert")  # Fig. 9
BATCHES = {"resnet50": (16, 32, 64), "bert": (16, 32, 64)}  # Fig. 11; the last is that of Table I
CNNS = ("resnet50", "densenet201", "inception_v4")
SLOW = 0.9  # section VI-C, of ByteScheduler
OUT_OF_MEMORY = ("MG-WFBP", "bert_large")  # Fig. 7
TENS = 10  # of trials, section VI-G
WAITING = "Horovod, waiting"  # whose cycles wait for all-reduces; not compared, but shown
SEEDS = range(10)
NOISE = 0.01  # of a trial, Fig. 10


PROSE = prose(Path(__file__).with_name("dear_figures.md"))


@dataclass(frozen=True)
class Place:
    """A network of the paper's, with a latency.

    Args:
        network: its name.
        alpha_s: seconds per message.
    """

    network: str
    alpha_s: float

    def __str__(self) -> str:
        return f"{self.network}, {self.alpha_s * 1e6:.3g} µs"

    @property
    def described(self) -> Network:
        """For the simulator."""
        return Network(WORKERS, AlphaBeta(self.alpha_s, 1 / NETWORKS[self.network]), native=True)


# Section II-D's latency is that of short messages at 10GbE. NCCL passes long ones on in pieces, which hides latency,
# and the paper has none for InfiniBand: a fifth of it stands for both.
PLACES = (
    Place("10GbE", ALPHA_S),
    Place("10GbE", ALPHA_S / 5),
    Place("100GbIB", ALPHA_S / 5),
    Place("46 Gbit/s", ALPHA_S / 5),  # that of Table II's column for InfiniBand
)


@dataclass(frozen=True)
class Settings:
    """What is simulated.

    Args:
        models: names, see :mod:`recipes.paper.models`.
        sizes_mb: the grid that stands for what Bayesian optimisation finds.
        seeds: of the searches of Fig. 10.
    """

    models: tuple[str, ...] = NAMES
    sizes_mb: tuple[float, ...] = SIZES_MB
    seeds: Sequence[int] = SEEDS

    def among(self, models: Sequence[str]) -> list[str]:
        """Those of these that are simulated."""
        return [model for model in models if model in self.models]


def horovod(fusion_mb: float) -> Horovod:
    """Horovod with NCCL, which queues all-reduces, and with its response cache."""
    return Horovod(fusion_mb, waits=False)


def step_s(strategy: Strategy, model: str, place: Place, factor: float = 1.0) -> float:
    """Seconds per step."""
    return simulate(strategy, step_of(model, factor), place.described).step_s


def best_s(make: Callable[[float], Strategy], model: str, place: Place, sizes_mb: Sequence[float]) -> float:
    """With the best of some sizes, which stands for what Bayesian optimisation finds."""
    return min(step_s(make(mb), model, place) for mb in sizes_mb)


# -- Fig. 6 -----------------------------------------------------------------------------------------------------------


def without_fusion(settings: Settings) -> Section:
    """Fig. 6: every tensor by itself."""
    compared: dict[str, Strategy] = {
        "WFBP": Ddp(TENSOR_WISE),
        "ByteScheduler": ByteScheduler(credit=1, negotiates=True),  # NCCL runs one after the other
        "DeAR": the_papers_dear(TENSOR_WISE),
    }
    times = _times(compared, settings.models, PLACES)
    speedups = {key: {name: each["WFBP"] / each[name] for name in compared} for key, each in times.items()}
    claims = []
    for place in PLACES:
        of_place = {model: each for (where, model), each in speedups.items() if where == place}
        gains = [100 * (each["DeAR"] - 1) for each in of_place.values()]
        claims += [
            Claim(f"{place}: DeAR over WFBP, least", min(gains), 6, 19, "%"),
            Claim(f"{place}: DeAR over WFBP, most", max(gains), 6, 19, "%"),
        ]
        slow = [of_place[model]["ByteScheduler"] < SLOW for model in settings.among(CNNS)]
        what = f"{place}: CNNs with ByteScheduler below {SLOW}"
        claims.append(Claim.at_least(what, 100 * sum(slow) / len(slow), 50, "%"))  # "most cases, especially on CNNs"
    return Section(
        "Fig. 6: speed without tensor fusion",
        "simulated",
        PROSE["Fig. 6"],
        claims,
        ("network", "model", *(f"{name}, s" for name in compared), "ByteScheduler ÷ WFBP", "DeAR ÷ WFBP"),
        [
            (
                str(place),
                model,
                *(f"{times[place, model][name]:.3f}" for name in compared),
                f"{each['ByteScheduler']:.2f}",
                f"{each['DeAR']:.2f}",
            )
            for (place, model), each in speedups.items()
        ],
        partial(_draw_bars, speedups),
    )


def _times(
    compared: Mapping[str, Strategy], models: Sequence[str], places: Sequence[Place]
) -> dict[tuple[Place, str], dict[str, float]]:
    return {
        (place, model): {name: step_s(strategy, model, place) for name, strategy in compared.items()}
        for place in places
        for model in models
    }


# -- Fig. 7 -----------------------------------------------------------------------------------------------------------


def with_fusion(settings: Settings) -> Section:
    """Fig. 7: buffers of 25 MB."""
    compared: dict[str, Strategy] = {
        "Horovod": horovod(BUFFER_MB),
        "DDP": Ddp(BUFFER_MB),
        "MG-WFBP": MgWfbp(),
        "DeAR": the_papers_dear(BUFFER_MB),
        WAITING: Horovod(BUFFER_MB),
    }
    times = _times(compared, settings.models, PLACES)
    speedups = {key: {name: each["Horovod"] / each[name] for name in compared} for key, each in times.items()}
    claims = []
    for place in PLACES:
        gains = [
            100 * (times[place, model][name] / times[place, model]["DeAR"] - 1)
            for model in settings.models
            for name in compared
            if name not in ("DeAR", WAITING) and (name, model) != OUT_OF_MEMORY
        ]
        most, mean = (83, 36) if place.network == "10GbE" else (15, 8)
        if place.network == "10GbE":
            claims.append(Claim.number(f"{place}: DeAR over others, least", min(gains), 6, "%"))
        claims += [
            Claim.number(f"{place}: DeAR over others, most", max(gains), most, "%"),
            Claim.number(f"{place}: DeAR over others, mean", statistics.mean(gains), mean, "%"),
        ]
    for model in settings.among(("resnet50",)):
        compute_s = step_of(model).compute_s
        efficiency = 100 * compute_s / times[PLACES[2], model]["Horovod"]
        claims.append(Claim.number("100GbIB: Horovod's scaling efficiency, resnet50", efficiency, 91, "%"))
    return Section(
        "Fig. 7: speed with tensor fusion",
        "simulated",
        PROSE["Fig. 7"],
        claims,
        ("network", "model", *(f"{name}, s" for name in compared), "DeAR ÷ Horovod", "at most, Eq. 9"),
        [
            (
                str(place),
                model,
                *(f"{times[place, model][name]:.3f}" for name in compared),
                f"{each['DeAR']:.2f}",
                f"{perfect_gain(model, place):.2f}",
            )
            for (place, model), each in speedups.items()
        ],
        partial(_draw_bars, speedups),
    )


def perfect_gain(model: str, place: Place) -> float:
    """How many times as fast as a perfect baseline perfect DeAR is, without latency (the paper's Eqs. 7 to 9)."""
    step = step_of(model)
    half_s = collective_s(step.num_bytes, WORKERS, place.described.bytes_per_s)
    baseline_s = baseline_bound_s(step.forward_s, step.backward_s, 2 * half_s)
    return baseline_s / dear_bound_s(step.forward_s, step.backward_s, half_s, half_s)


# -- Fig. 8 -----------------------------------------------------------------------------------------------------------


def breakdown(settings: Settings) -> Section:
    """Fig. 8: what of communication is not hidden."""
    place = PLACES[0]
    compared: dict[str, Strategy] = {
        "Horovod": horovod(BUFFER_MB),
        "DeAR": the_papers_dear(BUFFER_MB),
        "RS-only": the_papers_dear(BUFFER_MB, halves=("reduce-scatter",)),
        "AG-only": the_papers_dear(BUFFER_MB, halves=("all-gather",)),
    }
    times = _times(compared, settings.models, [place])
    exposed = {
        model: {name: each[name] - step_of(model).compute_s for name in compared} for (_, model), each in times.items()
    }
    claims = [
        Claim.at_most(f"{model}: exposed, RS-only ÷ AG-only", _ratio(each["RS-only"], each["AG-only"]), 1.0)
        for model, each in exposed.items()
    ]
    claims += [
        Claim.at_most(f"{model}: exposed, DeAR ÷ Horovod", _ratio(each["DeAR"], each["Horovod"]), 1.0)
        for model, each in exposed.items()
    ]
    return Section(
        "Fig. 8: time breakdown",
        "simulated",
        PROSE["Fig. 8"],
        claims,
        ("model", "forward, s", "backward, s", *(f"exposed, {name}, s" for name in compared)),
        [
            (
                model,
                f"{step_of(model).forward_s:.3f}",
                f"{step_of(model).backward_s:.3f}",
                *(f"{each[name]:.3f}" for name in compared),
            )
            for model, each in exposed.items()
        ],
        partial(_draw_breakdown, exposed),
    )


def _ratio(first_s: float, second_s: float) -> float:
    """1 where both are nothing."""
    least = 1e-4
    return max(first_s, least) / max(second_s, least)


# -- Fig. 9 -----------------------------------------------------------------------------------------------------------


def fusions(settings: Settings) -> Section:
    """Fig. 9: how tensors are put together."""
    fixed: dict[str, Strategy] = {
        "DeAR, none": the_papers_dear(TENSOR_WISE),
        "DeAR-NL": the_papers_dear(BUFFER_MB, fusion_layers=NEARBY_LAYERS),
        "DeAR-FB": the_papers_dear(FIXED_MB),
        "Horovod-FB": horovod(HOROVOD_MB),
    }
    models = settings.among(TUNED_MODELS)
    times = _times(fixed, models, PLACES)
    for (place, model), each in times.items():
        each["Horovod-BO"] = best_s(horovod, model, place, settings.sizes_mb)
        each["DeAR-BO"] = best_s(the_papers_dear, model, place, settings.sizes_mb)
    claims = []
    for place in PLACES:
        of_place = [each for (where, _), each in times.items() if where == place]
        over_none = [each["DeAR, none"] / each["DeAR-BO"] for each in of_place]
        over_horovod = [100 * (each["Horovod-FB"] / each["DeAR-BO"] - 1) for each in of_place]
        low, high = (1.35, 4.54) if place.network == "10GbE" else (1.29, 1.78)
        least, most = (22, 56) if place.network == "10GbE" else (7, 14)
        claims += [
            Claim(f"{place}: DeAR-BO over none, least", min(over_none), low, high),
            Claim(f"{place}: DeAR-BO over none, most", max(over_none), low, high),
            Claim(f"{place}: DeAR-BO over Horovod-FB, least", min(over_horovod), least, most, "%"),
            Claim(f"{place}: DeAR-BO over Horovod-FB, most", max(over_horovod), least, most, "%"),
            Claim.at_least(
                f"{place}: DeAR-BO over the best other, least",
                min(min(v for name, v in each.items() if name != "DeAR-BO") / each["DeAR-BO"] for each in of_place),
                1.0,
            ),
        ]
    speedups = {key: {name: each["Horovod-FB"] / each[name] for name in each} for key, each in times.items()}
    names = [*fixed, "Horovod-BO", "DeAR-BO"]
    return Section(
        "Fig. 9: tensor fusion",
        "simulated",
        PROSE["Fig. 9"],
        claims,
        ("network", "model", *(f"{name}, s" for name in names)),
        [(str(place), model, *(f"{each[name]:.3f}" for name in names)) for (place, model), each in times.items()],
        partial(_draw_bars, speedups),
    )


# -- Fig. 10 ----------------------------------------------------------------------------------------------------------


def tuning_cost(settings: Settings) -> Section:
    """Fig. 10: trials that searches need."""
    place = PLACES[0]
    rows, claims, trials = [], [], {}
    for model in settings.among(TUNED_MODELS):
        steps_s = tuple(step_s(the_papers_dear(mb), model, place) for mb in settings.sizes_mb)
        curve = Curve(tuple(settings.sizes_mb), steps_s, NOISE)
        found = {
            search: [trials_needed(curve, search, seed) for seed in settings.seeds] for search in get_args(SearchName)
        }
        trials[model] = found
        rows.append(
            (
                model,
                *(f"{statistics.mean(found[name]):.1f} ± {statistics.pstdev(found[name]):.1f}" for name in found),
                f"{min(steps_s):.3f}",
                f"{max(steps_s):.3f}",
            )
        )
        claims += [
            Claim.at_least(f"{model}: trials, {name}", statistics.mean(found[name]), TENS, "")
            for name in ("random", "grid")
        ]
    return Section(
        "Fig. 10: tuning cost",
        "simulated",
        PROSE["Fig. 10"],
        claims,
        ("model", *(f"trials, {name}" for name in get_args(SearchName)), "best, s", "worst, s"),
        rows,
        partial(_draw_trials, trials),
    )


# -- Fig. 11 ----------------------------------------------------------------------------------------------------------


def batch_sizes(settings: Settings) -> Section:
    """Fig. 11: computing time in proportion to the batch."""
    compared: dict[str, Strategy] = {
        "Horovod": horovod(BUFFER_MB),
        "DDP": Ddp(BUFFER_MB),
        "MG-WFBP": MgWfbp(),
        "DeAR": the_papers_dear(BUFFER_MB),
    }
    place = PLACES[0]
    claims, rows, speedups = [], [], {}
    for model in settings.among(tuple(BATCHES)):
        for batch in BATCHES[model]:
            factor = batch / BATCHES[model][-1]
            times = {name: step_s(strategy, model, place, factor) for name, strategy in compared.items()}
            others = min(seconds for name, seconds in times.items() if name != "DeAR")
            what = f"{model}, batches of {batch}: DeAR over the best other"
            claims.append(Claim.at_least(what, others / times["DeAR"], 1))
            rows.append((model, str(batch), *(f"{WORKERS * batch / seconds:,.0f}" for seconds in times.values())))
            relative = {name: times["Horovod"] / seconds for name, seconds in times.items()}
            speedups[place, f"{model}, {batch}"] = relative
    return Section(
        "Fig. 11: batch sizes",
        "simulated",
        PROSE["Fig. 11"],
        claims,
        ("model", "batch", *(f"{name}, samples/s" for name in compared)),
        rows,
        partial(_draw_bars, speedups),
    )


# -- pictures ---------------------------------------------------------------------------------------------------------


def _draw_bars(speedups: Mapping[tuple[Place, str], Mapping[str, float]], figure: Figure) -> None:
    """A panel per network: for each model a bar per strategy."""
    places = list(dict.fromkeys(place for place, _ in speedups))
    figure.set_size_inches(4.5 * len(places) + 1, 3.8)
    for ax, place in zip(figure.subplots(1, len(places), squeeze=False)[0], places, strict=True):
        models = [model for where, model in speedups if where == place]
        names = list(speedups[place, models[0]])
        for index, name in enumerate(names):
            positions = [i + (index - (len(names) - 1) / 2) * 0.8 / len(names) for i in range(len(models))]
            ax.bar(positions, [speedups[place, model][name] for model in models], 0.8 / len(names), label=name)
        ax.axhline(1.0, color="black", linewidth=0.8)
        ax.set_xticks(range(len(models)), models, rotation=25, fontsize=8)
        ax.set_title(str(place), fontsize=9)
    figure.axes[0].set_ylabel("speed, relative")
    _legend(figure)


def _legend(figure: Figure) -> None:
    lines, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), fontsize=8)


def _draw_breakdown(exposed: Mapping[str, Mapping[str, float]], figure: Figure) -> None:
    figure.set_size_inches(3 * len(exposed) + 1, 3.8)
    for ax, (model, each) in zip(figure.subplots(1, len(exposed), squeeze=False)[0], exposed.items(), strict=True):
        step = step_of(model)
        names = list(each)
        ax.bar(names, [step.forward_s] * len(names), label="forward")
        ax.bar(names, [step.backward_s] * len(names), bottom=[step.forward_s] * len(names), label="backward")
        ax.bar(names, [max(0.0, each[name]) for name in names], bottom=[step.compute_s] * len(names), label="exposed")
        ax.set_title(model, fontsize=9)
        ax.tick_params(axis="x", rotation=45, labelsize=8)
    figure.axes[0].set_ylabel("seconds")
    _legend(figure)


def _draw_trials(trials: Mapping[str, Mapping[str, Sequence[int]]], figure: Figure) -> None:
    figure.set_size_inches(6, 3.6)
    ax = figure.subplots()
    searches = get_args(SearchName)
    for index, search in enumerate(searches):
        positions = [i + (index - (len(searches) - 1) / 2) * 0.25 for i in range(len(trials))]
        means = [statistics.mean(found[search]) for found in trials.values()]
        spread = [statistics.pstdev(found[search]) for found in trials.values()]
        ax.bar(positions, means, 0.25, yerr=spread, capsize=3, label=search)
    ax.set_xticks(range(len(trials)), list(trials))
    ax.set_ylabel("trials")
    ax.legend()


# -- the page ---------------------------------------------------------------------------------------------------------


def make(options: argparse.Namespace) -> Page:
    """All sections."""
    settings = Settings()
    if options.quick:
        settings = Settings(("resnet50",), (1.0, 10.0, 100.0), range(2))
    makers = (without_fusion, with_fusion, breakdown, fusions, tuning_cost, batch_sizes)
    return Page("Figures 6 to 11 of the DeAR paper", PROSE[""], [maker(settings) for maker in makers], MODULE)


def main(arguments: Sequence[str] | None = None) -> None:
    run(MODULE, "DeAR's figures 6 to 11, simulated.", make, arguments)


if __name__ == "__main__":
    main()
