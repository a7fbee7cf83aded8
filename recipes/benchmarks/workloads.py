"""What a training step of a known model consists of: layers in execution order, shapes, shares of time.

Shapes and order are read from the real models of torchvision and transformers, built on the meta device.
Compute per layer is in proportion to its forward FLOPs; the total per step comes from the DeAR paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddp_hooks.planning import StepProfile, TensorUse

BACKWARD_PER_FORWARD = 2.0  # t_bp = 2 t_ff, the paper's assumption in Section VI-I
FLOAT32_BYTES = 4
# Norms and look-ups cost no FLOPs in torch's counter. Subtract, scale, shift and the activation behind it
# make about this many per output element, which gives them a small share of the step.
ELEMENTWISE_FLOPS = 5


Gradients: TypeAlias = Literal["float32", "autocast", "bfloat16"]
"""Which layers read their matrices through autocast's casts to bfloat16, and so have gradients of 16 bits: none, those
that do in the real model, or all of them. Parameters and gradients are stored as float32."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter tensor: its full name in the real model, and its shape. float32."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LayerSpec:
    """A module that owns parameters, or reads tied ones."""

    name: str
    owned: tuple[ParameterSpec, ...]
    tied: tuple[str, ...]  # full names of parameters that an earlier layer owns
    forward_flops: float  # for one sample
    casts: bool = False  # torch.autocast converts what it reads, so that its gradients have 16 bits


