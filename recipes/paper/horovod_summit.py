"""Training steps on Summit, as the Horovod paper has them: its four models, its network, its variants of Horovod.

Where the paper gives no number, the source is named beside it, or it is called an assumption; :class:`Assumed` varies
these one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from ddp_hooks.comm import AlphaBeta
from ddp_hooks.planning import Ddp, Network, Prediction, StepProfile, simulate
from ddp_hooks.planning.timeline import COMPUTE_TRACKS, subtract
from recipes.benchmarks.workloads import BACKWARD_PER_FORWARD, LayerSpec, Workload, trace
from recipes.paper.strategies.horovod import AGREEMENT_TRACK, Agreement, Horovod, buffer_bytes
from recipes.paper.strategies.rounds import Schedule

NODE_SIZE = 6  # section 4.1
INSIDE_BYTES_S = 50e9  # NVLink 2.0
BETWEEN_BYTES_S = 23e9  # EDR InfiniBand, per node

LATENCIES_S = {"short": (2.7e-6, 0.6e-6), "middle": (5e-6, 0.6e-6), "long": (14e-6, 4e-6)}
"""Of a hop between nodes and within one. The paper gives none; these are what NCCL reckons with (src/graph/tuning.cc:
NET and NVLINK), for its low-latency protocol in rings and in trees, and for the protocol of long messages."""

# Assumptions; the paper gives neither. To parse a message and send the answer takes a few microseconds, and to find one
# tensor's name in a table and count it about one.
MESSAGE_S = 5e-6
REQUEST_S = 1e-6

BACKENDS: dict[str, tuple[Schedule, bool]] = {
    "NCCL": ("two-level-log", False),  # stands for its trees; calls are queued, and the next cycle begins
    "Hierarchical": ("two-level", True),
    "MPI": ("ring", True),
}
"""Schedule of the all-reduces, and whether the next cycle waits for them."""

BATCH = 64  # section 4.1
PEAK_FLOPS_S = 15.7e12  # of a V100, single precision
IMAGES_PER_S = {"resnet50": 367.0, "efficientnet_b0": 4672 / 8}
"""A V100's training throughput in single precision (NVIDIA, DeepLearningExamples, PyTorch). VGG-19 is not there: it has
the utilisation of ResNet-50."""

STEMDL_FLOPS_S = 59.67e12  # section 4.4: sustained, on a single GPU
STEMDL_BYTES = 880e6  # section 2.3
STEMDL_PIXELS = 512  # with 1,024 channels, one sample per batch: input_flags.json of the public code (nlaanait/stemdl)
STEMDL_CHANNELS = 1024
# Layers of dense blocks, and the width with which there are 220 million parameters: of that code's
# network_FCDenseNet_custom.json, whose width is 128; of FC-DenseNet103 (Jégou et al., 2017), which has more tensors.
DENSE_FCN = {"stemdl": ((2, 2, 3), 4, 404), "stemdl_deep": ((4, 5, 7, 10, 12), 15, 86)}

IMAGE_MODELS = ("efficientnet_b0", "resnet50", "vgg19")
WORKERS = (6, 24, 96, 192, 384, 768, 1536, 3072, 6000, 12_000, 27_600)


@dataclass(frozen=True)
class Assumed:
    """What the paper leaves open.

    Args:
        name: what is not as it is elsewhere.
        model: whose step; a key of ``DENSE_FCN``, or one of ``IMAGE_MODELS``.
        compute: how many times as long as :func:`compute_s` says it computes.
        latency: of the network, a key of ``LATENCIES_S``.
        coordinator: how many times as long as assumed a coordinator takes for messages and requests.
        line_rate: what part of it both links carry.
    """

    name: str
    model: str
    compute: float = 1.0
    latency: str = "middle"
    coordinator: float = 1.0
    line_rate: float = 1.0

    @cached_property
    def step(self) -> StepProfile:
        """Of one worker."""
        return Workload(self.model, layers_of(self.model), compute_s(self.model)).step_profile(self.compute)

    def network(self, workers: int) -> Network:
        """So many GPUs, six per node."""
        between_s, inside_s = LATENCIES_S[self.latency]
        between = AlphaBeta(between_s, 1 / (BETWEEN_BYTES_S * self.line_rate))
        inside = AlphaBeta(inside_s, 1 / (INSIDE_BYTES_S * self.line_rate))
        return Network(workers, between, NODE_SIZE, inside, native=True)

    def horovod(self, way: Way) -> Horovod:
        """As the simulator knows it."""
        schedule, waits = BACKENDS[way.backend]
        return Horovod(
            agreement=way.agreement,
            message_s=MESSAGE_S * self.coordinator,
            request_s=REQUEST_S * self.coordinator,
            num_groups=way.groups,
            schedule=schedule,
            waits=waits,
        )


@dataclass(frozen=True)
class Way:
    """A variant of Horovod.

    Args:
        backend: a key of ``BACKENDS``.
        agreement: ``"bitvector"`` is the paper's caching.
        groups: into which tensors are grouped; None: as the cycles have it.
    """

    backend: str = "NCCL"
    agreement: Agreement = "bitvector"
    groups: int | None = None


@dataclass(frozen=True)
class Outcome:
    """A simulated step, with what the figures show of it.

    Args:
        step_s, compute_s: of the step, and of its forward and backward.
        agreements, agreement_s: how many cycles of one step went through the control plane, and their seconds.
        all_reduces, all_reduce_s: of one step.
        exposed_s: seconds of these all-reduces with no computing at the same time.
        buffers: bytes of each all-reduce of Horovod's; of all steps.
    """

    step_s: float
    compute_s: float
    agreements: float
    agreement_s: float
    all_reduces: float
    all_reduce_s: float
    exposed_s: float
    buffers: tuple[int, ...]

    @property
    def efficiency(self) -> float:
        """Part of the step in which it computes, which is that of a linear speedup, too."""
        return self.compute_s / self.step_s

    @property
    def busy(self) -> float:
        """Part of the step in which it computes or all-reduces: a GPU's monitor sees NCCL's kernels, too."""
        return (self.compute_s + self.exposed_s) / self.step_s

    @property
    def overlap(self) -> float:
        """Part of the all-reduces that computing hides."""
        return 1 - self.exposed_s / self.all_reduce_s


STEMDL = Assumed("as above", "stemdl")
RESNET = Assumed("as above", "resnet50")
BASELINE = Way(agreement="coordinator")
CACHING = Way()


@cache
def outcome(assumed: Assumed, way: Way | Ddp, workers: int) -> Outcome:
    """Simulate it."""
    strategy = way if isinstance(way, Ddp) else assumed.horovod(way)
    return _seen(simulate(strategy, assumed.step, assumed.network(workers)), assumed.step.compute_s)


def speedup(assumed: Assumed, way: Way, other: Way, workers: int) -> float:
    """How many times as many samples per second one way takes as the other."""
    return outcome(assumed, other, workers).step_s / outcome(assumed, way, workers).step_s


def pflops(assumed: Assumed, way: Way, workers: int) -> float:
    """Of all GPUs, where each sustains the paper's rate while it computes."""
    return workers * STEMDL_FLOPS_S * outcome(assumed, way, workers).efficiency / 1e15


