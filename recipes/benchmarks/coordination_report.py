"""Tables, pictures and the page of the benchmark of coordination."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_hooks.comm import num_rounds
from recipes.benchmarks.coordination import VARIANTS
from recipes.benchmarks.harness import Run
from recipes.common.pages import Page, Part, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARE_AIMED_AT = 0.01  # of a step, at eight workers
WORKERS_AIMED_AT = 8
PATTERNS = {
    "burst": "all tensors asked for at once",
    "spread": "tensors asked for one after the other during the backward",
}
CONTROL_COLUMNS = (
    *("P", "variant", "cycles", "sent by rank 0", "most", "bytes by rank 0", "most"),
    *("ms in cycles", "min–max", "of a step", "CPU ms", "ms/step"),
)
FABRIC_COLUMNS = ("variant", "ranks", "µs on the fabric", "by formula", "planner", "÷ planner", "MB into one rank")
GROUPING_COLUMNS = ("groups", "messages", "cycles", "s/step", "min–max", "× without groups")

INTRODUCTION = """\
What ranks send each other to agree on which tensors are ready everywhere, without the tensors. *coordinator*: every \
request travels to the first rank in every step, and its answer to all (Horovod before the paper); *hierarchical*: \
the same along a tree in which every rank hears from two others; *bitvector*: the response cache, a bit for each known \
name and an AND over ranks; *verified*: an order that was compared once, at the set-up, as the hooks of this package \
do. All of them all-reduce the same small tensors, between processes that share this machine's cores over its \
loopback interface, in turns in one run. Tables show medians over windows."""

LEGEND = """\
* `P`: workers. `sent`: messages of agreeing per step, by rank 0 and by the rank that sends most; `bytes` likewise.
  Those of *verified* are what its lanes have sent beyond what the data takes, as the fabric counts it.
* `ms in cycles`: in which the control thread of the slowest rank was in a cycle, per step, waiting for others included;
  `of a step`: as a share of a step of this length. More processes than cores wait for each other's turn. `CPU ms`: in
  which that thread really ran.
* `ms/step`: until everything is reduced, of the slowest rank; of a burst without any computing.
* `µs on the fabric`: one agreement of all ranks on the in-process fabric, by the generators that run between processes;
  a message takes {alpha_us:g} µs, and its receiver {handling_us:g} µs for each one after the other. Bytes cost nothing
  there. `by formula`: a closed form of the same, which a test compares with the fabric; where the fabric was too large
  there is nothing else. `planner`: what the simulator expects of `recipes.paper.strategies.Horovod`. For a bitvector
  that has an all-reduce in and out, two messages a round and no handling; here a round is one message and its handling.
  Its tree has no bitvector in front, and no tree for the answer.
* `groups`: gradients of {model} ({num_tensors} tensors) are reduced in as many groups of neighbours as are named, while
  a backward is slept; *none*: one by one. Whatever is ready in one cycle travels together, up to 64 MiB."""


def page(runs: Sequence[Run]) -> Page:
    """Make the page of runs."""
    parts: list[Part] = [INTRODUCTION]
    for run in runs:
        report = report_of(run.results)
        lines = "\n".join(f"* {line}" for line in targets(report))
        costs, grouping = report["fabric"]["costs"], report["grouping"]
        legend = LEGEND.format(
            alpha_us=costs["alpha_s"] * 1e6,
            handling_us=costs["handling_s"] * 1e6,
            model=grouping["model"],
            num_tensors=grouping["num_tensors"],
        )
        parts += ["## What was aimed at", lines, *_tables(report), "## Reading the columns", legend]
        parts += ["## Pictures", *_pictures(report)]
    return Page("What agreeing costs", parts, [run.origin for run in runs])


