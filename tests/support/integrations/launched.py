"""Workers of a pool as Accelerate finds them after torchrun has started them, and tiny models and data for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

VOCABULARY, LENGTH = 96, 8


@contextmanager
def as_torchrun_does(rank: int, world_size: int) -> Iterator[None]:
    """Its environment variables, and nothing that Accelerate remembers of a former test."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "GROUP_RANK": 0,
        "TORCHELASTIC_RUN_ID": "tests",
        "ACCELERATE_USE_CPU": "true",
    }
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in variables.items()})
    try:
        yield
        found = PartialState._shared_state  # empty where Accelerate was not used
        assert found.get("num_processes", world_size) == dist.get_world_size() == world_size
    finally:
        os.environ.clear()
        os.environ.update(before)
        GradientState._reset_state()
        AcceleratorState._reset_state(True)


def gpt2(**settings: Any) -> nn.Module:
    """2 layers, with dropout and tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": VOCABULARY, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **{**sizes, **settings}))


def bert(**settings: Any) -> nn.Module:
    """2 layers, for masked language modelling."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(3)
    config = BertConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=32,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        **settings,
    )
    return BertForMaskedLM(config)


MODELS = {"gpt2": gpt2, "bert": bert}


def samples(number: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences of ids that are their own labels."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, VOCABULARY, (number, LENGTH), generator=generator)
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies, by name."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Two sets of weights are equal."""
    assert found.keys() == expected.keys()
    differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not differing, differing


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Two sets of weights are equal but for rounding."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        difference = (found[name] - value).abs().max().item()
        assert difference <= tolerance, (name, difference)


def shared_folder(path: str, rank: int) -> Path:
    """A folder that all ranks use, there when this returns."""
    folder = Path(path)
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return folder
