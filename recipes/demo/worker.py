"""One worker of the demo: check that weights agree, train in turns, and measure."""

from __future__ import annotations

import copy
import gc
import itertools
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import resnet18
from tqdm import tqdm

from ddp_hooks.planning.timeline import Timeline, draw, write_trace
from recipes.common.batches import endless_batches
from recipes.common.images import load_images
from recipes.demo.variants import Reading, Variant, build_alone, build_dear, build_plain

BATCH_SIZE = 48  # per worker: on two cores about as much computation as 1 Gbit/s can hide behind
SEGMENT_STEPS = 10  # before the next variant takes its turn
CHECK_STEPS, CHECK_BATCH_SIZE, PICTURE_STEPS = 4, 8, 3


def work(job: tuple[int, Path]) -> dict[str, Any]:
    """Train for some steps, write picture and trace into a folder, and return the figures of rank 0."""
    steps, folder = job
    torch.manual_seed(0)
    images = load_images(None, 32)
    network = resnet18(num_classes=images.num_classes)
    difference = check_agreement(network, images.train)
    variants = [build(copy.deepcopy(network)) for build in (build_plain, build_dear, build_alone)]
    train_in_turns(variants, images.train, steps)
    found: dict[str, Any] = {}
    if dist.get_rank() == 0:
        *compared, alone = variants
        found = {
            "images": images.name,
            "float64_difference": difference,
            "alone_s": median_step_s(alone),
            "results": [figures_of(variant, images.held_out) for variant in compared],
        }
        folder.mkdir(parents=True, exist_ok=True)
        draw(timelines := [last_steps(variant) for variant in compared], folder / "timelines.png")
        write_trace(timelines, folder / "trace.json")
    dist.barrier()
    while variants:
        variants.pop().close()
    gc.collect()  # DDP and its hooks refer to each other, and keep the group's threads alive
    return found


def check_agreement(network: nn.Module, images: Any) -> float:
    """Train with both for a few steps in float64; return the largest difference of any weight, on any rank.

    In float32 the test would be blunt. The two add the same gradients in another order, and training makes this
    rounding grow: two plain DDPs with other orders of their sums were 2e-2 apart after 20 steps.
    """
    batches = list(itertools.islice(endless_batches(images, CHECK_BATCH_SIZE), CHECK_STEPS))
    variants = [build(copy.deepcopy(network).double()) for build in (build_plain, build_dear)]
    for variant in variants:
        for inputs, labels in batches:
            variant.step(inputs.double(), labels)
        variant.wait()
        dist.barrier()
    pairs = zip(*(variant.network.parameters() for variant in variants), strict=True)
    largest = torch.stack([(one.detach() - other.detach()).abs().max() for one, other in pairs]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    for variant in variants:
        variant.close()
    return largest.item()


def train_in_turns(variants: Sequence[Variant], images: Any, steps: int) -> None:
    """Train all variants on the same batches, so that slow phases of the machine hit all of them alike."""
    batches = endless_batches(images, BATCH_SIZE)
    segment_steps = min(SEGMENT_STEPS, steps // 2)
    with tqdm(total=len(variants) * steps, unit="step", disable=dist.get_rank() != 0) as bar:
        for _ in range(steps // segment_steps):
            segment = list(itertools.islice(batches, segment_steps))
            for variant in variants:
                bar.set_description(variant.name)
                variant.segments.append([])
                for inputs, labels in segment:
                    loss = variant.step(inputs, labels)
                    variant.segments[-1].append(read_meters())
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                    bar.update()
                variant.wait()
                dist.barrier()


def read_meters() -> Reading:
    """Read the clock and the network interface; on loopback all workers share that."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    sent_bytes = psutil.net_io_counters(pernic=True)[interface].bytes_sent
    return Reading(time.perf_counter(), sent_bytes / (dist.get_world_size() if interface.startswith("lo") else 1))


def figures_of(variant: Variant, held_out: Any) -> dict[str, Any]:
    """Return figures per step, and accuracy on held-out images."""
    steps = steps_of(variant)
    variant.network.eval()
    with torch.no_grad():  # on this rank alone, so past DDP, whose forward would send buffers
        inputs, labels = next(iter(DataLoader(held_out, len(held_out))))
        guesses = variant.network(inputs).argmax(1)
    return {
        "name": variant.name,
        "step_s": median_step_s(variant),
        "sent_bytes": statistics.fmean(after.sent_bytes - before.sent_bytes for before, after in steps),
        "accuracy": (guesses == labels).float().mean().item(),
    }


def steps_of(variant: Variant) -> list[tuple[Reading, Reading]]:
    """Return the meters before and after every measured step.

    The first segment warms up. So does the first step of each: later ones begin with the gathers that a step left.
    """
    return [pair for readings in variant.segments[1:] for pair in itertools.pairwise(readings)]


def median_step_s(variant: Variant) -> float:
    return statistics.median(after.time_s - before.time_s for before, after in steps_of(variant))


def last_steps(variant: Variant) -> Timeline:
    """Return the timeline of the last steps."""
    ends_s = [reading.time_s for reading in variant.segments[-1][-PICTURE_STEPS - 1 :]]
    mean_ms = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) * 1e3
    return Timeline(f"{variant.name}: {mean_ms:.0f} ms per step", ends_s, variant.spans + variant.communication())