def images_per_s(assumed: Assumed, way: Way | Ddp, workers: int) -> float:
    """Of all GPUs."""
    return workers * BATCH / outcome(assumed, way, workers).step_s


@dataclass(frozen=True)
class Extent:
    """How much of everything is simulated."""

    quick: bool = False

    def workers(self, last: int) -> tuple[int, ...]:
        """Numbers of GPUs up to that of a figure."""
        return (6, min(last, 768)) if self.quick else tuple(workers for workers in WORKERS if workers <= last)

    @property
    def models(self) -> tuple[str, ...]:
        """Of Fig. 10."""
        return ("resnet50",) if self.quick else IMAGE_MODELS

    def varied(self, central: Assumed) -> list[Assumed]:
        """What the paper leaves open, one at a time."""
        others = [
            replace(central, name="computing × ½", compute=0.5),
            replace(central, name="computing × 2", compute=2.0),
            replace(central, name="short latency", latency="short"),
            replace(central, name="long latency", latency="long"),
            replace(central, name="coordinator × ¼", coordinator=0.25),
            replace(central, name="coordinator × 4", coordinator=4.0),
            replace(central, name="a quarter of the line rate", line_rate=0.25),
        ]
        if central.model == "stemdl":
            others.append(replace(central, name="103 layers", model="stemdl_deep"))
        return [central, *(others[:1] if self.quick else others)]


