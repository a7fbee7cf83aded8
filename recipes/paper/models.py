"""The five models of the DeAR paper (Table I), as steps of one worker."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

from ddp_hooks.planning import StepProfile
from recipes.benchmarks import workloads
from recipes.benchmarks.workloads import ELEMENTWISE_FLOPS, LayerSpec, ParameterSpec, Workload
from recipes.paper.bounds import compute_from_max_speedup

WORKERS = 64
ETHERNET_BYTES_S = 10e9 / 8  # 10GbE, line rate, as in the paper's Eq. 6
INFINIBAND_BYTES_S = 100e9 / 8

MAX_SPEEDUP = {"resnet50": 61.6, "densenet201": 64.0, "inception_v4": 59.8, "bert": 25.5, "bert_large": 12.1}
"""Table II, 10GbE: the largest speedup on 64 workers by Eq. 6, from which computing times follow."""


@cache
def load(name: str) -> Workload:
    """A model's layers, and the seconds of computing that the paper's Eq. 6 gives for its Table II.

    Where the table says 64, that is the least there can be.
    """
    layers = _LAYERS[name]()
    num_bytes = sum(4 * spec.numel for layer in layers for spec in layer.owned)
    half_s = num_bytes / ETHERNET_BYTES_S  # as Eq. 5 has it, for P = 64
    return Workload(name, layers, compute_from_max_speedup(MAX_SPEEDUP[name], WORKERS, half_s))


def step_of(name: str, factor: float = 1.0) -> StepProfile:
    """The model's step, computing ``factor`` times as long."""
    return load(name).step_profile(factor)


def _inception_v4() -> tuple[LayerSpec, ...]:
    data = json.loads(Path(__file__).with_name("inception_v4.json").read_text())
    layers = []
    for name, inputs, outputs, height, width, size in data["convolutions"]:
        pixels = size * size
        shape = (outputs, inputs, height, width)
        flops = 2.0 * outputs * inputs * height * width * pixels
        layers.append(LayerSpec(f"{name}.conv", (ParameterSpec(f"{name}.conv.weight", shape),), (), flops))
        norm = tuple(ParameterSpec(f"{name}.bn.{part}", (outputs,)) for part in ("weight", "bias"))
        layers.append(LayerSpec(f"{name}.bn", norm, (), float(ELEMENTWISE_FLOPS * outputs * pixels)))
    inputs, outputs = data["linear"]
    linear = (
        ParameterSpec("last_linear.weight", (outputs, inputs)),
        ParameterSpec("last_linear.bias", (outputs,)),
    )
    return (*layers, LayerSpec("last_linear", linear, (), 2.0 * inputs * outputs))


def _bert_large() -> tuple[LayerSpec, ...]:
    import transformers

    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    with torch.device("meta"):
        model = transformers.BertForPreTraining(config)
        token_ids = torch.empty(1, 64, dtype=torch.long)  # Section VI-A: sentences of 64 words
        return workloads.trace(model, lambda model: model(input_ids=token_ids))


_LAYERS = {
    "resnet50": lambda: workloads.load("resnet50").layers,
    "densenet201": lambda: workloads.load("densenet201").layers,
    "inception_v4": _inception_v4,
    "bert": lambda: workloads.load("bert").layers,
    "bert_large": _bert_large,
}
NAMES = tuple(_LAYERS)