@dataclass(frozen=True)
class Workload:
    """A model's layers in execution order, and the compute seconds of one of its steps."""

    name: str
    layers: tuple[LayerSpec, ...]
    compute_s: float  # t_ff + t_bp on the paper's accelerator, at the paper's batch size
    gradients: Gradients = "float32"

    @property
    def num_tensors(self) -> int:
        return sum(len(layer.owned) for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        return sum(spec.numel * FLOAT32_BYTES for layer in self.layers for spec in layer.owned)

    def layer_times_s(self, slow: float) -> list[tuple[float, float]]:
        """(forward, backward) seconds per layer, on an accelerator `slow` times slower than the paper's."""
        total_flops = sum(layer.forward_flops for layer in self.layers)
        forward_s = self.compute_s * slow / (1 + BACKWARD_PER_FORWARD)
        shares = [layer.forward_flops / total_flops for layer in self.layers]
        return [(forward_s * share, forward_s * BACKWARD_PER_FORWARD * share) for share in shares]

    def casts(self, layer: LayerSpec) -> bool:
        return self.gradients == "bfloat16" or (self.gradients == "autocast" and layer.casts)

    def step_profile(self, slow: float, optimizer_s: float = 0.0) -> StepProfile:
        """The same step as bounds and the simulator see it."""
        specs = [spec for layer in self.layers for spec in layer.owned]
        names = [spec.name for spec in specs]
        index_of = {name: index for index, name in enumerate(names)}
        layers = [
            (*times, [index_of[name] for name in _read_names(layer)])
            for layer, times in zip(self.layers, self.layer_times_s(slow), strict=True)
        ]
        return profile_of_layers(layers, names, [spec.numel * FLOAT32_BYTES for spec in specs], optimizer_s)


def profile_of_layers(
    layers: Sequence[tuple[float, float, Sequence[int]]],
    names: Sequence[str],
    tensor_bytes: Sequence[int],
    optimizer_s: float = 0.0,
) -> StepProfile:
    """The step of layers that run one after the other, and in reverse in the backward.

    Args:
        layers: forward seconds, backward seconds and tensors of each layer, in the order of the forward. A tied tensor
            appears in several layers; its gradient is ready after the backward of the first one.
        names, tensor_bytes: of the tensors.

    Raises:
        ValueError: a tensor is read by no layer.
    """
    forward_s, backward_s = sum(layer[0] for layer in layers), sum(layer[1] for layer in layers)
    uses: dict[int, TensorUse] = {}
    before_s, after_s = 0.0, backward_s
    for layer_forward_s, layer_backward_s, tensors in layers:
        for tensor in tensors:
            uses.setdefault(tensor, TensorUse(names[tensor], tensor_bytes[tensor], before_s, max(0.0, after_s)))
        before_s = min(forward_s, before_s + layer_forward_s)
        after_s -= layer_backward_s
    if len(uses) < len(names):
        unread = min(set(range(len(names))) - set(uses))
        raise ValueError(f"{names[unread]} is read by no layer; drop it or name its reader")
    return StepProfile(tuple(uses[i] for i in range(len(names))), forward_s, backward_s, optimizer_s)


def _read_names(layer: LayerSpec) -> tuple[str, ...]:
    return (*(spec.name for spec in layer.owned), *layer.tied)


def trace(model: nn.Module, run: Callable[[nn.Module], object]) -> tuple[LayerSpec, ...]:
    """The modules of a model that hold parameters, in the order in which `run(model)` executes them.

    FLOPs of functions between two layers (attention) count for the layer that follows. A parameter is owned
    by the first module that runs with it and tied in later ones. `model` may live on the meta device.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    owned_so_far: set[nn.Parameter] = set()
    layers: list[LayerSpec] = []
    counted_flops = 0.0

    def record(name: str, module: nn.Module, output: Tensor) -> None:
        nonlocal counted_flops
        flops = counter.get_total_flops() - counted_flops
        counted_flops += flops
        parameters = list(module.parameters(recurse=False))
        owned = [parameter for parameter in parameters if parameter not in owned_so_far]
        layers.append(
            LayerSpec(
                name,
                tuple(ParameterSpec(name_of[parameter], tuple(parameter.shape)) for parameter in owned),
                tuple(name_of[parameter] for parameter in parameters if parameter in owned_so_far),
                flops + ELEMENTWISE_FLOPS * output.numel(),
                isinstance(module, (nn.Linear, nn.Conv2d)),
            )
        )
        owned_so_far.update(owned)

    handles = [
        module.register_forward_hook(lambda module, _, output, name=name: record(name, module, output))
        for name, module in model.named_modules()
        if not any(module.children()) and any(True for _ in module.parameters(recurse=False))
    ]
    with FlopCounterMode(display=False) as counter:
        run(model)
    for handle in handles:
        handle.remove()
    missing = set(name_of.values()) - {spec.name for layer in layers for spec in layer.owned}
    if missing:
        raise ValueError(f"no leaf module ran with {sorted(missing)}; this model needs a description by hand")
    return tuple(layers)


def _image_model(constructor: str) -> tuple[LayerSpec, ...]:
    import torchvision

    with torch.device("meta"):
        model: nn.Module = getattr(torchvision.models, constructor)()
        image = torch.empty(1, 3, 224, 224)  # Section VI-A
    return trace(model, lambda model: model(image))


def _bert_base() -> tuple[LayerSpec, ...]:
    import transformers

    with torch.device("meta"):
        model = transformers.BertForPreTraining(transformers.BertConfig())
        token_ids = torch.empty(1, 64, dtype=torch.long)  # Section VI-A: sentences of 64 words
        return trace(model, lambda model: model(input_ids=token_ids))


def _llama() -> tuple[LayerSpec, ...]:
    import transformers

    with torch.device("meta"):
        config = transformers.LlamaConfig(
            vocab_size=16384,
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
        model = transformers.LlamaForCausalLM(config)
        token_ids, mask = torch.empty(1, 64, dtype=torch.long), torch.zeros(1, 1, 64, 64)
        return trace(model, lambda model: model(input_ids=token_ids, attention_mask=mask, use_cache=False))


def _tiny() -> tuple[LayerSpec, ...]:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 256), nn.Linear(256, 10))
        return trace(model, lambda model: model(torch.empty(1, 64)))


@dataclass(frozen=True)
class _Source:
    layers: Callable[[], tuple[LayerSpec, ...]]
    compute_s: float
    slow: float  # default factor, chosen so that at 1 Gbit/s and four workers communication is about as long


# Compute seconds: the paper's Eq. 6 inverted on its Table II, 10GbE, P = 64, t_bp = 2 t_ff
# (`recipes.paper.bounds.compute_from_max_speedup`). DenseNet-201's S_max = 64 gives only a lower bound.
_SOURCES = {
    "resnet50": _Source(lambda: _image_model("resnet50"), 0.220, 4),
    "densenet201": _Source(lambda: _image_model("densenet201"), 0.192, 4),
    "bert": _Source(_bert_base, 0.281, 10),
    # As fast as BERT-base per FLOP, on as many tokens.
    "llama": _Source(_llama, 0.087, 10),
    "tiny": _Source(_tiny, 0.010, 1),
}
NAMES = tuple(_SOURCES)
PAPER_MODELS = ("resnet50", "densenet201", "bert")


def load(name: str) -> Workload:
    """The workload called `name`, one of `NAMES`. Imports torchvision or transformers when it needs them."""
    if name not in _SOURCES:
        raise ValueError(f"model must be one of {', '.join(NAMES)}, got {name!r}")
    source = _SOURCES[name]
    return Workload(name, source.layers(), source.compute_s)


def default_slow(name: str) -> float:
    return _SOURCES[name].slow
