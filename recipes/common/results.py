"""Page of the recipes' results: losses, bytes and waits of each recipe with each of its hooks.

    python -m recipes.common.results --run
    python -m recipes.common.results --run --only t5_translation bert_mlm_trainer
    python -m recipes.common.results --markdown docs/results/recipes.md build/recipes/*.json

``--run`` starts each recipe with each hook, one after the other, and writes the page of all runs whose results are in
``--output``, former ones among them. Without it the page is made of the files that are named.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from recipes.common.record import Record
from recipes.common.texts import positive

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path("docs/results/recipes.md")


@dataclass(frozen=True)
class Run:
    """Run of a recipe.

    Args:
        recipe: the name of its file, without ``.py``.
        hook: its name in tables, and in the name of its results.
        more: arguments besides ``--hook``; it is the first part of ``hook``, up to ``-``.
    """

    recipe: str
    hook: str
    more: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Arguments of its command line."""
        return ["--hook", self.hook.partition("-")[0], *self.more]

    @property
    def file(self) -> str:
        """Name of its results."""
        return f"{self.recipe}_{self.hook}.json"


RUNS = (
    Run("gpt2_clm_trainer", "none"),
    Run("gpt2_clm_trainer", "dear"),
    Run("gpt2_clm_trainer", "dear-tuned", ("--tune",)),
    Run("gpt2_clm_trainer", "topk"),
    Run("bert_mlm_trainer", "none"),
    Run("bert_mlm_trainer", "dear"),
    Run("bert_mlm_trainer", "spardl"),
    Run("t5_translation", "none"),
    Run("t5_translation", "tables"),
    Run("t5_translation", "dear+tables"),
    Run("resnet_imagenet", "none"),
    Run("resnet_imagenet", "dear"),
    Run("resnet_imagenet", "spardl"),
)
TITLES = {
    "gpt2_clm_trainer": "GPT-2, Hugging Face Trainer",
    "bert_mlm_trainer": "BERT, Hugging Face Trainer",
    "t5_translation": "T5 with sharded tables, Hugging Face Trainer",
    "resnet_imagenet": "ResNet, plain PyTorch",
}
INTRODUCTION = """\
Short runs of the {doc}`recipes <../recipes>`, with each of their hooks. They show that training goes as it should \
with every hook, and what travels. They do not show which hook is fastest: models are small, and workers share one \
machine, on which messages pass through memory; {doc}`dear_table2`, {doc}`time_to_loss` and {doc}`embrace` do that."""
LEGEND = """\
* `training loss`: the last one that was logged, mean over workers.
* `held out`: measured after the last step, on data that no worker has learned from.
* `MB sent`: by the first worker, per step, mean over the steps that were logged; 10⁶ bytes. Hooks and tables count \
theirs. What DDP all-reduces by itself (`none`, and the layers beside `tables`) is calculated: a ring sends \
2 (P − 1) / P times the gradient.
* `s waited`: for communication by the first worker, per step, likewise; DDP does not count its own."""


# Runs ---------------------------------------------------------------------------------------------------


def run_all(runs: Iterable[Run], workers: int, output: Path, timeout_s: float) -> list[str]:
    """Start one run after the other; return descriptions of failures."""
    problems = []
    for run in runs:
        print(f"\n{run.recipe} --hook {run.hook}", flush=True)
        problem = start(run, workers, output, timeout_s)
        if problem is not None:
            problems.append(f"{run.recipe} with {run.hook} {problem}")
    return problems


def start(run: Run, workers: int, output: Path, timeout_s: float) -> str | None:
    """Run a recipe to its end; return a description of its failure."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
    command = [*launcher, f"recipes/complete/{run.recipe}.py", *run.arguments, "--output", str(output)]
    process = subprocess.Popen(command, cwd=ROOT, env={"OMP_NUM_THREADS": "1", **os.environ})
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"took more than {timeout_s:g} s"
    finally:
        end(process)
    return None if code == 0 else f"ended with code {code}"


def end(process: subprocess.Popen[bytes]) -> None:
    """Let torchrun end its workers, if it still runs: killed at once, it would leave them behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# Page ---------------------------------------------------------------------------------------------------


