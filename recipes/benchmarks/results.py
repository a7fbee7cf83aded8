"""What was measured, next to what was possible: the numbers that table, plot and JSON show."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddp_hooks.planning.bounds import collective_s, dependency_bound_s
from recipes.benchmarks.variants import parse_variant
from recipes.benchmarks.workloads import Workload
from recipes.paper.bounds import baseline_bound_s, dear_bound_s


@dataclass(frozen=True)
class Bounds:
    """Seconds per step that no schedule of the named kind can go below. "goodput": on the measured link."""

    dependency: float
    dependency_one_step: float  # no gather before all reduce-scatters
    eq7: float
    eq8: float
    dependency_goodput: float
    eq7_goodput: float
    eq8_goodput: float


@dataclass(frozen=True)
class VariantResult:
    """One variant. Medians over rounds, seconds per step of the slowest rank."""

    step_s: float
    fastest_s: float
    slowest_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    exposed_s: float  # step minus compute: communication, optimizer and Python time that nothing hides
    cpu_s: float  # CPU seconds per step, all ranks together
    speedup: float | None  # over the best plain DDP
    over_bound: float  # step over the dependency-aware bound


@dataclass(frozen=True)
class Result:
    """All variants of one workload on one network."""

    model: str
    workers: int
    rate: str | None  # None: loopback
    slow: float
    steps: int
    rounds: int
    num_layers: int
    num_tensors: int
    parameter_bytes: int
    compute_s: float
    link_bytes_per_s: float  # line rate; on loopback the goodput stands in for it
    goodput_bytes_per_s: float
    bounds: Bounds
    variants: dict[str, VariantResult]
    unavailable: dict[str, str]  # variant -> why it did not run
    windows: dict[str, list[dict[str, float]]]  # variant -> one window per round, as measured
    details: dict[str, dict[str, float]]  # variant -> its own statistics of the last step

    @property
    def title(self) -> str:
        network = self.rate or "loopback"
        return f"{self.model}, {self.workers} workers, {network}, slow {self.slow:g}"


def bounds_of(workload: Workload, slow: float, workers: int, link: float, goodput: float) -> Bounds:
    """All bounds; `link` and `goodput` in bytes per second."""
    step = workload.step_profile(slow)

    def equations(rate: float) -> tuple[float, float]:
        half_s = collective_s(step.num_bytes, workers, rate)
        return (
            dear_bound_s(step.forward_s, step.backward_s, half_s, half_s),
            baseline_bound_s(step.forward_s, step.backward_s, 2 * half_s),
        )

    eq7, eq8 = equations(link)
    eq7_goodput, eq8_goodput = equations(goodput)
    return Bounds(
        dependency=dependency_bound_s(step, workers, link),
        dependency_one_step=dependency_bound_s(step, workers, link, gathers_wait_for_step=True),
        eq7=eq7,
        eq8=eq8,
        dependency_goodput=dependency_bound_s(step, workers, goodput),
        eq7_goodput=eq7_goodput,
        eq8_goodput=eq8_goodput,
    )


def summarise(windows: dict[str, list[dict[str, float]]], compute_s: float, bound_s: float) -> dict[str, VariantResult]:
    """Medians over rounds, in the order in which the variants ran."""
    medians = {
        name: {key: statistics.median(window[key] for window in rounds) for key in rounds[0]}
        for name, rounds in windows.items()
    }
    plain = [median["step_s"] for name, median in medians.items() if parse_variant(name).is_plain_ddp]
    return {
        name: VariantResult(
            **median,
            fastest_s=min(window["step_s"] for window in windows[name]),
            slowest_s=max(window["step_s"] for window in windows[name]),
            exposed_s=median["step_s"] - compute_s,
            speedup=min(plain) / median["step_s"] if plain else None,
            over_bound=median["step_s"] / bound_s,
        )
        for name, median in medians.items()
    }


@dataclass(frozen=True)
class Report:
    """One call of the benchmark: how it was called, where, and its results."""

    command: str
    created: str
    environment: dict[str, str]
    results: list[Result]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> Report:
        data = json.loads(path.read_text())
        return cls(**{**data, "results": [_result_from_json(result) for result in data["results"]]})


def _result_from_json(data: dict[str, Any]) -> Result:
    variants = {name: VariantResult(**values) for name, values in data["variants"].items()}
    return Result(**{**data, "bounds": Bounds(**data["bounds"]), "variants": variants})
