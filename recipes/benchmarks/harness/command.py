"""Command line of a benchmark: measure or load results, then show, save and write them as a page."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from recipes.cluster.network import parse_rate
from recipes.common.pages import Origin, Page

_SHORT = {"rounds": 1, "steps": 2, "warmup": 2}


@dataclass(frozen=True)
class Run:
    """One call of a benchmark.

    Args:
        origin: its command, time and machine.
        results: one dictionary per network and whatever else the benchmark varies; each holds ``workers`` and ``rate``.
    """

    origin: Origin
    results: list[dict[str, Any]]

    def save(self, path: Path) -> None:
        """Write it as JSON, and the folder around it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read what :meth:`save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(Origin(**data["origin"]), data["results"])


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Args:
        name: of its module, its folder below ``build`` and its files.
        description: one sentence, for ``--help``.
        measure: takes options, number of workers and rate (None: loopback); yields results. It may raise a ValueError
            for options that do not fit, and a RuntimeError for a worker that failed.
        page: makes a page of runs.
        add_options: adds the benchmark's own options.
        workers: default of ``--workers``.
        on_links: measures on the links of the emulated cluster; False: on the loopback interface only.
        quick: options that ``--quick`` sets, beside two workers and few steps.
    """

    name: str
    description: str
    measure: Callable[[argparse.Namespace, int, str | None], Iterator[dict[str, Any]]]
    page: Callable[[Sequence[Run]], Page]
    add_options: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    workers: Sequence[int] = (4,)
    on_links: bool = True
    quick: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return f"recipes.benchmarks.{self.name}"

    def run(self, arguments: Sequence[str] | None = None) -> None:
        """Run the command."""
        parser = self.make_parser()
        options = parser.parse_args(arguments)
        if options.results:
            runs = [Run.load(path) for path in options.results]
        else:
            runs = [self._measure(parser, options, arguments)]
        page = self.page(runs)
        page.show()
        if not options.results:
            page.save_pictures(options.output / f"{self.name}.png")
            print(f"Wrote {options.output}")
        if options.markdown:
            page.write(options.markdown)
            print(f"Wrote {options.markdown}")

    def make_parser(self) -> argparse.ArgumentParser:
        """Return the parser of all benchmarks, with the options of this one."""
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}",
            description=self.description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        add = parser.add_argument
        add("--workers", type=int, nargs="+", default=list(self.workers), help="numbers of workers")
        if self.on_links:
            add("--rate", nargs="+", default=["1gbit"], help="rates of links, as tc writes them")
            add("--loopback", action="store_true", help="plain processes instead of the emulated cluster")
        else:
            parser.set_defaults(rate=["1gbit"], loopback=True)
        add("--output", type=Path, default=Path("build") / self.name, help="folder for JSON and pictures")
        add("--markdown", type=Path, metavar="PATH", help="also write a page, its pictures beside it")
        add("--results", type=Path, nargs="+", metavar="JSON", help="measure nothing: show these earlier runs")
        add("--quick", action="store_true", help="a smoke test: two workers, few steps")
        self.add_options(parser)
        return parser

    def _measure(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, arguments: Sequence[str] | None
    ) -> Run:
        if options.quick:
            vars(options).update({"workers": [2], "rate": options.rate[:1]})
            vars(options).update({name: value for name, value in _SHORT.items() if name in options})
            vars(options).update(self.quick)
        run = Run(Origin.of_command(self.module, arguments), [])
        try:
            for rate in options.rate:
                parse_rate(rate)
            for workers in options.workers:
                for rate in [None] if options.loopback else options.rate:
                    for result in self.measure(options, workers, rate):
                        run.results.append({"workers": workers, "rate": rate, **result})
                        run.save(options.output / f"{self.name}.json")  # whatever comes next, this is kept
        except ValueError as error:
            parser.error(str(error))
        except RuntimeError as error:  # also ClusterUnavailable, which says what is missing
            sys.exit(f"error: {error}")
        return run


def add_timing(parser: argparse.ArgumentParser, *, rounds: int = 3, steps: int = 5, warmup: int = 3) -> None:
    """Add the options of benchmarks whose variants are timed in turns, with these defaults."""
    parser.add_argument("--rounds", type=int, default=rounds, help="windows per variant; variants take turns")
    parser.add_argument("--steps", type=int, default=steps, help="timed steps per window")
    parser.add_argument("--warmup", type=int, default=warmup, help="untimed steps before each window")


def main_of(spec: Any) -> None:
    """Run the benchmark of a module that was started with ``python -m``.

    Workers import the functions and classes of a job by the name of their module, so the module is imported by its own
    name, not as ``__main__``.

    Args:
        spec: ``__spec__`` of the module, which has a ``BENCHMARK``.
    """
    importlib.import_module(spec.name).BENCHMARK.run()
