"""The ways to train that are compared: plain DDP, DDP with bf16 all-reduce, FSDP2, DeAR, and sparse all-reduce.

A variant is named on the command line: `ddp-25mb` (any size), `ddp-bf16`, `ddp-powersgd` (rank 4), `ddp-alone`
(nothing is sent: what this machine could do at best), `fsdp2`, `fsdp2-ext`, `fsdp2-tuned`, `dear`, `topk`,
`quantized`, or one of the last six with settings of its own, as in `dear:lanes=1,slice_mb=4`, `dear:bucket_mb=1`,
`dear:gather_dtype=torch.bfloat16`, `topk:density=0.001,pipeline=forward`, `quantized:bits=4`, `fsdp2:block_mb=5` or
`fsdp2-ext:block_mb=5,defer=False`.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.
import ast
import dataclasses
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recipes.benchmarks.emulation import emulate
from recipes.benchmarks.workloads import Workload

DDP_BUCKETS_MB = (1, 5, 25, 64)
DEFAULT_VARIANTS = (*(f"ddp-{mb}mb" for mb in DDP_BUCKETS_MB), "ddp-bf16", "fsdp2", "dear", "dear:update=replicated")
FSDP_BLOCK_MB = 25.0  # DDP's default bucket size
_HOOKS = ("dear", "topk", "quantized")
HOOK_BUCKET_MB = 5  # the smallest that keeps messages large; see docs/dear.md

OptimizerFactory = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Trainee:
    """A wrapped model with its optimizer, ready to run steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    begin_step: Callable[[], None] = lambda: None
    micro_batches: int = 1  # backwards of a step
    begin_micro_batch: Callable[[bool], None] = lambda is_last: None
    inputs: tuple[Tensor, ...] = (torch.ones(1),)
    autocast: bool = False  # to bfloat16
    # Waits for whatever is in flight, gives resources back and returns statistics of the last step.
    finish: Callable[[], dict[str, float]] = field(default=dict)


@dataclass(frozen=True)
class Stock:
    """What can be set about FSDP2 with its own communication.

    Args:
        ahead: ask for every gather at the start of the step, through the public `unshard(async_op=True)`.
    """

    ahead: bool = True


@dataclass(frozen=True)
class Sharding:
    """How FSDP2 is used, extended or not.

    Args:
        block_mb: size of the blocks that are wrapped.
        first_mb: size of the first of them, if that is less.
        set_to_none: whether `zero_grad()` drops gradients; False leaves zeros to be added to, as the second of two
            backwards would.
        replicas: ranks that have the same shards (HSDP).
        force_sums: sum gradients, and divide afterwards (`set_force_sum_reduction_for_comms`).
        micro_batches: backwards of a step, each of which computes as long as a step otherwise does.
        reduce_once: over replicas, in the last of them (`set_requires_all_reduce`).
    """

    block_mb: float = FSDP_BLOCK_MB
    first_mb: float = 1.0
    set_to_none: bool = True
    replicas: int = 1
    force_sums: bool = False
    micro_batches: int = 1
    reduce_once: bool = False


@dataclass(frozen=True)
class VariantSpec:
    """A variant's name, taken apart; `settings` are fields of its configuration, such as `DearConfig`."""

    name: str
    kind: str  # what stands before the colon; "ddp" with any size of buckets
    bucket_mb: float = 25.0  # DDP's default
    settings: dict[str, Any] = field(default_factory=dict)
    sharding: Sharding = Sharding()  # of FSDP2

    @property
    def is_plain_ddp(self) -> bool:
        return self.kind == "ddp"


