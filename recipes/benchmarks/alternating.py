"""Functions that are timed in turns in one process, and what came of it as a table and as a page."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich import table as rich_table
from rich.console import Console
from rich.progress import track

from recipes.benchmarks.dear_table2 import environment, now

Rows = Sequence[Sequence[str]]


class Table(NamedTuple):
    """Cells below a title; the first column is text."""

    title: str
    columns: Sequence[str]
    rows: Rows


def time_in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, device: torch.device, prepare: Callable[[], object]
) -> dict[str, list[float]]:
    """Seconds of every run; ``prepare`` comes before each, and is not timed. The first round warms up."""
    times_s: dict[str, list[float]] = {what: [] for what in ways}
    for index in track(range(rounds + 1), description="rounds"):
        for what, way in ways.items():
            prepare()
            _wait_for(device)
            start_s = time.perf_counter()
            way()
            _wait_for(device)
            if index:
                times_s[what].append(time.perf_counter() - start_s)
    return times_s


def show(title: str, columns: Sequence[str], rows: Rows) -> None:
    """Print a table; the first column is text."""
    table = rich_table.Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def write_page(path: Path, heading: str, introduction: str, tables: Sequence[Table], called: str) -> None:
    """Write a Markdown page with tables, and with the command that was ``called``."""
    sections = [f"# {heading}", introduction]
    for title, columns, rows in tables:
        lines = [f"| {' | '.join(columns)} |", f"| :-- |{' --: |' * (len(columns) - 1)}"]
        sections += [f"## {title}", "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])]
    versions = ", ".join(f"{name} {value}" for name, value in environment().items())
    sections += ["## Repeating it", f"```\n{called}\n```", f"{now()}; {versions}."]
    path.write_text("\n\n".join(sections) + "\n")


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
