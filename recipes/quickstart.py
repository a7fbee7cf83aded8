"""Plain DDP and DeAR side by side: a ResNet on real images, four workers, one run.

    python recipes/quickstart.py

Both train the same network from the same weights on the same batches, taking turns of a few steps, so that both
see the same moods of the machine. A third copy trains without any communication and shows what a step would take on
a free network. The workers run on the emulated cluster (recipes/cluster), behind links of --rate; where its rights
are missing, on the loopback interface.
"""
# No `from __future__ import annotations`: DDP compares the annotation of a hook's bucket.

import argparse
import copy
import gc
import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torchvision.models import ResNet, resnet18
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `recipes`, when this file runs as a script

from ddp_hooks import DearConfig, DearState, Span, dear_hook
from ddp_hooks.planning.timeline import Timeline, draw, write_trace
from recipes.cluster import Cluster, ClusterUnavailable
from recipes.cluster.launch import run_workers
from recipes.common.images import Images, endless_batches, load_images

PLAIN, DEAR, ALONE = "plain DDP", "DeAR", "no communication"
BATCH_SIZE = 48  # per worker: on two cores about as much computation as 1 Gbit/s can hide behind
LEARNING_RATE = 0.01
SEGMENT_STEPS = 10  # before the next variant takes its turn
ALONE_STEPS = 4  # per segment, of the copy that does not communicate
CHECK_STEPS = 4
CHECK_BATCH_SIZE = 8
TOLERANCE = 1e-10  # of weights after the check; rounding alone leaves 1e-14
PICTURE_STEPS = 3


