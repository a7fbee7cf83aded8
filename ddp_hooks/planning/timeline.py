"""Timelines of training steps, measured or simulated: a picture, and a trace file for https://ui.perfetto.dev."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ddp_hooks.comm import Span

# By kind of span: the name of its track, or the first word of its own name. The colours are mostly Okabe and Ito's,
# which colour-blind readers can tell apart.
COLOURS: Final = {
    "forward": "#0072b2",
    "backward": "#009e73",
    "optimizer": "#e69f00",
    "wait": "#d62f1f",
    "all-reduce": "#7b4fa3",
    "reduce-scatter": "#cc79a7",
    "all-gather": "#56b4e9",
    "other": "#999999",
}
COMPUTE_TRACKS: Final = ("forward", "backward", "optimizer")
WAIT_TRACK: Final = "wait"

_ROW_INCHES = 0.28
_BAR_HEIGHT = 0.8  # of a row


@dataclass(frozen=True)
class Timeline:
    """Consecutive steps of one variant."""

    title: str  #: shown above the rows
    #: End of the step before the first one shown, then of each step shown, by the clock of the spans
    #: (``time.perf_counter()``).
    step_ends_s: Sequence[float]
    spans: Sequence[Span]  #: work by track; spans outside of the steps are left out, others are cut at the edges

    def __post_init__(self) -> None:
        if len(self.step_ends_s) < 2 or list(self.step_ends_s) != sorted(self.step_ends_s):
            raise ValueError(f"step_ends_s must be two or more rising times, got {list(self.step_ends_s)}")

    @property
    def start_s(self) -> float:
        return self.step_ends_s[0]

    def rows(self) -> dict[str, list[Span]]:
        """Return the spans of each row: computation, waits, communication; overlapping spans are in several rows."""
        shown = [part for span in self.spans if (part := cut(span, self.start_s, self.step_ends_s[-1])) is not None]
        first = (*COMPUTE_TRACKS, WAIT_TRACK)
        rows: dict[str, list[Span]] = {}
        for track in (*first, *sorted({span.track for span in shown} - {*first})):
            spans = sorted((span for span in shown if span.track == track), key=lambda span: span.start_s)
            lines = without_overlap(spans)
            for number, line in enumerate(lines):
                rows[track if len(lines) == 1 else f"{track} {number}"] = line
        return rows


def kind_of(span: Span) -> str:
    if span.track in COLOURS:
        return span.track
    return next((kind for kind in COLOURS if span.name.startswith(kind)), "other")


def cut(span: Span, start_s: float, end_s: float) -> Span | None:
    """Return the part of the span between two times, None if there is none."""
    start_s, end_s = max(span.start_s, start_s), min(span.end_s, end_s)
    return span._replace(start_s=start_s, end_s=end_s) if start_s < end_s else None


def without_overlap(spans: Iterable[Span]) -> list[list[Span]]:
    """Spread spans, in order of start, over as few lines as possible without overlap; at least one line."""
    lines: list[list[Span]] = [[]]
    for span in spans:
        free = next((line for line in lines if not line or line[-1].end_s <= span.start_s), None)
        if free is None:
            lines.append(free := [])
        free.append(span)
    return lines


def subtract(span: Span, others: Iterable[Span]) -> Iterator[Span]:
    """Yield the parts of the span during which no other span runs."""
    start_s = span.start_s
    for other in sorted(others, key=lambda other: other.start_s):
        if other.end_s <= start_s or other.start_s >= span.end_s:
            continue
        if other.start_s > start_s:
            yield span._replace(start_s=start_s, end_s=other.start_s)
        start_s = other.end_s
    if start_s < span.end_s:
        yield span._replace(start_s=start_s)


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw one panel per variant, on one time axis, in a format of matplotlib, such as ``.png``.

    Rows of computation leave out waits, which have their own row. Raises ModuleNotFoundError without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures of timelines need matplotlib: pip install matplotlib") from error
    rows = [timeline.rows() for timeline in timelines]
    heights = [max(4, len(panel)) for panel in rows]
    figure = Figure(figsize=(11, 1.6 + _ROW_INCHES * sum(heights) + 0.5 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for panel, timeline, panel_rows in zip(panels, timelines, rows, strict=True):
        _draw_panel(panel, timeline, panel_rows)
    panels[-1].set_xlim(0, 1e3 * max(timeline.step_ends_s[-1] - timeline.start_s for timeline in timelines))
    panels[-1].set_xlabel("time (ms)")
    shown = {kind_of(span) for panel_rows in rows for row in panel_rows.values() for span in row}
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), frameon=False)
    figure.savefig(path, dpi=150)


def _draw_panel(panel: Any, timeline: Timeline, rows: dict[str, list[Span]]) -> None:
    waits = rows.get(WAIT_TRACK, [])
    for position, (track, spans) in enumerate(rows.items()):
        if track in COMPUTE_TRACKS:
            spans = [part for span in spans for part in subtract(span, waits)]
        panel.broken_barh(
            [((span.start_s - timeline.start_s) * 1e3, (span.end_s - span.start_s) * 1e3) for span in spans],
            (position - _BAR_HEIGHT / 2, _BAR_HEIGHT),
            facecolors=[COLOURS[kind_of(span)] for span in spans],
            # Groups that follow one another on a lane stay countable.
            edgecolors="white",
            linewidth=0.3,
        )
    panel.set_yticks(range(len(rows)), list(rows))
    panel.set_ylim(len(rows) - 0.4, -0.6)  # first row on top
    panel.set_title(timeline.title, loc="left", fontsize="medium", fontweight="bold")
    for end_s in timeline.step_ends_s[1:]:
        panel.axvline((end_s - timeline.start_s) * 1e3, color="black", linestyle="--", linewidth=0.8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    panel.tick_params(axis="y", length=0)


def write_trace(timelines: Sequence[Timeline], path: Path) -> None:
    """Write Chrome's trace format: one process per variant, whose first step starts at 0, one thread per row."""
    events = [event for number, timeline in enumerate(timelines, 1) for event in _events(timeline, number)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _events(timeline: Timeline, process: int) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", process, 0, name=timeline.title)
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    between = itertools.pairwise(timeline.step_ends_s)
    steps = [Span("step", f"step {number}", *ends_s) for number, ends_s in enumerate(between, 1)]
    for thread, (track, spans) in enumerate({"step": steps, **timeline.rows()}.items(), 1):
        yield _metadata("thread_name", process, thread, name=track)
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)
        for span in spans:
            yield {
                "ph": "X",  # a complete event: it has a start and a duration, both in microseconds
                "name": span.name,
                "cat": kind_of(span),
                "ts": (span.start_s - timeline.start_s) * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "pid": process,
                "tid": thread,
            }


def _metadata(kind: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
