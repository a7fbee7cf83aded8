"""Phases of requests: totals by name, a picture, and a trace for Perfetto (figure 9 of the paper).

Waiting for *data* is computation, waiting for *others* is the cost of late ranks, and waiting for *a lane* means that
the link is busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from ddp_hooks.comm import Span
from ddp_hooks.planning import timeline

PHASES: Final = {
    "waits for data": "#e69f00",
    "waits for others": "#d55e00",
    "waits for a lane": "#999999",
    "moves": "#56b4e9",
}
"""Phases of a request in order, which are tracks of :meth:`Coordinator.timeline`, with colours (Okabe and Ito's)."""


def seconds_by_name(spans: Iterable[Span]) -> dict[str, dict[str, float]]:
    """Return the seconds of each phase by name of the request, added up over all requests of that name."""
    totals: dict[str, dict[str, float]] = {}
    for span in spans:
        if span.track in PHASES:
            phases = totals.setdefault(span.name, dict.fromkeys(PHASES, 0.0))
            phases[span.track] += span.end_s - span.start_s
    return totals


def write_trace(spans: Sequence[Span], path: Path, title: str = "coordination") -> None:
    """Write spans as a trace for https://ui.perfetto.dev.

    Args:
        spans: of ``Coordinator.timeline()``, at least one.
        path: a ``.json`` file.
        title: of the process in the trace.
    """
    ends_s = (min(span.start_s for span in spans), max(span.end_s for span in spans))
    timeline.write_trace([timeline.Timeline(title, ends_s, spans)], path)


def draw_phases(spans: Sequence[Span], path: Path, num_requests: int = 30) -> None:
    """Draw a bar of phases for each request, the longest on top.

    Args:
        spans: of ``Coordinator.timeline()``.
        path: a ``.png`` file, or another format of matplotlib.
        num_requests: largest number of bars; the longest requests are shown.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("pictures of phases need matplotlib: pip install matplotlib") from error
    totals = seconds_by_name(spans)
    names = sorted(totals, key=lambda name: -sum(totals[name].values()))[:num_requests]
    figure = Figure(figsize=(9, 1.2 + 0.25 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    starts = [0.0] * len(names)
    for phase, colour in PHASES.items():
        widths = [totals[name][phase] * 1e3 for name in names]
        axes.barh(range(len(names)), widths, left=starts, color=colour, label=phase)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time (ms), added up")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
