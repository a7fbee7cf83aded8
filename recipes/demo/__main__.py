"""Plain DDP and DeAR side by side: a ResNet on real images, four workers, one run.

    python -m recipes.demo

Both train the same network from the same weights on the same batches, in turns of a few steps. A third copy trains
without communication, which is the time of a step on a free network. Workers run on the emulated cluster
(recipes/cluster), behind links of --rate; without its rights, on the loopback interface.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.benchmarks.harness import run_job
from recipes.cluster import ClusterUnavailable
from recipes.common.pages import Table
from recipes.demo.worker import CHECK_STEPS, work

TOLERANCE = 1e-10  # of weights in float64; rounding alone leaves 1e-14
LOOPBACK = "the loopback interface, which is no slow network: use the emulated cluster to see the effect"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        found = run(options)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    for result in found["results"]:
        result["exposed_s"] = result["step_s"] - found["alone_s"]
    found["agree"] = found["float64_difference"] <= TOLERANCE
    (options.output / "result.json").write_text(json.dumps(found, indent=2))
    table_of(found, options.workers).show()
    print(f"The timelines are in {options.output}: timelines.png, and trace.json for https://ui.perfetto.dev")
    return 0 if found["agree"] else 1


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the workers, on the emulated cluster if it can be had."""
    job = options.steps, options.output.resolve()
    if options.network != "loopback":
        try:
            found = run_job(work, job, options.workers, options.rate)
            return {**found, "where": f"an emulated cluster with links of {options.rate}"}
        except ClusterUnavailable as error:
            if options.network == "cluster":
                raise
            print(f"Running on loopback instead of the emulated cluster: {error}", file=sys.stderr)
    return {**run_job(work, job, options.workers, None), "where": LOOPBACK}


def table_of(found: dict[str, Any], workers: int) -> Table:
    """Return the figures side by side, and what they mean."""
    plain, dear = results = found["results"]
    agree, difference = found["agree"], found["float64_difference"]

    def row(label: str, key: str, form: str, scale: float = 1.0) -> list[str]:
        return [label, *(form.format(result[key] * scale) for result in results)]

    rows = [
        row("step time", "step_s", "{:.0f} ms", 1e3),
        row("exposed communication", "exposed_s", "{:.0f} ms", 1e3),
        row("sent per step and worker", "sent_bytes", "{:.1f} MB", 1e-6),
        row("accuracy, held-out images", "accuracy", "{:.1%}"),
        ["weights agree (float64)", "", f"{'yes' if agree else 'NO'}: {difference:.0e}"],
    ]
    remarks = [
        f"Ran on {found['where']}. DeAR is {plain['step_s'] / dear['step_s']:.2f} times as fast as plain DDP.",
        f"The weights {'agree' if agree else 'DO NOT AGREE'}: after {CHECK_STEPS} steps in float64 none differs by "
        f"more than {difference:.0e} (tolerance {TOLERANCE:.0e}). In float32 training amplifies rounding.",
        f"Step time is the median. A step without communication took {found['alone_s'] * 1e3:.0f} ms.",
        f"Workers shared {os.cpu_count()} cores, so they compute slowly, which hides more in both, and moving data "
        "takes time from computing. Take the ratio as an example, not as a forecast.",
    ]
    title = f"ResNet-18 on {found['images']}, {workers} workers"
    return Table(title, ["", *(result["name"] for result in results)], rows, remarks)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m recipes.demo", description="Plain DDP and DeAR, side by side.")
    add = parser.add_argument
    add("--workers", type=int, default=4, help="at most 29: each needs 48 of 1438 images")
    add("--rate", default="1gbit", help="rate of each worker's link, as 500mbit")
    add("--steps", type=int, default=50, help="of each, at least 4; the first half or ten warm up")
    add("--output", type=Path, default=Path("build/demo"), help="folder for picture, trace and figures")
    add("--network", choices=("auto", "cluster", "loopback"), default="auto", help="auto: the cluster if possible")
    options = parser.parse_args(argv)
    if not 1 <= options.workers <= 29:
        parser.error(f"--workers must be from 1 to 29, got {options.workers}")
    if options.steps < 4:
        parser.error(f"--steps must be >= 4, got {options.steps}")
    return options


if __name__ == "__main__":
    sys.exit(main())
