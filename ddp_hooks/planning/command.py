"""``python -m ddp_hooks plan``: predict the step of a training script with other ways to communicate."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddp_hooks.comm import AlphaBeta
from ddp_hooks.planning.measurement.models import profile_model
from ddp_hooks.planning.measurement.scripts import profile_script
from ddp_hooks.planning.network import Network, link_of
from ddp_hooks.planning.plan import Plan, plan_profiled

_NEEDED = ("rich", "tqdm", "matplotlib")
_TCP_EFFICIENCY = 0.949  # in frames of 1,500 bytes
_GBIT_S = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check(options)
        network = _network(options)
    except ValueError as error:
        parser.error(str(error))
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"error: this command needs {' and '.join(missing)}: pip install 'ddp-hooks[plan]'")
    try:
        if options.model is not None:
            device = _join()
            profile, model = profile_model(options.model, options.batch, options.length, device, options.steps, _bar)
        else:
            profile, model = profile_script(options.script, options.arguments, options.steps, options.warmup)
        if network is None and not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            problem = "has not initialised torch.distributed, so there is no network to measure"
            raise ValueError(f"{options.script} {problem}")
        found = plan_profiled(profile, model, network, _bar)
    except ValueError as error:
        sys.exit(f"error: {error}")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if _rank() == 0:
        show(found)
        for write, path in ((found.save, options.save), (found.write_trace, options.trace), (found.draw, options.draw)):
            if path is not None:
                write(path)
                print(f"Wrote {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ddp_hooks", description="Faster data-parallel training.")
    commands = parser.add_subparsers(title="commands", required=True)
    add = commands.add_parser(
        "plan",
        help="which hook would help on this model and this network, and by how much",
        description="Profile a few training steps, measure the network between the processes (or take a described "
        "one), and predict what a step takes with plain DDP and with each hook. Start it like the script itself: "
        "torchrun --nproc-per-node 4 -m ddp_hooks plan train.py --lr 0.1. The script is stopped when enough is known.",
    ).add_argument
    add("script", nargs="?", type=Path, help="a training script; it runs unchanged, and is stopped after some steps")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments")
    add("--model", metavar="NAME", help="instead: a model of torchvision (resnet50) or transformers (BertForMaskedLM)")
    add("--batch", type=int, default=8, help="samples per worker, with --model (default: 8)")
    add("--length", type=int, default=128, help="tokens per sample, with --model of transformers (default: 128)")
    add("--workers", type=int, help="predict for so many workers on a described network, instead of measuring it")
    add("--rate", help="of its links, such as 10gbit")
    add("--latency", default="50us", help="of its messages (default: 50us)")
    add("--node-size", type=int, default=1, help="workers that share such a link (default: 1)")
    add("--inside-rate", default="100gbit", help="of links within a node (default: 100gbit)")
    add("--steps", type=int, default=3, help="timed steps (default: 3)")
    add("--warmup", type=int, default=2, help="steps of the script before these (default: 2)")
    add("--save", type=Path, metavar="JSON", help="write the plan")
    add("--trace", type=Path, metavar="JSON", help="write the simulated steps for ui.perfetto.dev")
    add("--draw", type=Path, metavar="PNG", help="draw them")
    return parser


def _check(options: argparse.Namespace) -> None:
    if (options.script is None) == (options.model is None):
        raise ValueError("give a training script, or --model NAME")
    for name in ("steps", "batch", "length"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} must be >= 1, got {getattr(options, name)}")
    for path in (options.save, options.trace, options.draw):
        if path is not None and not path.resolve().parent.is_dir():
            raise ValueError(f"there is no folder {path.resolve().parent} for {path.name}")
    if options.draw is not None and options.draw.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--draw takes a .png, .svg or .pdf, got {options.draw}")


def _network(options: argparse.Namespace) -> Network | None:
    """Return the described network; None: the network is measured."""
    if (options.workers is None) != (options.rate is None):
        raise ValueError("a described network has --workers and --rate; without both, the network is measured")
    if options.workers is None:
        return None
    latency_s = _parse(options.latency, _SECONDS, "--latency must look like 50us or 1ms")
    link = _link(options.rate, latency_s, "--rate")
    inside = _link(options.inside_rate, latency_s / 10, "--inside-rate") if options.node_size > 1 else None
    return Network(options.workers, link, options.node_size, inside)


def _link(rate: str, latency_s: float, option: str) -> AlphaBeta:
    return link_of(_parse(rate, _GBIT_S, f"{option} must look like 500mbit or 10gbit"), latency_s, _TCP_EFFICIENCY)


def _parse(text: str, units: dict[str, float], expected: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units:
        raise ValueError(f"{expected}, got {text!r}")
    return float(found[1]) * units[found[2]]


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _join() -> torch.device:
    """Join the process group, if torchrun has started several processes; return the device of this one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def _bar(parts: Iterable[Any]) -> Iterable[Any]:
    from tqdm import tqdm

    return tqdm(parts, leave=False, disable=_rank() != 0, desc="measuring")


