"""What every way of sending gradients does to the loss, against plain DDP, over several seeds.

    python -m recipes.benchmarks.fidelity
    python -m recipes.benchmarks.fidelity --tasks LSTM --formats "plain DDP" int8 --seeds 2 --steps 300
    python -m recipes.benchmarks.fidelity --quick

Finished trainings are appended to a file of records. A run that was ended goes on there: give it the same command.
Records of tasks with other settings are not used; when the code of a format has changed, remove its lines.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from recipes.benchmarks.fidelity_formats import DENSE, EXACT, FORMATS
from recipes.benchmarks.harness import Benchmark, Run, append_record, main_of, read_records
from recipes.common.pages import Page, Part, Picture, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS = ("GPT-2", "BERT", "Llama", "LSTM", "ResNet")
TINY = "tiny"  # for smoke tests
LINEAR_PERCENT = 0.1  # axes are logarithmic beyond

INTRODUCTION = """\
Every task is trained from several seeds, with every format from the same weights, on the same batches. A seed's \
difference is that of the validation losses after the last step, relative to plain DDP's with this seed; ± is the \
standard error of the mean over seeds. "plain DDP, other order" adds the same gradients in the order of gloo's ring: \
float32 rounds differently, and training amplifies that. What is not larger than this row says nothing.

GPT-2, BERT and Llama have 4 layers of width 256, and learn with AdamW. The LSTM (2 layers of width 256) and the \
ResNet (3 blocks) learn with SGD and momentum 0.9. Text: the documentation and docstrings of Python. Images: \
scikit-learn's digits, under noise. Gradients are clipped to norm 1. Learning rates rise for a tenth of the steps, \
then fall to 0. Each worker normalises batches by its own statistics; running ones are the first worker's, as in DDP.

All workers run in one process. `bf16`, `int8`, `int4` are wires of `DearConfig`: a gradient is rounded once, and so \
are differences of parameters. `quantized`: `QuantizedState`, where gradients and means are rounded. torch's hooks are \
twins that tests compare with the hooks. PowerSGD begins after a tenth of the steps. SparDL is `TopKConfig` as it is, \
without momentum correction. `exact` is trained under bfloat16 autocast, and its means are compared bit for bit with \
plain DDP's in every step."""


@dataclass(frozen=True)
class Trial:
    """One training.

    Args:
        task: of :data:`TASKS`.
        format: a name in :data:`~recipes.benchmarks.fidelity_formats.FORMATS`.
        seed: of weights, batches, masks and noise.
        steps: of the optimizer.
        workers: how many.
    """

    task: str
    format: str
    seed: int
    steps: int
    workers: int


class Difference(NamedTuple):
    """Mean and standard error over seeds."""

    mean: float
    error: float  # NaN of a single seed

    @staticmethod
    def of(values: Sequence[float]) -> Difference:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return Difference(statistics.fmean(values), error)

    def text(self, digits: int, sign: str = "") -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.mean:{sign}.{digits}f}{error}"


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    """Yield the records of all trials: those of the file, then new ones."""
    trials = [
        Trial(task, name, seed, options.steps, workers)
        for seed in range(options.seeds)
        for task in options.tasks
        for name in options.formats
        if seed == 0 or name != EXACT  # which is no matter of chance
    ]
    from recipes.benchmarks import fidelity_training  # imports torchvision and transformers

    path = options.records or options.output / "records.jsonl"
    known = {}
    for record in read_records(path):
        trial = Trial(**{field: record[field] for field in Trial.__dataclass_fields__})
        if record["settings"] == repr(fidelity_training.TASKS[trial.task]):
            known[trial] = record
    yield from (known[trial] for trial in trials if trial in known)
    missing = [trial for trial in trials if trial not in known]
    with tqdm(total=len(trials), initial=len(trials) - len(missing), unit="training", smoothing=0) as progress:
        for record in _train_all(missing, options.jobs):
            append_record(path, record)
            progress.set_postfix_str(f"{record['task']}, {record['format']}, seed {record['seed']}")
            progress.update()
            yield record


def _train_all(trials: Sequence[Trial], jobs: int) -> Iterator[dict[str, Any]]:
    """Train side by side in so many processes; yield records as they come."""
    from recipes.benchmarks.fidelity_training import train

    if jobs == 1:
        yield from map(train, trials)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_end_with_parent) as pool:
        try:
            for future in as_completed([pool.submit(train, trial) for trial in trials]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """End this process, which a pool has started, when its parent ends, in whatever way: it would stay otherwise."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# -- page --------------------------------------------------------------------------------------------------------------


