"""How long codecs take, and the link below which they pay.

    python -m recipes.benchmarks.codecs
    python -m recipes.benchmarks.codecs --device cuda

Encoding, with and without error feedback, decoding and adding, of float32, alternating in one process with one thread;
copying the vector beside them. Prints a table, and if asked writes a Markdown page.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ddp_hooks.comm.wire.codecs import CodecName, codec_of
from recipes.benchmarks.harness.turns import time_in_turns
from recipes.common.pages import Origin, Page, Table

_CODECS: tuple[CodecName, ...] = ("bf16", "int8", "int4")
COLUMNS = ("what", "ms", "min–max", "GB/s", "pays below, Gbit/s")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.codecs", description="Time codecs.")
    add = parser.add_argument
    add("--numel", type=float, default=16e6, help="length of the vector, float32 (default: 16e6)")
    add("--block", type=int, help="elements that share a scale (default: 256, with int4 128)")
    add("--rounds", type=int, default=9, help="timed runs of each (default: 9)")
    add("--device", default="cpu", help="where the vector lies (default: cpu)")
    add("--markdown", type=Path, metavar="PATH", help="also write a Markdown page")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    numel, device = int(options.numel), torch.device(options.device)
    rows = rows_of(measure(numel, options.block, options.rounds, device), numel, options.block)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "one core"
    table = Table(f"{numel / 1e6:g} M float32 on {where}", COLUMNS, rows)
    page = Page("Codecs", [INTRODUCTION, table], [Origin.of_command("recipes.benchmarks.codecs", arguments)])
    page.show()
    if options.markdown:
        page.write(options.markdown)


INTRODUCTION = """\
All alternate in one run; medians. GB/s are those of float32. Every byte that a rank receives is decoded, or added, \
once: a codec pays where the bytes that it saves take longer on the link than this takes, unless something else \
computes meanwhile. That link is in the last column, of one rank's traffic."""


def measure(numel: int, block: int | None, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of every run."""
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
    return time_in_turns(ways, rounds, device, residual.zero_)


def rows_of(times_s: dict[str, list[float]], numel: int, block: int | None) -> list[tuple[str, ...]]:
    """Cells of the table."""
    rows: list[tuple[str, ...]] = []
    for name, times in times_s.items():
        median_s = statistics.median(times)
        pays = ""
        if name.endswith(("decoding", "adding")):
            codec = codec_of(next(each for each in _CODECS if name.startswith(each)), block, torch.float32)
            assert codec is not None
            pays = f"{8e-9 * (4 * numel - codec.nbytes(numel)) / median_s:.0f}"
        spread = f"{1e3 * min(times):.2f}–{1e3 * max(times):.2f}"
        rows.append((name, f"{1e3 * median_s:.2f}", spread, f"{4e-9 * numel / median_s:.1f}", pays))
    return rows


if __name__ == "__main__":
    main()