def _seen(predicted: Prediction, compute_s: float) -> Outcome:
    steps = len(predicted.step_ends_s)
    agreements = [span for span in predicted.spans if span.track == AGREEMENT_TRACK]
    reduced = [span for span in predicted.spans if span.name.startswith("all-reduce of")]
    computed = [span for span in predicted.spans if span.track in COMPUTE_TRACKS]
    exposed = [part for span in reduced for part in subtract(span, computed)]
    return Outcome(
        predicted.step_s,
        compute_s,
        len(agreements) / steps,
        sum(span.end_s - span.start_s for span in agreements) / steps,
        len(reduced) / steps,
        sum(span.end_s - span.start_s for span in reduced) / steps,
        sum(span.end_s - span.start_s for span in exposed) / steps,
        tuple(buffer_bytes(reduced)),
    )


@cache
def compute_s(model: str) -> float:
    """Seconds of forward and backward."""
    if model in DENSE_FCN:
        return train_flops(model) / STEMDL_FLOPS_S
    if model in IMAGES_PER_S:
        return BATCH / IMAGES_PER_S[model]
    return train_flops(model) * BATCH / (utilisation("resnet50") * PEAK_FLOPS_S)


def utilisation(model: str) -> float:
    """Of the peak rate."""
    return train_flops(model) * BATCH / compute_s(model) / PEAK_FLOPS_S


def train_flops(model: str) -> float:
    """Operations of forward and backward, of one sample; the backward has twice those of the forward."""
    return (1 + BACKWARD_PER_FORWARD) * sum(layer.forward_flops for layer in layers_of(model))


@cache
def layers_of(model: str) -> tuple[LayerSpec, ...]:
    """What a model consists of."""
    with torch.device("meta"):
        if model in DENSE_FCN:
            made: nn.Module = DenseFcn(*DENSE_FCN[model])
            image = torch.empty(1, STEMDL_CHANNELS, STEMDL_PIXELS, STEMDL_PIXELS)
        else:
            import torchvision

            made = getattr(torchvision.models, model)()
            image = torch.empty(1, 3, 224, 224)  # section 4.1
        return trace(made, lambda network: network(image))


class DenseFcn(nn.Module):
    """A fully convolutional dense network, as image to image: dense blocks, down and up again, with skips between.

    Args:
        blocks: layers of the blocks on the way down; those on the way up mirror them.
        bottleneck: layers of the block in between.
        growth: channels that a layer adds.
    """

    def __init__(self, blocks: Sequence[int], bottleneck: int, growth: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(STEMDL_CHANNELS, growth, 3, padding=1)
        channels = growth
        self.down, self.shrink, skips = nn.ModuleList(), nn.ModuleList(), []
        for layers in blocks:
            self.down.append(_DenseBlock(channels, layers, growth))
            channels += layers * growth
            skips.append(channels)
            self.shrink.append(nn.Conv2d(channels, channels, 1))
        self.bottleneck = _DenseBlock(channels, bottleneck, growth)
        self.grow, self.up = nn.ModuleList(), nn.ModuleList()
        new = bottleneck * growth
        for layers, skipped in zip(reversed(blocks), reversed(skips), strict=True):
            self.grow.append(nn.ConvTranspose2d(new, new, 1, stride=2, output_padding=1))
            self.up.append(_DenseBlock(new + skipped, layers, growth))
            new = layers * growth
        self.last = nn.Conv2d(new, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        """One image of one channel for each of many channels."""
        state = self.first(image)
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            state = torch.cat([state, block(state)], 1)
            skips.append(state)
            state = nn.functional.max_pool2d(shrink(state), 2)
        state = self.bottleneck(state)
        for grow, block in zip(self.grow, self.up, strict=True):
            state = block(torch.cat([grow(state), skips.pop()], 1))
        return self.last(state)


class _DenseBlock(nn.Module):
    """Every layer reads what all layers before it have made; what they made is what comes out."""

    def __init__(self, channels: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(channels + i * growth, growth, 3, padding=1) for i in range(layers))

    def forward(self, state: Tensor) -> Tensor:
        made: list[Tensor] = []
        for layer in self.layers:
            made.append(nn.functional.relu(layer(torch.cat([state, *made], 1))))
        return torch.cat(made, 1)