def show(plan: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Predicted seconds per step, {plan.network.workers} workers")
    for index, column in enumerate(("strategy", "s/step", "× DDP", "exposed, s", "MB sent", "bound, s")):
        table.add_column(column, justify="right" if index else "left")
    for each in plan.predictions:
        table.add_row(
            each.strategy + (" *" if each is plan.recommended and plan.doubt is None else ""),
            f"{each.step_s:.3f}",
            f"{plan.present.step_s / each.step_s:.2f}",
            f"{max(0.0, each.exposed_s):.3f}",
            f"{each.sent_bytes / 1e6:.1f}",
            # It holds for as many bytes as plain DDP sends.
            f"{each.bound_s:.3f}" if each.sent_bytes > 0.99 * plan.present.sent_bytes else "",
        )
    console = Console()
    console.print(table)
    for line in (*_measurements(plan), *_recommendation(plan)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _measurements(plan: Plan) -> Iterable[str]:
    profile, network = plan.profile, plan.network
    described = f"{network.link.alpha_s * 1e6:.0f} microseconds per message, {network.bytes_per_s / 1e6:.1f} MB/s"
    yield f"Network: {plan.fit or described + ' (described)'}"
    yield (
        f"Step: forward {profile.forward_s:.3f} s, backward {profile.backward_s:.3f} s, optimizer "
        f"{profile.optimizer_s:.3f} s, other {profile.other_s:.3f} s; {profile.num_bytes / 1e6:.1f} MB of gradients "
        f"in {len(profile.tensors)} tensors; {2 * (1 - profile.exact_width):.0%} of their numbers fit 16 bits"
    )
    if plan.fit is None:
        yield "Assumed: messages cost this processor nothing; copies, codes and selections are measured in one process."
    if network.node_size > 1:
        yield "SparDL is not among them: it is simulated with one worker per link only."


def _recommendation(plan: Plan) -> Iterable[str]:
    best = plan.recommended
    yield f"What limits {plan.present.strategy}: {plan.limit_of(plan.present)}."
    if plan.doubt is not None:
        yield f"Nothing is recommended: {plan.doubt}."
        return
    if best is plan.present:
        yield "Stay with plain DDP: nothing here would be faster by more than predictions are wrong by."
        return
    lines = plan.recommended_line.replace("\n", "\n    ")
    yield f"Recommended (*): {best.strategy}. Write\n    {lines}"
    yield f"What limits it then: {plan.limit}."
    if best.strategy == plan.recommended_dear.name:
        tuner = f"tuner=BucketTuner(start_mb={plan.tuner().start_mb:.3g})"
        config = f"DearConfig({', '.join((*plan.recommended_dear.settings, tuner))})"
        yield f"A tuner that begins where the fastest step is predicted: {config}"
    if not best.is_exact:
        yield best.effect
