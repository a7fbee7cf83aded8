"""Models by name, with batches of noise: for a plan before there is a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ddp_hooks.planning.measurement.processor import Progress
from ddp_hooks.planning.measurement.profiling import profile_step
from ddp_hooks.planning.step import StepProfile

_ModelAndLoss: TypeAlias = tuple[nn.Module, Callable[[], Tensor]]


def profile_model(
    name: str, batch: int, length: int, device: torch.device, steps: int, progress: Progress
) -> tuple[StepProfile, nn.Module]:
    """Profile a model's step with SGD and momentum on ``batch`` samples, for transformers of ``length`` tokens.

    ``name`` is a torchvision model, or a class of transformers, which gets its default configuration. Raises ValueError
    if there is no such model, or it cannot be trained on noise.
    """
    made = _image_model(name, batch, device) or _language_model(name, batch, length, device)
    if made is None:
        raise ValueError(
            f"there is no model {name!r}: give a torchvision model such as resnet50 or a class of transformers such as "
            f"BertForMaskedLM (both packages must be installed)"
        )
    model, loss = made
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    try:
        return profile_step(model, step, steps, progress=progress), model
    except Exception as error:
        raise ValueError(
            f"{name} cannot be trained on noise ({type(error).__name__}: {error}): give a script that trains it"
        ) from error


def _image_model(name: str, batch: int, device: torch.device) -> _ModelAndLoss | None:
    try:
        import torchvision
    except ImportError:
        return None
    if name not in torchvision.models.list_models(module=torchvision.models):
        return None
    model: nn.Module = torchvision.models.get_model(name).to(device)
    images = torch.randn(batch, 3, 224, 224, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)

    def loss() -> Tensor:
        output = model(images)
        logits: Tensor = output if isinstance(output, Tensor) else output[0]  # with auxiliary outputs
        return nn.functional.cross_entropy(logits, labels)

    return model, loss


def _language_model(name: str, batch: int, length: int, device: torch.device) -> _ModelAndLoss | None:
    try:
        import transformers
    except ImportError:
        return None
    made: Any = getattr(transformers, name, None)
    if not (isinstance(made, type) and issubclass(made, nn.Module) and getattr(made, "config_class", None)):
        return None
    config: Any = getattr(made, "config_class")()  # noqa: B009
    if not hasattr(config, "vocab_size"):
        raise ValueError(f"{name} does not read tokens: give a script that trains it")
    model: nn.Module = made(config).to(device)
    ids = torch.randint(0, config.vocab_size, (batch, length), device=device)

    def loss() -> Tensor:
        result = getattr(model(input_ids=ids, labels=ids), "loss", None)
        if not isinstance(result, Tensor):
            raise ValueError("it returns no loss for labels= alone")
        return result

    return model, loss