def report_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of a run by kind."""
    measured = [result for result in results if result["kind"] == "control"]
    fabric, grouping = (next(r for r in results if r["kind"] == kind) for kind in ("fabric", "grouping"))
    return {"control": {"job": measured[0]["job"], "measured": measured}, "fabric": fabric, "grouping": grouping}


def targets(report: Mapping[str, Any]) -> list[str]:
    """What was aimed at, with what was found."""
    job, lines = report["control"]["job"], list[str]()
    windows = list(_windows(report))
    verified = [each["all"] for _, _, name, each in windows if name == "verified"]
    if verified:
        most = max(max(each["messages"], each["bytes"]) for each in verified)
        lines.append(f"Verified schedule, nothing in steady state: {_met(most == 0)}, {most:g} messages or bytes.")
    cached = [(workers, pattern, each) for workers, pattern, name, each in windows if name == "bitvector"]
    if cached:
        nbytes = max(each["first"]["bytes"] / each["first"]["messages"] for _, _, each in cached)
        limit = -(-job["num_tensors"] // 8) + 8
        lines.append(f"Bitvector, at most {limit} bytes: {_met(nbytes <= limit)}, {nbytes:g} bytes.")
        as_rounds = all(
            abs(each["most"]["messages"] - each["most"]["cycles"] * num_rounds(workers)) < 1e-6
            for workers, _, each in cached
        )
        lines.append(f"Bitvector, ceil(log2 P) messages per rank and cycle: {_met(as_rounds)}.")
    aim = f"under {SHARE_AIMED_AT:.0%} of a step of {job['step_s'] * 1e3:g} ms at {WORKERS_AIMED_AT} workers"
    for pattern in job["patterns"]:
        at_aim = [each["most"] for workers, p, each in cached if (workers, p) == (WORKERS_AIMED_AT, pattern)]
        if at_aim:
            for what, key in (("from beginning to end", "control_s"), ("of the processor", "control_cpu_s")):
                share = statistics.median(each[key] for each in at_aim) / job["step_s"]
                met = _met(share < SHARE_AIMED_AT)
                lines.append(f"Bitvector, {aim}, {PATTERNS[pattern]}, {what}: {met}, {share:.2%}.")
            lines += _beside_a_verified_order(report, pattern, at_aim)
    return lines


def _beside_a_verified_order(
    report: Mapping[str, Any], pattern: str, agreeing: Sequence[Mapping[str, float]]
) -> Iterator[str]:
    """What one agreement takes, and whole steps with and without."""
    per_cycle = {
        key: statistics.median(each[key] / each["cycles"] for each in agreeing) * 1e3
        for key in ("control_cpu_s", "control_s")
    }

    def steps_ms(name: str) -> list[float]:
        places = ((each["most"]["step_s"] * 1e3, place) for *place, each in _windows(report))
        return [step_ms for step_ms, place in places if place == [WORKERS_AIMED_AT, pattern, name]]

    if steps_ms("verified"):
        bitvector, verified = (statistics.median(steps_ms(name)) for name in ("bitvector", "verified"))
        yield (
            f"There, {PATTERNS[pattern]}, one agreement takes {per_cycle['control_cpu_s']:.2f} ms of the processor and "
            f"{per_cycle['control_s']:.2f} ms from beginning to end, in which {WORKERS_AIMED_AT} processes take turns "
            f"with all else that they do; whole steps take {bitvector:.1f} ms, and {verified:.1f} ms with the verified "
            f"schedule."
        )


def _met(is_met: bool) -> str:
    return "met" if is_met else "not met"


def _windows(report: Mapping[str, Any]) -> Iterator[tuple[int, str, str, dict[str, Any]]]:
    """All windows between processes, with workers, pattern and variant."""
    for measured in report["control"]["measured"]:
        for pattern, variants in measured["windows"].items():
            for name, windows in variants.items():
                for each in windows:
                    yield measured["workers"], pattern, name, each


def _tables(report: Mapping[str, Any]) -> list[Table]:
    job, grouping = report["control"]["job"], report["grouping"]
    step_ms = f"{job['step_s'] * 1e3:g} ms"
    tables = [
        Table(
            f"{job['num_tensors']} tensors per step, {PATTERNS[pattern]}, steps of {step_ms}",
            CONTROL_COLUMNS,
            control_rows(report, pattern),
            text_columns=2,
        )
        for pattern in job["patterns"]
    ]
    title = f"Groups of {grouping['model']}'s gradients, {grouping['group_workers']} workers"
    return [
        *tables,
        Table("One agreement of many ranks", FABRIC_COLUMNS, fabric_rows(report)),
        Table(title, GROUPING_COLUMNS, grouping_rows(report)),
    ]


def control_rows(report: Mapping[str, Any], pattern: str) -> list[list[str]]:
    """One row per number of workers and variant."""
    rows, step_s = [], report["control"]["job"]["step_s"]
    for measured in report["control"]["measured"]:
        for name, windows in measured["windows"][pattern].items():
            control_s = [window["most"]["control_s"] for window in windows]
            rows.append([
                str(measured["workers"]),
                name,
                f"{_median(windows, 'most', 'cycles'):.1f}",
                *(f"{_median(windows, whose, 'messages'):.1f}" for whose in ("first", "most")),
                *(f"{_median(windows, whose, 'bytes'):.0f}" for whose in ("first", "most")),
                f"{statistics.median(control_s) * 1e3:.2f}",
                f"{min(control_s) * 1e3:.2f}–{max(control_s) * 1e3:.2f}",
                f"{statistics.median(control_s) / step_s:.2%}",
                f"{_median(windows, 'most', 'control_cpu_s') * 1e3:.2f}",
                f"{_median(windows, 'most', 'step_s') * 1e3:.1f}",
            ])  # fmt: skip
    return rows


def _median(windows: Sequence[Mapping[str, Any]], whose: str, what: str) -> float:
    return statistics.median(window[whose][what] for window in windows)


def fabric_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """One row per variant and number of ranks."""
    rows = []
    for point in report["fabric"]["points"]:
        found, formula_s, planner_s = point["fabric"], point["formula_s"], point["planner_s"]
        rows.append([
            point["variant"],
            f"{point['ranks']:,}",
            f"{found['seconds'] * 1e6:,.0f}" if found else "",
            f"{formula_s * 1e6:,.0f}",
            f"{planner_s * 1e6:,.0f}",
            f"{formula_s / planner_s:.2f}",
            f"{found['received_bytes'] / 1e6:.4g}" if found else "",
        ])  # fmt: skip
    return rows


def grouping_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """One row per number of groups: medians over rounds."""
    rows, windows = [], report["grouping"]["windows"]
    medians = {number: statistics.median(each["step_s"] for each in windows[number]) for number in windows}
    for number, each in windows.items():
        steps_s = [window["step_s"] for window in each]
        rows.append([
            _groups(number),
            f"{statistics.median(window['collectives'] for window in each):.1f}",
            f"{statistics.median(window['cycles'] for window in each):.1f}",
            f"{medians[number]:.3f}",
            f"{min(steps_s):.3f}–{max(steps_s):.3f}",
            f"{medians['0'] / medians[number]:.2f}" if "0" in medians else "",
        ])  # fmt: skip
    return rows


def _groups(number: str) -> str:
    return number if number != "0" else "none"


# -- pictures ----------------------------------------------------------------------------------------------------------


def _pictures(report: Mapping[str, Any]) -> list[Picture]:
    patterns = len(report["control"]["job"]["patterns"])
    drawn = {
        "Control: milliseconds of agreement per step, by workers": (_draw_control, (4.6 * patterns, 3.6)),
        "Ranks: seconds per agreement; dashed by formula, dotted the planner's": (_draw_ranks, (6.4, 4.2)),
        "Groups: seconds and messages per step": (_draw_groups, (8.4, 3.4)),
        "Sizes: of messages without and with groups": (_draw_sizes, (9.2, 3.4)),
    }
    if not report["fabric"]["points"]:  # nothing of what was asked for is negotiated
        del drawn["Ranks: seconds per agreement; dashed by formula, dotted the planner's"]
    return [Picture(title, partial(draw, report), size) for title, (draw, size) in drawn.items()]


def _draw_control(report: Mapping[str, Any], figure: Figure) -> None:
    """Between processes: milliseconds per step by workers, a panel per pattern."""
    job, measured = report["control"]["job"], report["control"]["measured"]
    for ax, pattern in zip(figure.subplots(1, len(job["patterns"]), squeeze=False)[0], job["patterns"], strict=True):
        for name in [each for each in job["variants"] if each != "verified"]:
            workers = [each["workers"] for each in measured]
            times_ms = [[w["most"]["control_s"] * 1e3 for w in each["windows"][pattern][name]] for each in measured]
            middle = [statistics.median(each) for each in times_ms]
            (line,) = ax.plot(workers, middle, "o-", color=_colour(name), label=name)
            ax.fill_between(workers, [*map(min, times_ms)], [*map(max, times_ms)], alpha=0.2, color=line.get_color())
        aim_ms = SHARE_AIMED_AT * job["step_s"] * 1e3
        ax.axhline(aim_ms, color="gray", linestyle=":", label=f"{SHARE_AIMED_AT:.0%} of a step")
        ax.set_yscale("log")
        ax.set_xticks([each["workers"] for each in measured])
        ax.set_xlabel("workers")
        ax.set_ylabel("ms of agreement per step")
        ax.set_title(PATTERNS[pattern], fontsize=8)
    figure.axes[0].legend(fontsize="small")


def _draw_ranks(report: Mapping[str, Any], figure: Figure) -> None:
    """On the fabric, and by formula where there are too many ranks: seconds per agreement."""
    ax, points = figure.subplots(), report["fabric"]["points"]
    for name in dict.fromkeys(point["variant"] for point in points):
        own = [point for point in points if point["variant"] == name]
        on_fabric = [point for point in own if point["fabric"]]
        colour = _colour(name)
        ax.plot([p["ranks"] for p in own], [p["formula_s"] for p in own], "--", color=colour, linewidth=1)
        ax.plot([p["ranks"] for p in own], [p["planner_s"] for p in own], ":", color=colour, linewidth=1)
        seconds = [point["fabric"]["seconds"] for point in on_fabric]
        ax.plot([p["ranks"] for p in on_fabric], seconds, "o", color=colour, label=name)
    ax.plot([], [], "--", color="gray", label="by formula")
    ax.plot([], [], ":", color="gray", label="planner")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("ranks")
    ax.set_ylabel("seconds per agreement")
    ax.legend(fontsize="small")


def _draw_groups(report: Mapping[str, Any], figure: Figure) -> None:
    """Seconds per step, and messages, by the number of groups."""
    windows = report["grouping"]["windows"]
    labels = [_groups(number) for number in windows]
    for ax, what, title in zip(
        figure.subplots(1, 2), ("step_s", "collectives"), ("seconds per step", "messages per step"), strict=True
    ):
        values = [[window[what] for window in each] for each in windows.values()]
        middle = [statistics.median(each) for each in values]
        below = [m - min(each) for m, each in zip(middle, values, strict=True)]
        above = [max(each) - m for m, each in zip(middle, values, strict=True)]
        ax.bar(labels, middle, yerr=[below, above], capsize=3)
        ax.set_xlabel("groups")
        ax.set_ylabel(title)


def _draw_sizes(report: Mapping[str, Any], figure: Figure) -> None:
    """How large messages are, without groups and with those of which steps took least time."""
    windows = report["grouping"]["windows"]
    grouped = [number for number in windows if number != "0"]
    best = min(grouped, key=lambda number: statistics.median(each["step_s"] for each in windows[number]), default=None)
    shown = [number for number in ("0", best) if number in windows]
    sizes = {number: _mean_sizes(windows[number]) for number in shown}
    axis = range(min(min(each) for each in sizes.values()), max(max(each) for each in sizes.values()) + 1)
    for ax, number in zip(figure.subplots(1, len(shown), squeeze=False, sharey=True)[0], shown, strict=True):
        ax.bar([_size(size) for size in axis], [sizes[number].get(size, 0) for size in axis])
        ax.set_title("without groups" if number == "0" else f"{number} groups", fontsize=9)
        ax.set_xlabel("size of a message, less than")
        ax.set_ylabel("messages per step")
        ax.tick_params(axis="x", rotation=60, labelsize=8)


def _mean_sizes(windows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    sizes = {int(size) for window in windows for size in window["sizes"]}
    return {size: statistics.mean(window["sizes"].get(str(size), 0) for window in windows) for size in sizes}


def _size(bit_length: int) -> str:
    """What is less than this power of two, as people write it."""
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if bit_length >= power:
            return f"{1 << bit_length - power} {unit}"
    return f"{1 << bit_length} B"


def _colour(variant: str) -> str:
    return f"C{VARIANTS.index(variant)}"