class Losses:
    """Validation losses of all records, by task, format and seed."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.tasks = list(dict.fromkeys(record["task"] for record in records))
        self.formats = [name for name in FORMATS if any(record["format"] == name for record in records)]
        self._by_seed: dict[tuple[str, str], dict[int, float]] = {}
        for record in records:
            self._by_seed.setdefault((record["task"], record["format"]), {})[record["seed"]] = record["loss"]

    def num_seeds(self, task: str) -> int:
        return len(set().union(*(found for (of_task, _), found in self._by_seed.items() if of_task == task)))

    def of(self, task: str, name: str) -> Difference | None:
        """Return the mean loss; None without any."""
        found = self._by_seed.get((task, name))
        return Difference.of(list(found.values())) if found else None

    def against_dense(self, task: str, name: str) -> Difference | None:
        """Return the mean difference to plain DDP's loss with the same seed, in percent; None without any."""
        found, dense = (self._by_seed.get((task, each), {}) for each in (name, DENSE))
        percent = [100 * (found[seed] / dense[seed] - 1) for seed in found if seed in dense]
        return Difference.of(percent) if percent else None


def page(runs: Sequence[Run]) -> Page:
    records = [result for run in runs for result in run.results]
    losses = Losses(records)
    compared = [name for name in losses.formats if name not in (DENSE, EXACT)]
    rows = [[name, *(_text(losses.against_dense(task, name), 3, "+") for task in losses.tasks)] for name in compared]
    identical = {record["task"]: _bits(record) for record in records if record["format"] == EXACT}
    if identical:
        rows.insert(0, [EXACT, *(identical.get(task, "") for task in losses.tasks)])
    parts: list[Part] = [INTRODUCTION]
    shape = sorted({f"{record['workers']} workers, {record['steps']} steps" for record in records})
    columns = ("format", *losses.tasks)
    seeds = [f"{task} {losses.num_seeds(task)}" for task in losses.tasks]
    title = f"Validation loss against plain DDP's, %: {'; '.join(shape)}"
    parts.append(Table(title, columns, rows, [f"Seeds: {', '.join(seeds)}."]))
    if compared:
        size = (1 + 2.6 * len(losses.tasks), 1.4 + 0.3 * len(compared))
        parts.append(Picture("Difference to plain DDP's loss", partial(_draw, losses, compared), size))
    trained = [name for name in losses.formats if name != EXACT]
    rows = [[name, *(_text(losses.of(task, name), 4) for task in losses.tasks)] for name in trained]
    dates = sorted(record["date"] for record in records)
    hours = sum(record["seconds"] for record in records) / 3600
    remark = f"{len(records)} trainings between {dates[0]} and {dates[-1]}, {hours:.1f} hours of a core."
    parts.append(Table("Validation losses", columns, rows, [remark]))
    return Page("Fidelity", parts, [run.origin for run in runs])


def _text(difference: Difference | None, digits: int, sign: str = "") -> str:
    return "" if difference is None else difference.text(digits, sign)


def _bits(record: dict[str, Any]) -> str:
    return "identical" if record["differs_at"] is None else f"differs in step {record['differs_at'] + 1}"


def _draw(losses: Losses, names: Sequence[str], figure: Figure) -> None:
    """Draw a panel per task: differences with their standard errors, and the range of 0.1 %."""
    panels = figure.subplots(1, len(losses.tasks), sharey=True, squeeze=False)[0]
    for axes, task in zip(panels, losses.tasks, strict=True):
        axes.axvspan(-LINEAR_PERCENT, LINEAR_PERCENT, color="0.9")
        for place, name in enumerate(names):
            if (found := losses.against_dense(task, name)) is not None:
                axes.errorbar(found.mean, place, xerr=0 if math.isnan(found.error) else found.error, fmt="o", capsize=3)
        axes.set_xscale("symlog", linthresh=LINEAR_PERCENT)
        axes.set_title(task, fontsize=9)
        axes.set_xlabel("%")
        axes.tick_params(axis="x", labelsize=7)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tasks", nargs="+", choices=(*TASKS, TINY), default=list(TASKS), help="what is trained")
    add("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), help="how gradients are sent")
    add("--seeds", type=int, default=5, help="trainings of each")
    add("--steps", type=int, default=1000, help="of the optimizer")
    add("--jobs", type=int, default=2, help="trainings side by side, one thread each")
    add("--records", type=Path, metavar="FILE", help="of finished trainings; None: records.jsonl in the output folder")


BENCHMARK = Benchmark(
    "fidelity",
    "Compare validation losses of all ways of sending gradients.",
    measure,
    page,
    _add_options,
    on_links=False,
    quick={"tasks": [TINY], "formats": [DENSE, EXACT, "int8", "SparDL, 1 %"], "seeds": 2, "steps": 20, "jobs": 1},
)

if __name__ == "__main__":
    main_of(__spec__)