def parse_variant(name: str, dear_settings: dict[str, Any] | None = None) -> VariantSpec:
    """The variant called `name`; `dear_settings` apply to every DeAR variant and yield to its own."""
    if match := re.fullmatch(r"ddp-(\d+(?:\.\d+)?)mb", name):
        return VariantSpec(name, "ddp", float(match[1]))
    if name in ("ddp-bf16", "ddp-alone"):
        return VariantSpec(name, name)
    if name == "ddp-powersgd":
        return VariantSpec(name, name, bucket_mb=1 << 20)  # on gloo torch's hook hangs with several buckets
    kind, _, own = name.partition(":")
    if kind in ("fsdp2", "fsdp2-ext", "fsdp2-tuned"):
        settings = parse_settings(own.split(",") if own else [])
        of_sharding = {entry.name for entry in dataclasses.fields(Sharding)} & settings.keys()
        sharding = Sharding(**{key: settings.pop(key) for key in of_sharding})
        return VariantSpec(name, kind, settings=settings, sharding=sharding)
    if kind in _HOOKS:
        common = dear_settings or {} if kind == "dear" else {}
        settings = {**common, **parse_settings(own.split(",") if own else [])}
        return VariantSpec(name, kind, settings.pop("bucket_mb", HOOK_BUCKET_MB), settings)
    raise ValueError(
        f"variant must be ddp-<size>mb, ddp-bf16, ddp-powersgd, ddp-alone, fsdp2, fsdp2-ext, fsdp2-tuned, dear, "
        f"topk or quantized, the last six with :key=value,… behind them for other settings, got {name!r}"
    )


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """`["lanes=3", "fusion=size"]` as `{"lanes": 3, "fusion": "size"}`: Python literals, torch's types, or text."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise ValueError(f"a setting must read key=value, got {pair!r}")
        if text.startswith("torch."):
            settings[key] = getattr(torch, text.removeprefix("torch."))
            continue
        try:
            settings[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            settings[key] = text
    return settings


def why_unavailable(spec: VariantSpec) -> str | None:
    """Why this variant cannot run here, or None if it can. Wrong settings raise."""
    if spec.kind not in (*_HOOKS, "fsdp2", "fsdp2-ext", "fsdp2-tuned"):
        return None
    if importlib.util.find_spec("ddp_hooks") is None:
        return "package ddp_hooks is not installed"
    try:
        from ddp_hooks import DearConfig, QuantizedConfig, TopKConfig
        from fsdp_ext import ExtConfig
    except ImportError as error:
        return str(error)
    configs: dict[str, Any] = {"dear": DearConfig, "topk": TopKConfig, "quantized": QuantizedConfig, "fsdp2": Stock}
    config = configs.get(spec.kind, ExtConfig)
    unknown = set(spec.settings) - {entry.name for entry in dataclasses.fields(config)}
    if unknown:
        raise ValueError(f"{spec.name}: {config.__name__} has no field {', '.join(sorted(unknown))}")
    config(**spec.settings)
    return None


def build(spec: VariantSpec, workload: Workload, slow: float, make_optimizer: OptimizerFactory) -> Trainee:
    """Makes the model and wraps it. Every rank calls this at the same time."""
    if spec.kind in ("fsdp2", "fsdp2-ext", "fsdp2-tuned"):
        from recipes.benchmarks.fsdp_variants import build_fsdp2  # takes a second, which the others need not pay

        return build_fsdp2(spec, workload, slow, make_optimizer)
    ddp = DistributedDataParallel(
        emulate(workload, slow),
        bucket_cap_mb=spec.bucket_mb,
        gradient_as_bucket_view=True,
        init_sync=False,  # every rank made the same weights: spare the slow link
    )
    trainee = with_hook(ddp, make_optimizer(ddp.parameters()), spec)
    trainee.autocast = workload.gradients != "float32"
    return trainee


def with_hook(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, spec: VariantSpec, powersgd_after: int = 2
) -> Trainee:
    """Gives a model, wrapped with the variant's bucket size, the variant's hook; PowerSGD begins after some steps."""
    if spec.kind in _HOOKS:
        return _hooked(ddp, optimizer, spec)
    if spec.kind == "ddp-bf16":
        ddp.register_comm_hook(None, bf16_allreduce)
    if spec.kind == "ddp-alone":
        ddp.register_comm_hook(None, no_allreduce)
    if spec.kind == "ddp-powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=powersgd_after)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Trainee(ddp, optimizer)


def bf16_allreduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """All-reduces the mean gradient in bfloat16: half the bytes, eight bits of precision.

    torch's `bf16_compress_hook` does the same and is refused, by its name, on gloo.
    """
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(dist.get_world_size())

    def decompress(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(reduced.value()[0])

    return dist.all_reduce(compressed, async_op=True).get_future().then(decompress)


def no_allreduce(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Send nothing: every rank keeps its own gradient."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _hooked(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, spec: VariantSpec) -> Trainee:
    from ddp_hooks import (
        DearConfig,
        DearState,
        QuantizedConfig,
        QuantizedState,
        TopKConfig,
        TopKState,
        dear_hook,
        quantized_hook,
        topk_hook,
    )

    state: DearState | TopKState | QuantizedState
    if spec.kind == "dear":
        state = DearState(ddp, optimizer, DearConfig(**spec.settings))
        ddp.register_comm_hook(state, dear_hook)
    elif spec.kind == "topk":
        state = TopKState(ddp, TopKConfig(**spec.settings), optimizer=optimizer)
        ddp.register_comm_hook(state, topk_hook)
    else:
        state = QuantizedState(ddp, QuantizedConfig(**spec.settings))
        ddp.register_comm_hook(state, quantized_hook)

    def finish() -> dict[str, float]:
        state.synchronize()
        statistics = dataclasses.asdict(state.stats())
        state.close()
        return statistics

    return Trainee(ddp, optimizer, finish=finish)
