"""The picture and the trace of hand-made spans: rows that overlap or lose a span would show another schedule."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colors, image

from ddp_hooks import Span
from ddp_hooks.planning.timeline import (
    COLOURS,
    Timeline,
    cut,
    draw,
    kind_of,
    subtract,
    without_overlap,
    write_trace,
)

PLAIN = Timeline(
    "plain DDP",
    step_ends_s=[10.0, 11.0, 12.0],
    spans=[
        Span("optimizer", "optimizer", 9.8, 9.9),  # before the first step
        Span("forward", "forward", 10.0, 10.2),
        Span("backward", "backward", 10.2, 10.9),
        Span("wait", "backward waits for all-reduce", 10.6, 10.9),
        Span("optimizer", "optimizer", 10.9, 11.0),
        Span("all-reduce", "all-reduce of bucket 0", 10.3, 10.7),
        Span("all-reduce", "all-reduce of bucket 1", 10.6, 10.9),
        Span("forward", "forward", 11.0, 12.5),  # beyond the last step
    ],
)
DEAR = Timeline(
    "DeAR",
    step_ends_s=[20.0, 20.8],
    spans=[
        Span("forward", "forward", 20.0, 20.3),
        Span("backward", "backward", 20.3, 20.7),
        Span("lane 1", "reduce-scatter of feed_forward.weight", 20.4, 20.6),
        Span("lane 0", "all-gather of group 0 (backward_head.weight)", 19.9, 20.1),
        Span("wait", "all-gather of group 0 (backward_head.weight)", 20.0, 20.1),
    ],
)

times = st.floats(0, 100, allow_nan=False)
span_lists = st.lists(st.tuples(times, times).map(lambda pair: Span("lane", "work", min(pair), max(pair))), max_size=12)


def test_kind_of_span_does_not_depend_on_parameter_names() -> None:
    assert [kind_of(span) for span in DEAR.spans] == ["forward", "backward", "reduce-scatter", "all-gather", "wait"]
    assert kind_of(Span("lane 2", "exchange of something", 0, 1)) == "other"


def test_rows_show_computation_then_waits_then_communication() -> None:
    assert list(DEAR.rows()) == ["forward", "backward", "optimizer", "wait", "lane 0", "lane 1"]


def test_overlapping_spans_of_one_track_get_rows_of_their_own() -> None:
    rows = PLAIN.rows()
    assert [span.name for span in rows["all-reduce 0"]] == ["all-reduce of bucket 0"]
    assert [span.name for span in rows["all-reduce 1"]] == ["all-reduce of bucket 1"]


def test_rows_keep_to_the_steps() -> None:
    rows = PLAIN.rows()
    assert [(span.start_s, span.end_s) for span in rows["forward"]] == [(10.0, 10.2), (11.0, 12.0)]
    assert len(rows["optimizer"]) == 1


def test_cut() -> None:
    span = Span("lane 0", "all-gather", 1.0, 3.0)
    assert cut(span, 2.0, 5.0) == Span("lane 0", "all-gather", 2.0, 3.0)
    assert cut(span, 3.0, 5.0) is None


@given(span_lists)
def test_without_overlap_keeps_every_span_once(spans: list[Span]) -> None:
    ordered = sorted(spans, key=lambda span: span.start_s)
    lines = without_overlap(ordered)
    assert sorted(itertools.chain(*lines)) == sorted(spans)
    for line in lines:
        assert all(first.end_s <= second.start_s for first, second in itertools.pairwise(line))


@given(span_lists, times)
def test_subtract_leaves_what_no_other_span_covers(others: list[Span], moment: float) -> None:
    span = Span("forward", "forward", 20.0, 80.0)
    left = list(subtract(span, others))
    edges = {edge for other in (span, *others) for edge in other[2:]}
    if moment not in edges:
        free = 20 < moment < 80 and not any(other.start_s < moment < other.end_s for other in others)
        assert any(part.start_s < moment < part.end_s for part in left) == free


def test_picture_shows_every_kind_of_span_in_its_colour(tmp_path: Path) -> None:
    draw([PLAIN, DEAR], tmp_path / "timelines.png")
    pixels = image.imread(tmp_path / "timelines.png")[..., :3]
    kinds = {kind_of(span) for timeline in (PLAIN, DEAR) for span in timeline.spans}
    assert len(kinds) == len(COLOURS) - 1
    for kind in COLOURS:
        close = np.abs(pixels - colors.to_rgb(COLOURS[kind])).max(axis=2) < 0.5 / 255
        # A bar, not its patch in the legend alone: that is about 30 x 12 pixels.
        assert (close.sum() > 1000) == (kind in kinds), kind


def read_trace(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def test_trace_has_what_perfetto_reads(tmp_path: Path) -> None:
    write_trace([PLAIN, DEAR], tmp_path / "trace.json")
    events = read_trace(tmp_path / "trace.json")
    assert {event["ph"] for event in events} == {"M", "X"}
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"plain DDP", "DeAR"}
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in spans} <= tracks.keys()
    (bucket,) = (event for event in spans if event["name"] == "all-reduce of bucket 0")
    assert tracks[bucket["pid"], bucket["tid"]] == "all-reduce 0"
    assert bucket["ts"] == pytest.approx(300_000)  # microseconds since the first step began
    assert bucket["dur"] == pytest.approx(400_000)
    assert bucket["cat"] == "all-reduce"


def test_events_of_one_thread_do_not_overlap(tmp_path: Path) -> None:
    """Perfetto nests events of a thread, and drops those that overlap without nesting."""
    write_trace([PLAIN, DEAR], tmp_path / "trace.json")
    spans = [event for event in read_trace(tmp_path / "trace.json") if event["ph"] == "X"]
    spans.sort(key=lambda event: (event["pid"], event["tid"], event["ts"]))
    for (_, _), thread in itertools.groupby(spans, key=lambda event: (event["pid"], event["tid"])):
        for first, second in itertools.pairwise(thread):
            assert first["ts"] >= 0
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-3


@pytest.mark.parametrize("step_ends_s", [[], [1.0], [2.0, 1.0]])
def test_timeline_without_steps_is_refused(step_ends_s: list[float]) -> None:
    with pytest.raises(ValueError, match="two or more rising times"):
        Timeline("nothing", step_ends_s, [])