def write_page(records: Sequence[Record], path: Path) -> None:
    """Write the page, and a picture per recipe beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sections = ["# What the recipes find", INTRODUCTION, LEGEND]
    for recipe, group in groupby(in_order(records), key=lambda record: record.recipe):
        runs = list(group)
        picture = path.with_name(f"{path.stem}_{recipe}.png")
        plot(runs, picture)
        sections.append(section(runs, picture.name))
    path.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def in_order(records: Iterable[Record]) -> list[Record]:
    """Return records in the order of :data:`RUNS`; other recipes come last."""
    places = {(run.recipe, run.hook): place for place, run in enumerate(RUNS)}
    recipes = {run.recipe: place for place, run in reversed(list(enumerate(RUNS)))}

    def key(record: Record) -> tuple[int, str, int, str]:
        place = places.get((record.recipe, record.hook), len(RUNS))
        return recipes.get(record.recipe, len(RUNS)), record.recipe, place, record.hook

    return sorted(records, key=key)


def section(runs: Sequence[Record], picture: str) -> str:
    """Return the section of a recipe: facts, a table, a picture, and the commands."""
    title = TITLES.get(runs[0].recipe, runs[0].recipe)
    models = sorted({run.model for run in runs if run.model})
    facts = [*models, *sorted({run.data for run in runs}), f"{numbers(run.num_workers for run in runs)} workers"]
    commands = "\n".join(run.command for run in runs)
    where = dict.fromkeys(", ".join(f"{name} {value}" for name, value in run.environment.items()) for run in runs)
    dates = numbers(run.created.split()[0] for run in runs)
    return "\n\n".join(
        [
            f"## {title}",
            "; ".join(facts) + ".",
            table(runs),
            f"![Training loss of every run over its steps]({picture})",
            f"```bash\n{commands}\n```",
            f"{dates}; " + "; ".join(where) + ".",
        ]
    )


def numbers(values: Iterable[object]) -> str:
    """Join different values with "and"."""
    return " and ".join(sorted({str(value) for value in values}))


def table(runs: Sequence[Record]) -> str:
    """Return a table in Markdown, a line per run."""
    measures = list(dict.fromkeys(name for run in runs for name in run.held_out))
    columns = ["hook", "steps", "training loss", *(f"held out: {name}" for name in measures), "MB sent", "s waited"]
    lines = [f"| {' | '.join(columns)} |", f"| :-- |{' --: |' * (len(columns) - 1)}"]
    for run in runs:
        measured = [number(run.held_out.get(name), 4) for name in measures]
        costs = [number(run.sent_mb_per_step, 3), number(run.stall_s_per_step, 4)]
        lines.append(f"| {' | '.join([run.hook, str(run.steps), number(run.final_loss, 4), *measured, *costs])} |")
    return "\n".join(lines)


def number(value: float | None, digits: int) -> str:
    """Format a number for a table; nothing where it is unknown."""
    return "" if value is None else f"{value:.{digits}f}"


def plot(runs: Sequence[Record], path: Path) -> None:
    """Draw training losses over steps, a line per run; every second line is dashed, because lines may coincide."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(5.5, 3.2))
    for index, run in enumerate(runs):
        steps, losses = zip(*run.losses, strict=True)
        style, width = ("--", 1.2) if index % 2 else ("-", 2.2)
        ax.plot(steps, losses, linestyle=style, linewidth=width, alpha=0.8, label=run.hook)
    ax.set_xlabel("step")
    ax.set_ylabel("training loss")
    ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


# Command line -------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    problems: list[str] = []
    files = list(args.files)
    if args.run:
        wanted = [run for run in RUNS if args.only is None or run.recipe in args.only]
        problems = run_all(wanted, args.workers, args.output, args.timeout)
        files += [args.output / run.file for run in RUNS if (args.output / run.file).exists()]
    records = [Record.load(path) for path in files]
    if records:
        write_page(records, args.markdown)
        print(f"Wrote {args.markdown}")
    if problems:
        raise SystemExit("error: " + "; ".join(problems))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    recipes = list(dict.fromkeys(run.recipe for run in RUNS))
    parser = argparse.ArgumentParser(
        prog="python -m recipes.common.results", description="Make a page of what the recipes' runs have found."
    )
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="results that recipes have written")
    parser.add_argument("--markdown", type=Path, default=PAGE, metavar="PATH", help="page to write, pictures beside it")
    parser.add_argument("--run", action="store_true", help="run the recipes, one after the other")
    parser.add_argument("--only", choices=recipes, nargs="+", metavar="RECIPE", help=f"of {', '.join(recipes)}")
    parser.add_argument("--workers", type=positive, default=2, help="processes of each run")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of each run")
    parser.add_argument("--output", type=Path, default=Path("build/recipes"), metavar="FOLDER", help="for results")
    args = parser.parse_args(argv)
    if not args.files and not args.run:
        parser.error("name files with results, or let --run make them")
    if args.only is not None and not args.run:
        parser.error("--only chooses what --run runs")
    return args


if __name__ == "__main__":
    main()
