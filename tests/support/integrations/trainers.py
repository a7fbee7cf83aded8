"""Trainers of transformers with a hook, and their results."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import nn

from ddp_hooks import DearConfig, QuantizedConfig, TopKConfig
from tests.support.integrations.launched import samples, weights_of

DEAR = DearConfig(lanes=2, slice_mb=0.01, atom_mb=0.01)
TOPK = TopKConfig(density=0.1, lanes=2, dense_below_numel=16)
QUANTIZED = QuantizedConfig(bits=8)
REPLICATED = DearConfig(update="replicated", lanes=2, slice_mb=0.01, atom_mb=0.01)
EXACT = {"dear": DEAR, "replicated": REPLICATED}


def make(folder: Path, hook: Any, model: nn.Module, by: str = "attach", **settings: Any) -> Any:
    """A Trainer with a hook (None: a plain one), given to it as ``by`` says."""
    import transformers

    from ddp_hooks.integrations.transformers import CommHookMixin, attach

    class Mixed(CommHookMixin, transformers.Trainer):
        pass

    own = {"optimizers", "optimizer_cls_and_kwargs", "callbacks", "compute_metrics", "model_init", "eval_dataset"}
    given = {name: settings.pop(name) for name in own & settings.keys()}
    arguments: dict[str, Any] = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "optim": "adamw_torch",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": 5,
    } | deepcopy(settings)  # the Trainer changes some of them
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, **arguments
    )
    data = samples(48)
    if "model_init" not in given:
        given["model"] = model
    if by == "mixin":
        return Mixed(args=args, train_dataset=data, comm_hook=hook, **given)
    trainer = transformers.Trainer(args=args, train_dataset=data, **given)
    if hook is not None:
        attach(trainer, hook)
    return trainer


def finish(trainer: Any) -> None:
    """Let go of a trainer, so that the next one finds the workers as they were."""
    if getattr(trainer, "_attachment", None) is not None:
        trainer._detach()


def hooked(trainer: Any) -> Any:
    """The hooked model that the trainer trains: that there is one shows that the hook is there."""
    (model,) = trainer._attachment.hooked_models
    return model


def train(trainer: Any, **how: Any) -> dict[str, Any]:
    """Train, check that the hook was at work, and return the results."""
    try:
        trainer.train(**how)
        if getattr(trainer, "_comm_hook", None) is not None:
            ddp = hooked(trainer).ddp
            assert ddp.gradient_as_bucket_view
            assert ddp.find_unused_parameters == bool(trainer.args.ddp_find_unused_parameters)
            assert trainer.comm_hook_stats()["ddp_hooks/sent_mb"] > 0
        return {
            "weights": weights_of(trainer.model),
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "log": trainer.state.log_history,
        }
    finally:
        finish(trainer)


def values(outcome: dict[str, Any], key: str) -> list[float]:
    """Return the values that were logged under a name."""
    return [entry[key] for entry in outcome["log"] if key in entry]