# -- what users choose ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The command line.

    Args:
        workers: how many ranks.
        rate: of each worker's link on the emulated cluster, as ``"1gbit"``.
        steps: training steps of each variant.
        images: an ImageFolder, None for scikit-learn's digits.
        image_size: height and width that images are brought to.
        output: folder for the picture, the trace and the figures.
        network: ``"auto"`` (the cluster if it can be had), ``"cluster"`` or ``"loopback"``.
        worker: None in the process that users start; in workers, where they run, in words.
    """

    workers: int
    rate: str
    steps: int
    images: Path | None
    image_size: int
    output: Path
    network: str
    worker: str | None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers must be >= 1, got {self.workers}")
        if self.steps < 4:
            raise ValueError(f"--steps must be >= 4 (the first half warms up), got {self.steps}")
        if self.images is not None and not self.images.is_dir():
            raise ValueError(f"--images must be a folder with one folder of images per class, got {self.images}")


def parse(arguments: Sequence[str] | None = None) -> Settings:
    parser = argparse.ArgumentParser(description="Trains a ResNet with plain DDP and with DeAR, side by side.")
    add = parser.add_argument
    add("--workers", type=int, default=4, metavar="N", help="number of workers (default: %(default)s)")
    add("--rate", default="1gbit", help="rate of each worker's link, as 500mbit (default: %(default)s)")
    add("--steps", type=int, default=50, metavar="N", help="training steps of each (default: %(default)s)")
    add("--images", type=Path, metavar="FOLDER", help="one folder per class (default: scikit-learn's digits)")
    add("--image-size", type=int, default=32, metavar="PIXELS", help="images are resized (default: %(default)s)")
    add("--output", type=Path, default=Path("build/quickstart"), metavar="DIR", help="default: %(default)s")
    add("--network", choices=("auto", "cluster", "loopback"), default="auto", help="default: %(default)s")
    add("--worker", metavar="WHERE", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        return Settings(**vars(options))
    except ValueError as error:
        parser.error(str(error))


def main() -> int:
    settings = parse()
    return launch(settings) if settings.worker is None else work(settings)


# -- starting workers -------------------------------------------------------------------------------------------------


def launch(settings: Settings) -> int:
    """Runs the workers, on the emulated cluster if it can be had, and returns their exit code."""
    try:
        images_for(settings)  # one message now is better than one per worker later
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    command = [sys.executable, __file__, *sys.argv[1:], "--worker"]
    if settings.network != "loopback":
        try:
            with Cluster(settings.workers, settings.rate) as cluster:
                return cluster.run([*command, _describe(cluster, settings.rate)])
        except ValueError as error:
            sys.exit(f"error: {error}")
        except ClusterUnavailable as error:
            if settings.network == "cluster":
                sys.exit(f"error: {error}")
            print(f"Running on loopback instead of the emulated cluster: {error}", file=sys.stderr)
    return run_on_loopback([*command, "the loopback interface, not slowed down"], settings.workers)


def _describe(cluster: Cluster, rate: str) -> str:
    measured = f", {cluster.measure().goodput_bit_s / 1e6:.0f} Mbit/s measured" if cluster.num_workers > 1 else ""
    return f"an emulated cluster with links of {rate}{measured}"


def run_on_loopback(command: Sequence[str], num_workers: int) -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    loopback = next(name for name in psutil.net_if_addrs() if name.startswith("lo"))
    shared = {
        **os.environ,
        "WORLD_SIZE": str(num_workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": loopback,
        "OMP_NUM_THREADS": "1",  # workers share the machine's cores with each other
    }
    return run_workers(
        [command] * num_workers,
        [{**shared, "RANK": str(rank)} for rank in range(num_workers)],
        timeout_s=None,
        grace_s=5.0,
        prefix=False,
    )


# -- images -----------------------------------------------------------------------------------------------------------


def images_for(settings: Settings) -> Images:
    images = load_images(settings.images, settings.image_size)
    needed = settings.workers * BATCH_SIZE
    if len(images.train) < needed:
        raise ValueError(
            f"expected at least {needed} images for training ({BATCH_SIZE} for each of {settings.workers} workers), "
            f"got {len(images.train)} in {images.name}: add images or use fewer --workers"
        )
    return images


# -- what is compared -------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """Meters of this process at one moment."""

    time_s: float
    cpu_s: float  # all threads
    sent_bytes: float  # by this worker, headers included


@dataclass
class Variant:
    """One copy of the network in training, and what was seen of it.

    Args:
        name: for the table.
        network: the ResNet itself.
        model: what the training loop calls.
        optimizer: steps ``network``.
        settle: waits for communication that a step may have left under way.
        communication: spans of what travelled, and of waits for it.
        close: ends background work.
        after_step: called when a step has ended.
    """

    name: str
    network: ResNet
    model: nn.Module
    optimizer: torch.optim.Optimizer
    settle: Callable[[], None] = lambda: None
    communication: Callable[[], list[Span]] = list
    close: Callable[[], None] = lambda: None
    after_step: Callable[[], object] = lambda: None
    loop_spans: list[Span] = field(default_factory=list)
    segments: list[list[Reading]] = field(default_factory=list)  # per segment, the meters at the end of each step

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.loop_spans.append(Span(name, name, start_s, time.perf_counter()))


def build_plain(network: ResNet) -> Variant:
    ddp = DistributedDataParallel(network, gradient_as_bucket_view=True)
    travelled: list[Span] = []
    ddp.register_comm_hook(travelled, recorded_all_reduce)
    variant = Variant(PLAIN, network, ddp, make_optimizer(network))
    variant.communication = lambda: travelled + waits_for_all_reduce(travelled, variant.loop_spans)
    return variant


def build_dear(network: ResNet) -> Variant:
    ddp = DistributedDataParallel(network, bucket_cap_mb=5, gradient_as_bucket_view=True)
    optimizer = make_optimizer(network)
    state = DearState(ddp, optimizer, DearConfig(trace=True))
    ddp.register_comm_hook(state, dear_hook)
    return Variant(DEAR, network, ddp, optimizer, state.synchronize, state.timeline, state.close)


def build_alone(network: ResNet) -> Variant:
    # A barrier per step: synchronous training waits for its slowest worker, however fast the network.
    return Variant(ALONE, network, network, make_optimizer(network), after_step=dist.barrier)


def make_optimizer(network: ResNet) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=0.9)


def recorded_all_reduce(travelled: list[Span], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does without a hook, and a note of when."""
    start_s = time.perf_counter()
    name = f"all-reduce of bucket {bucket.index()}"
    mean = bucket.buffer().div_(dist.get_world_size())
    reduction = dist.all_reduce(mean, async_op=True)
    assert reduction is not None  # None is for ranks outside the group

    def note_end(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        travelled.append(Span("all-reduce", name, start_s, time.perf_counter()))
        return reduced.value()[0]

    return reduction.get_future().then(note_end)


def waits_for_all_reduce(travelled: Sequence[Span], loop_spans: Sequence[Span]) -> list[Span]:
    """From the hand-over of the last bucket, when all gradients are there, backward only waits."""
    waits = []
    for backward in (span for span in loop_spans if span.name == "backward"):
        handed_over = [s.start_s for s in travelled if backward.start_s <= s.start_s <= backward.end_s]
        if handed_over:
            waits.append(Span("wait", "backward waits for all-reduce", max(handed_over), backward.end_s))
    return waits


# -- training ---------------------------------------------------------------------------------------------------------


def work(settings: Settings) -> int:
    """One worker: check, train, and on rank 0 report."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = images_for(settings)
    network = resnet18(num_classes=images.num_classes)
    difference = check_agreement(network, images)
    variants = [build(copy.deepcopy(network)) for build in (build_plain, build_dear, build_alone)]
    train_in_turns(variants, images, settings.steps)
    final_difference = largest_difference(variants[0].network, variants[1].network)
    if dist.get_rank() == 0:
        report(settings, images, variants, difference, final_difference)
    dist.barrier()
    while variants:
        variants.pop().close()
    gc.collect()  # DDP and its hooks refer to each other, and keep the group's threads alive
    dist.destroy_process_group()
    return 0 if difference <= TOLERANCE else 1


def train_in_turns(variants: Sequence[Variant], images: Images, steps: int) -> None:
    batches = endless_batches(images.train, BATCH_SIZE)
    segment_steps = min(SEGMENT_STEPS, steps // 2)
    num_compared = sum(variant.name != ALONE for variant in variants)
    with progress_bar(num_compared * steps) as bar:
        for start in range(0, steps, segment_steps):
            segment = list(itertools.islice(batches, min(segment_steps, steps - start)))
            for variant in variants:
                bar.set_description(variant.name)
                train_segment(variant, segment if variant.name != ALONE else segment[:ALONE_STEPS], bar)


def train_segment(variant: Variant, batches: Sequence[tuple[Tensor, Tensor]], bar: tqdm) -> None:
    """The first step is not measured: like every later one, the second starts with the gathers that a step left."""
    meter = make_meter()
    readings = []
    for inputs, labels in batches:
        loss = train_step(variant, inputs, labels)
        readings.append(meter())
        if variant.name != ALONE:
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
    variant.settle()
    dist.barrier()
    variant.segments.append(readings)


def progress_bar(num_steps: int) -> tqdm:
    return tqdm(total=num_steps, unit="step", dynamic_ncols=True, disable=dist.get_rank() != 0)


def train_step(variant: Variant, inputs: Tensor, labels: Tensor) -> float:
    variant.optimizer.zero_grad()
    with variant.span("forward"):
        loss = F.cross_entropy(variant.model(inputs), labels)
    with variant.span("backward"):
        loss.backward()
    with variant.span("optimizer"):
        variant.optimizer.step()
    variant.after_step()
    return loss.item()


def check_agreement(network: ResNet, images: Images) -> float:
    """Trains both for a few steps in float64; the largest difference of any weight, on any rank.

    In float32 the test would be blunt. The two add the same gradients in another order, and this rounding grows: a
    ReLU or a pooling that tips over changes a gradient visibly. Two plain DDPs that differed in nothing but the
    order of their sums were 8e-3 apart after 10 steps and 2e-2 after 20.
    """
    batches = list(itertools.islice(endless_batches(images.train, CHECK_BATCH_SIZE), CHECK_STEPS))
    variants = [build(copy.deepcopy(network).double()) for build in (build_plain, build_dear)]
    with progress_bar(len(variants) * CHECK_STEPS) as bar:
        bar.set_description("float64 check")
        for variant in variants:
            for inputs, labels in batches:
                train_step(variant, inputs.double(), labels)
                bar.update()
            variant.settle()
            dist.barrier()
    difference = largest_difference(variants[0].network, variants[1].network)
    for variant in variants:
        variant.close()
    return difference


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    largest = torch.stack([(a.detach() - b.detach()).abs().max() for a, b in pairs]).max().double()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def make_meter() -> Callable[[], Reading]:
    """Reads clocks and the counter of the network interface; on loopback all workers share that one."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    shared_by = dist.get_world_size() if on_loopback() else 1

    def read() -> Reading:
        sent_bytes = psutil.net_io_counters(pernic=True)[interface].bytes_sent
        return Reading(time.perf_counter(), time.process_time(), sent_bytes / shared_by)

    return read


def on_loopback() -> bool:
    return os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")


# -- report -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One row of figures. Times and bytes are per step, of rank 0."""

    name: str
    step_s: float  # median
    exposed_s: float  # what communication adds to the step
    sent_bytes: float
    cpu_s: float
    loss: float  # on held-out images, like the accuracy
    accuracy: float


@dataclass(frozen=True)
class Report:
    """All that one run found out."""

    where: str
    loopback: bool  # the emulated cluster otherwise
    images: str
    workers: int
    cores: int
    steps: int
    num_parameters: int
    alone_s: float  # median step without communication
    results: list[Result]
    float64_difference: float
    tolerance: float
    float32_difference: float

    @property
    def agree(self) -> bool:
        return self.float64_difference <= self.tolerance


def report(
    settings: Settings, images: Images, variants: Sequence[Variant], difference: float, final_difference: float
) -> None:
    """Prints the table and what it means; writes picture, trace and figures."""
    compared = [variant for variant in variants if variant.name != ALONE]
    alone_s = median_step_s(next(variant for variant in variants if variant.name == ALONE))
    found = Report(
        where=str(settings.worker),
        loopback=on_loopback(),
        images=images.name,
        workers=dist.get_world_size(),
        cores=len(psutil.Process().cpu_affinity()) if hasattr(psutil.Process, "cpu_affinity") else os.cpu_count() or 1,
        steps=settings.steps,
        num_parameters=sum(parameter.numel() for parameter in compared[0].network.parameters()),
        alone_s=alone_s,
        results=[measure(variant, alone_s, images) for variant in compared],
        float64_difference=difference,
        tolerance=TOLERANCE,
        float32_difference=final_difference,
    )
    settings.output.mkdir(parents=True, exist_ok=True)
    picture, trace, figures = (settings.output / name for name in ("timelines.png", "trace.json", "result.json"))
    timelines = [typical_steps(variant, PICTURE_STEPS) for variant in compared]
    draw(timelines, picture)
    write_trace(timelines, trace)
    figures.write_text(json.dumps({**asdict(found), "agree": found.agree}, indent=2))

    console = Console()
    console.print(table_of(found))
    for paragraph in explain(found):
        console.print(paragraph, highlight=False)
    console.print(f"Timelines: {picture}; the same for https://ui.perfetto.dev: {trace}; figures: {figures}")


def measure(variant: Variant, alone_s: float, images: Images) -> Result:
    steps = steps_of(variant)
    loss, accuracy = evaluate(variant.network, images.held_out)
    return Result(
        name=variant.name,
        step_s=median_step_s(variant),
        exposed_s=median_step_s(variant) - alone_s,
        sent_bytes=statistics.fmean(after.sent_bytes - before.sent_bytes for before, after in steps),
        cpu_s=statistics.fmean(after.cpu_s - before.cpu_s for before, after in steps),
        loss=loss,
        accuracy=accuracy,
    )


def steps_of(variant: Variant) -> list[tuple[Reading, Reading]]:
    """The meters before and after every measured step; the first segment warms up (DDP arranges its buckets)."""
    return [pair for readings in variant.segments[1:] for pair in itertools.pairwise(readings)]


def median_step_s(variant: Variant) -> float:
    return statistics.median(after.time_s - before.time_s for before, after in steps_of(variant))


@torch.no_grad()
def evaluate(network: ResNet, held_out: Dataset[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean loss and accuracy; on this rank alone, so past DDP, whose forward would send buffers."""
    network.eval()
    outputs, labels = [], []
    for inputs, classes in DataLoader(held_out, batch_size=256):
        outputs.append(network(inputs))
        labels.append(classes)
    network.train()
    scores, answers = torch.cat(outputs), torch.cat(labels)
    return F.cross_entropy(scores, answers).item(), (scores.argmax(1) == answers).float().mean().item()


def typical_steps(variant: Variant, num_steps: int) -> Timeline:
    """Those consecutive steps, of which spans are kept, whose total is nearest to what the median step says."""
    expected_s, communication = median_step_s(variant), variant.communication()
    kept_s = communication[0].start_s if communication else 0.0
    runs = [
        [reading.time_s for reading in readings[start : start + num_steps + 1]]
        for readings in variant.segments[1:]
        for start in range(max(1, len(readings) - num_steps))
    ]
    candidates = [run for run in runs if len(run) > 1 and run[0] >= kept_s]
    ends_s = min(candidates, key=lambda run: abs(_mean_step_s(run) - expected_s))
    title = f"{variant.name}: {_mean_step_s(ends_s) * 1e3:.0f} ms per step"
    return Timeline(title, ends_s, variant.loop_spans + communication)


def _mean_step_s(ends_s: Sequence[float]) -> float:
    return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)


def table_of(found: Report) -> Table:
    table = Table(title=f"ResNet-18 on {found.images}, {found.workers} workers")
    table.add_column("")
    for result in found.results:
        table.add_column(result.name, justify="right")

    def row(label: str, show: Callable[[Result], str]) -> None:
        table.add_row(label, *map(show, found.results))

    row("step time", lambda r: f"{r.step_s * 1e3:.0f} ms")
    row("exposed communication", lambda r: f"{r.exposed_s * 1e3:.0f} ms")
    row("sent per step and worker", lambda r: f"{r.sent_bytes / 1e6:.1f} MB")
    row("processor time per step", lambda r: f"{r.cpu_s * 1e3:.0f} ms")
    row("loss, held-out images", lambda r: f"{r.loss:.4f}")
    row("accuracy, held-out images", lambda r: f"{r.accuracy:.1%}")
    table.add_section()
    table.add_row("weights agree (float64)", "", f"{'yes' if found.agree else 'NO'}: {found.float64_difference:.0e}")
    return table


def explain(found: Report) -> list[str]:
    plain, dear = found.results
    return [
        f"Ran on {found.where}. DeAR's step took {dear.step_s / plain.step_s:.2f} times as long as plain DDP's: it is "
        f"{plain.step_s / dear.step_s:.2f} times as fast."
        + (" Loopback is no network to hide: use the emulated cluster to see the effect." if found.loopback else ""),
        f"The weights {'agree' if found.agree else 'DO NOT AGREE'}: trained in float64 from the same start on the same "
        f"batches, none differs by more than {found.float64_difference:.0e} after {CHECK_STEPS} steps (tolerance "
        f"{found.tolerance:.0e}). After {found.steps} steps in float32 the largest difference is "
        f"{found.float32_difference:.0e}. The two add the same gradients in another order, and training amplifies "
        f"that rounding, between two runs of plain DDP as well: there, compare loss and accuracy.",
        f"Step time: the median from the end of one step to the end of the next, {PLAIN} and {DEAR} taking turns. "
        f"Exposed communication: what this is longer than the same step without communication, "
        f"{found.alone_s * 1e3:.0f} ms in the same run. Bytes: what the network interface sent, headers included.",
        f"All {found.workers} workers shared this machine's {found.cores} cores. So they compute more slowly than on "
        f"machines of their own, which hides more communication in both; and moving data takes processor time from "
        f"computing, so that hidden communication is not free, which understates DeAR. Take the ratio as an example, "
        f"not as a forecast.",
    ]


if __name__ == "__main__":
    sys.exit(main())
