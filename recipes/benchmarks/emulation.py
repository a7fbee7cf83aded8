"""A model that takes as long as a real one without computing: every layer sleeps for its share of the step.

Communication and computation then overlap on two cores as they do where an accelerator computes: what the
benchmark measures is the schedule, not the processor. Parameters, gradients and optimizer are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes.benchmarks.workloads import LayerSpec, Workload


class SleepClock:
    """Sleeps so that the sum of sleeps keeps to the schedule, however late each one wakes.

    `time.sleep` wakes 50 microseconds or more too late, which over 800 short sleeps would distort a step.
    What one sleep overslept is taken off the next ones. Time spent elsewhere (waiting for communication,
    Python) is never taken off: it is what the benchmark is there to show.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._overslept_s = 0.0

    def sleep(self, duration_s: float) -> None:
        remaining_s = duration_s - self._overslept_s
        if remaining_s <= 0:
            self._overslept_s = -remaining_s
            return
        start_s = self._clock()
        self._sleep(remaining_s)
        self._overslept_s = max(0.0, self._clock() - start_s - remaining_s)


class EmulatedLayer(nn.Module):
    """A leaf module of the real model: its parameters, and its time instead of its arithmetic.

    Args:
        parameters: the layer's own parameters by their name in the layer.
        tied: parameters registered by an earlier layer that this one reads too.
        gradients: one constant gradient for each of `parameters`; handed out as an alias, never written to.
        casts: read matrices through autocast's casts, if it is on. The casts belong to the layer's time.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        tied: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        forward_s: float,
        backward_s: float,
        clock: SleepClock,
        casts: bool = False,
    ) -> None:
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        for index, parameter in enumerate(tied):
            self.register_parameter(f"tied_{index}", parameter)
        # A tied gradient is complete when its first reader's backward has run. Autograd waits for that one;
        # this layer's contribution is left out, since the sum of the two belongs to the sleeping accelerator.
        self.gradients: list[Tensor | None] = [*gradients, *(None for _ in tied)]
        self.forward_s = forward_s
        self.backward_s = backward_s
        self.clock = clock
        readers = ((name, _reader(parameter)) for name, parameter in self.named_parameters() if casts)
        self.reads = [(name, read) for name, read in readers if read is not None]

    def forward(self, activation: Tensor) -> Tensor:
        start_s = time.thread_time()  # which stands still while parameters are waited for
        with torch.no_grad():
            for name, read in self.reads:
                read(getattr(self, name))
        self.spent_s = time.thread_time() - start_s
        result: Tensor = _Sleep.apply(activation, self, *self.parameters(recurse=False))
        return result


def _reader(parameter: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return what reads a matrix or a convolution's weight as its layer does, but for no samples; None: of others."""
    if parameter.dim() not in (2, 4):
        return None
    return partial(F.linear if parameter.dim() == 2 else F.conv2d, torch.empty(0, *parameter.shape[1:]))


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, activation: Tensor, layer: EmulatedLayer, *parameters: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        layer.clock.sleep(layer.forward_s - layer.spent_s)
        ctx.layer = layer
        return activation.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[no-untyped-def]
        layer: EmulatedLayer = ctx.layer
        layer.clock.sleep(layer.backward_s)
        # A fresh alias, so that autograd takes it as `.grad` without copying. DDP and FSDP2 then copy it
        # once, as they copy a real gradient.
        own = [constant if constant is None else constant.detach() for constant in layer.gradients]
        return gradient, None, *own


def emulate(
    workload: Workload, slow: float, block_bytes: int | None = None, first_bytes: int | None = None
) -> nn.Sequential:
    """The workload as a chain of `EmulatedLayer`, `slow` times as slow as on the paper's accelerator.

    With `block_bytes`, consecutive layers are nested in blocks of about that size, the first in one of `first_bytes`,
    for wrappers that work on modules; layers that share a tied parameter stay outside every block.
    """
    clock = SleepClock()
    largest_numel = max(spec.numel for layer in workload.layers for spec in layer.owned)
    constant = gradient_values(largest_numel)  # every gradient is a view of it, or of
    rounded = constant if workload.gradients == "float32" else constant.bfloat16().float()
    made: dict[str, nn.Parameter] = {}
    layers = []
    for spec, times in zip(workload.layers, workload.layer_times_s(slow), strict=True):
        own = {owned.name: nn.Parameter(torch.full(owned.shape, 0.01)) for owned in spec.owned}
        casts = workload.casts(spec)
        values = rounded if casts else constant
        gradients = [values[: owned.numel].view(owned.shape) for owned in spec.owned]
        tied = [made[name] for name in spec.tied]
        layers.append(EmulatedLayer(_by_leaf_name(own), tied, gradients, *times, clock, casts))
        made.update(own)
    if block_bytes is None:
        return nn.Sequential(*layers)
    return nn.Sequential(*_blocks(workload, layers, block_bytes, block_bytes if first_bytes is None else first_bytes))


def gradient_values(numel: int) -> Tensor:
    """(numel,) float32, the same every time. Small enough that no number of steps moves a weight out of range, and
    different, as in real gradients: among equal ones the largest cannot be told."""
    return torch.empty(numel).normal_(std=1e-3, generator=torch.Generator().manual_seed(0))


def _by_leaf_name(parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    return {name.rpartition(".")[2]: parameter for name, parameter in parameters.items()}


def _blocks(workload: Workload, layers: list[EmulatedLayer], block_bytes: int, first_bytes: int) -> list[nn.Module]:
    """Runs of layers of at least `block_bytes` each (but for the first and the last of a run), tied layers alone."""
    blocks: list[nn.Module] = []
    run: list[EmulatedLayer] = []
    enough = min(first_bytes, block_bytes)

    def close_run() -> None:
        nonlocal enough
        if run:
            blocks.append(nn.Sequential(*run))
            run.clear()
            enough = block_bytes

    for spec, layer in zip(workload.layers, layers, strict=True):
        if _is_tied(workload, spec):
            close_run()
            blocks.append(layer)
            continue
        run.append(layer)
        if sum(parameter.nbytes for member in run for parameter in member.parameters()) >= enough:
            close_run()
    close_run()
    return blocks


def _is_tied(workload: Workload, spec: LayerSpec) -> bool:
    tied_anywhere = {name for layer in workload.layers for name in layer.tied}
    return bool(tied_anywhere & {*spec.tied, *(owned.name for owned in spec.owned)})
