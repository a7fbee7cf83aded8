"""How long fsdp_ext's codecs take, and the link below which they pay.

    python -m recipes.benchmarks.codecs
    python -m recipes.benchmarks.codecs --device cuda

Encoding, with and without error feedback, decoding and adding, of float32, alternating in one process with one thread;
copying the vector beside them. Prints a table, and if asked writes a Markdown page.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fsdp_ext.codecs import CodecName, codec_of
from recipes.benchmarks.dear_table2 import command, environment, now

_CODECS: tuple[CodecName, ...] = ("bf16", "int8")
COLUMNS = ("what", "ms", "min–max", "GB/s", "pays below, Gbit/s")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.codecs", description="Time fsdp_ext's codecs.")
    add = parser.add_argument
    add("--numel", type=float, default=16e6, help="length of the vector, float32 (default: 16e6)")
    add("--block", type=int, default=256, help="elements that share a scale (default: 256)")
    add("--rounds", type=int, default=9, help="timed runs of each (default: 9)")
    add("--device", default="cpu", help="where the vector lies (default: cpu)")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    numel, device = int(options.numel), torch.device(options.device)
    rows = rows_of(measure(numel, options.block, options.rounds, device), numel, options.block)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "one core"
    title = f"{numel / 1e6:g} M float32 on {where}"
    table = Table(title=title)
    for index, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    if options.markdown:
        lines = [f"| {' | '.join(COLUMNS)} |", "| :-- | --: | --: | --: | --: |"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        versions = ", ".join(f"{name} {value}" for name, value in environment().items())
        called = f"```\n{command('codecs', arguments)}\n```"
        sections = ["# Codecs", INTRODUCTION, f"## {title}", "\n".join(lines), "## Repeating it", called]
        options.markdown.write_text("\n\n".join([*sections, f"{now()}; {versions}."]) + "\n")


INTRODUCTION = """\
All alternate in one run; medians. GB/s are those of float32. Every byte that a rank receives is decoded, or added, \
once: a codec pays where the bytes that it saves take longer on the link than this takes, unless something else \
computes meanwhile. That link is in the last column, of one rank's traffic."""


def measure(numel: int, block: int, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of every run."""
    values, residual = torch.randn(numel, device=device), torch.zeros(numel, device=device)
    ways: dict[str, Callable[[], object]] = {"copying": lambda: residual.copy_(values)}
    for name in _CODECS:
        codec = codec_of(name, block, torch.float32)
        assert codec is not None
        payload = torch.empty(codec.nbytes(numel), dtype=torch.uint8, device=device)
        codec.encode(values, payload)
        ways[f"{name}: encoding"] = partial(codec.encode, values, payload)
        ways[f"{name}: encoding, error feedback"] = partial(codec.encode_with_residual, values, residual, payload)
        ways[f"{name}: decoding"] = partial(codec.decode, payload, residual)
        ways[f"{name}: adding"] = partial(codec.add, payload, residual)
    times_s: dict[str, list[float]] = {what: [] for what in ways}
    for index in track(range(rounds + 1), description="rounds"):  # the first one warms up
        for what, way in ways.items():
            residual.zero_()
            _wait_for(device)
            start_s = time.perf_counter()
            way()
            _wait_for(device)
            if index:
                times_s[what].append(time.perf_counter() - start_s)
    return times_s


def rows_of(times_s: dict[str, list[float]], numel: int, block: int) -> list[tuple[str, ...]]:
    """Cells of the table."""
    rows: list[tuple[str, ...]] = []
    for name, times in times_s.items():
        median_s = statistics.median(times)
        pays = ""
        if name.endswith(("decoding", "adding")):
            codec = codec_of("bf16" if name.startswith("bf16") else "int8", block, torch.float32)
            assert codec is not None
            pays = f"{8e-9 * (4 * numel - codec.nbytes(numel)) / median_s:.0f}"
        spread = f"{1e3 * min(times):.2f}–{1e3 * max(times):.2f}"
        rows.append((name, f"{1e3 * median_s:.2f}", spread, f"{4e-9 * numel / median_s:.1f}", pays))
    return rows


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
