"""Trainers with a hook train as plain ones do, on two real processes.

Prevents: clipping, logs or callbacks that see shards, stale parameters or local gradients; options of the Trainer that
silently do without the hook.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_hooks import DearConfig, TopKConfig
from ddp_hooks.dear.update.spread_tensor import SpreadTensor
from tests.support.integrations.launched import (
    MODELS,
    as_torchrun_does,
    assert_close,
    assert_same_bits,
    gpt2,
    weights_of,
)
from tests.support.integrations.trainers import DEAR, EXACT, TOPK, finish, hooked, make, train, values
from tests.support.kept import kept
from tests.support.workers import WorkerPools


def train_both(
    rank: int, world_size: int, folder: str, model: str, hook: Any, by: str, settings: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A plain Trainer, and one with a hook."""
    with as_torchrun_does(rank, world_size):
        plain = kept(
            lambda: train(make(Path(folder) / "plain", None, MODELS[model](), by, **settings)), model, by, settings
        )
        return plain, train(make(Path(folder) / "ours", hook, MODELS[model](), by, **settings))


# The same training ------------------------------------------------------------------------------------------------


@pytest.mark.quick("gpt2-dear-attach", "bert-replicated-mixin")
@pytest.mark.parametrize("by", ["attach", "mixin"])
@pytest.mark.parametrize("hook", EXACT)
@pytest.mark.parametrize("model", MODELS)
def test_same_bits_as_plain_trainer(workers: WorkerPools, tmp_path: Path, model: str, hook: str, by: str) -> None:
    for plain, ours in workers(2).run(train_both, str(tmp_path), model, EXACT[hook], by, {}):
        assert_same_bits(ours["weights"], plain["weights"])
        assert ours["losses"] == plain["losses"] and len(ours["losses"]) == 6
        assert values(ours, "grad_norm") == pytest.approx(values(plain, "grad_norm"), rel=1e-5)
        entries = [entry for entry in ours["log"] if "loss" in entry]
        assert all(entry["ddp_hooks/sent_mb"] > 0 and entry["ddp_hooks/stall_s"] >= 0 for entry in entries[1:])
        assert len(values(ours, "ddp_hooks/fusion_mb")) == 6


SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "last accumulation is short": {"gradient_accumulation_steps": 5, "num_train_epochs": 2, "max_steps": -1},
    "bf16": {"bf16": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "reentrant checkpointing": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "unused parameters are looked for": {"ddp_find_unused_parameters": True},
    "sgd": {"optim": "sgd"},
    "an optimizer that looks at whole tensors": {"optim": "adafactor"},
    "weight decay and warm-up": {"weight_decay": 0.1, "warmup_steps": 3, "lr_scheduler_type": "cosine"},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


@pytest.mark.quick(
    "gpt2-accumulation",
    "bert-last accumulation is short",
    "bert-gradient checkpointing",
    "gpt2-an optimizer that looks at whole tensors",
)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model", MODELS)
def test_same_bits_whatever_the_arguments(workers: WorkerPools, tmp_path: Path, model: str, settings: str) -> None:
    for plain, ours in workers(2).run(train_both, str(tmp_path), model, DEAR, "attach", SETTINGS[settings]):
        assert_same_bits(ours["weights"], plain["weights"])
        assert ours["losses"] == plain["losses"] != []


def test_the_default_optimizer(workers: WorkerPools, tmp_path: Path) -> None:
    """A fused AdamW, whose rounding depends on where a tensor ends, and shards end elsewhere."""
    settings = {"optim": "adamw_torch_fused"}
    for plain, ours in workers(2).run(train_both, str(tmp_path), "gpt2", DEAR, "attach", settings):
        assert_close(ours["weights"], plain["weights"], 1e-5)


def test_sync_each_batch(workers: WorkerPools, tmp_path: Path) -> None:
    """Without no_sync() every micro-batch is reduced; sums of means, not means of sums: equal but for rounding."""
    settings = {
        "gradient_accumulation_steps": 2,
        "accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}},
    }
    for plain, ours in workers(2).run(train_both, str(tmp_path), "gpt2", DEAR, "attach", settings):
        assert_close(ours["weights"], plain["weights"], 1e-4)


@pytest.mark.parametrize("hook", EXACT)
def test_clipping(workers: WorkerPools, tmp_path: Path, hook: str) -> None:
    settings = {"max_grad_norm": 0.05, "optim": "sgd", "learning_rate": 1.0}
    for plain, ours in workers(2).run(train_both, str(tmp_path), "gpt2", EXACT[hook], "attach", settings):
        assert_close(ours["weights"], plain["weights"], 1e-5)
        assert values(ours, "grad_norm") == pytest.approx(values(plain, "grad_norm"), rel=1e-4)
        assert min(values(plain, "grad_norm")) > 0.05


def log_to_tensorboard(rank: int, world_size: int, folder: str) -> list[str]:
    """Tags that the first rank has written."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with as_torchrun_does(rank, world_size):
        from transformers.integrations import TensorBoardCallback

        trainer = make(Path(folder), DEAR, gpt2(), logging_steps=2, callbacks=[TensorBoardCallback])
        train(trainer)
    found: list[str] = []
    for path in Path(folder).rglob("events.out.tfevents*"):
        events = EventAccumulator(str(path))
        events.Reload()
        found += events.Tags()["scalars"]
    return found


def test_statistics_are_in_tensorboard(workers: WorkerPools, tmp_path: Path) -> None:
    tags = workers(2).run(log_to_tensorboard, str(tmp_path))[0]
    assert {"train/loss", "train/ddp_hooks/stall_s", "train/ddp_hooks/sent_mb"} <= set(tags)


def train_somebody_elses(rank: int, world_size: int, folder: str) -> Any:
    """A Trainer that overrides what those of other libraries do: the loss, the step, logs, and what it saves."""
    import transformers

    from ddp_hooks.integrations.transformers import CommHookMixin, attach

    class Theirs(transformers.Trainer):
        num_steps = 0

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **how: Any) -> Any:
            outputs = model(**inputs)
            loss = outputs.loss + 0.01 * outputs.logits.square().mean()
            return (loss, outputs) if return_outputs else loss

        def training_step(self, *args: Any, **how: Any) -> Tensor:
            self.num_steps += 1
            return super().training_step(*args, **how)

        def log(self, logs: dict[str, float], *args: Any, **how: Any) -> None:
            super().log({**logs, "theirs": 1.0}, *args, **how)

    outcomes = []
    with as_torchrun_does(rank, world_size):
        for hook in (None, DEAR):
            plain = make(Path(folder), None, gpt2())
            trainer: Any = Theirs(model=gpt2(), args=plain.args, train_dataset=plain.train_dataset)
            if hook is not None:
                attach(trainer, hook)
                assert isinstance(trainer, CommHookMixin) and isinstance(trainer, Theirs)
                assert type(trainer).__name__ == "Theirs"
            outcomes.append(train(trainer))
            assert trainer.num_steps == 6
    return outcomes


def test_trainers_of_other_libraries(workers: WorkerPools, tmp_path: Path) -> None:
    for plain, ours in workers(2).run(train_somebody_elses, str(tmp_path)):
        assert_same_bits(ours["weights"], plain["weights"])
        assert values(ours, "theirs") == values(plain, "theirs") and "ddp_hooks/sent_mb" in ours["log"][0]


def look_at_parameters(rank: int, world_size: int, folder: str) -> list[float]:
    """By how much parameters, read where no forward is, differ from what they become: in callbacks, and at the end."""
    import transformers

    from ddp_hooks.integrations.transformers import attach

    differences: list[float] = []

    def compare(model: nn.Module) -> None:
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        waited = model.state_dict()  # which waits
        differences.append(max((waited[name] - value).abs().max().item() for name, value in before.items()))

    class Average(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            compare(given["model"])

    with as_torchrun_does(rank, world_size):
        for callbacks in ([Average], []):
            trainer = make(Path(folder), None, gpt2(n_embd=512), callbacks=callbacks, max_steps=3, optim="sgd")
            attach(trainer, DearConfig())
            trainer.train()
            compare(trainer.model)
            finish(trainer)
    return differences


def test_parameters_are_complete_wherever_they_are_read(workers: WorkerPools, tmp_path: Path) -> None:
    assert workers(2).run(look_at_parameters, str(tmp_path)) == [[0.0] * 5] * 2


def test_sparse_all_reduce(workers: WorkerPools, tmp_path: Path) -> None:
    """Replicas stay equal, and what is left out comes later: the loss falls as it does without."""
    settings = {"max_steps": 30, "max_grad_norm": 1.0}
    outcomes = workers(2).run(train_both, str(tmp_path), "gpt2", TOPK, "attach", settings)
    assert_same_bits(outcomes[0][1]["weights"], outcomes[1][1]["weights"])
    for plain, ours in outcomes:
        assert values(ours, "ddp_hooks/density") == [0.1] * 30
        assert plain["losses"][-1] < 4.0 and ours["losses"][-1] < 4.2
        assert ours["losses"] != plain["losses"]


@pytest.mark.slow
def test_sparse_gradients_that_arrive_in_the_next_forward(workers: WorkerPools, tmp_path: Path) -> None:
    settings = {"max_steps": 30, "max_grad_norm": 1.0}
    late = TopKConfig(density=0.1, lanes=2, dense_below_numel=16, pipeline="forward")
    outcomes = workers(2).run(train_both, str(tmp_path), "gpt2", late, "attach", settings)
    assert_same_bits(outcomes[0][1]["weights"], outcomes[1][1]["weights"])
    assert all(ours["losses"][-1] < 4.2 for _, ours in outcomes)


# Optimizers -------------------------------------------------------------------------------------------------------


def train_with_optimizers(rank: int, world_size: int, folder: str, passed: str) -> Any:
    outcomes = []
    with as_torchrun_does(rank, world_size):
        for hook in (None, DEAR):
            model = gpt2()
            if passed == "optimizers":
                optimizer = torch.optim.RMSprop(model.parameters(), lr=0.001)
                scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
                settings: dict[str, Any] = {"optimizers": (optimizer, scheduler)}
            else:
                settings = {"optimizer_cls_and_kwargs": (torch.optim.RMSprop, {"lr": 0.001})}
            trainer = make(Path(folder), hook, model, **settings)
            outcomes.append(train(trainer))
    return outcomes


@pytest.mark.parametrize("passed", ["optimizers", "optimizer_cls_and_kwargs"])
def test_optimizers_of_the_user(workers: WorkerPools, tmp_path: Path, passed: str) -> None:
    for plain, ours in workers(2).run(train_with_optimizers, str(tmp_path), passed):
        assert_same_bits(ours["weights"], plain["weights"])


def optimizer_is_sharded(rank: int, world_size: int, folder: str, optim: str) -> tuple[bool, int]:
    """Return True if the optimizer holds shards, and the number of elements of its state."""
    with as_torchrun_does(rank, world_size):
        trainer = make(Path(folder), DEAR, gpt2(), optim=optim, max_steps=2)
        trainer.train()
        found = hooked(trainer).dear.has_sharded_optimizer
        states = list(hooked(trainer).optimizer.state.values())
        finish(trainer)
    values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    parts = [part for v in values for part in (v.local_shards() if isinstance(v, SpreadTensor) else [v])]
    return found, sum(part.numel() for part in parts)


def test_elementwise_optimizers_are_sharded_and_others_are_not(workers: WorkerPools, tmp_path: Path) -> None:
    num_elements = sum(parameter.numel() for parameter in gpt2().parameters())
    for is_sharded, held in workers(2).run(optimizer_is_sharded, str(tmp_path), "adamw_torch"):
        assert is_sharded and held < 1.2 * num_elements  # two moments of half of all parameters
    for is_sharded, _ in workers(2).run(optimizer_is_sharded, str(tmp_path), "adafactor"):
        assert not is_sharded


# Half precision ---------------------------------------------------------------------------------------------------


def train_in_fp16(rank: int, world_size: int, folder: str) -> Any:
    """float16 with loss scaling, which Accelerate does not offer on CPUs, though torch does."""
    outcomes = []
    with as_torchrun_does(rank, world_size):
        for hook in (None, DEAR):
            trainer = make(Path(folder), None, gpt2(), max_grad_norm=1.0, optim="sgd", learning_rate=0.1)
            accelerator = trainer.accelerator
            accelerator.state._mixed_precision = "fp16"
            accelerator.native_amp = True
            accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
            if hook is not None:
                from ddp_hooks.integrations.transformers import attach

                handler = type("Handler", (), {"to_kwargs": lambda _: {"init_scale": 2.0**24, "growth_interval": 2}})
                accelerator.scaler_handler = handler()
                attach(trainer, hook)
            trainer.train()
            outcomes.append((weights_of(trainer.model), trainer.accelerator.scaler.get_scale(), trainer.lr_scheduler))
            if hook is not None:
                assert type(trainer.accelerator.scaler).__module__.startswith("ddp_hooks")
            finish(trainer)
    return [(weights, scale, scheduler.state_dict()["last_epoch"]) for weights, scale, scheduler in outcomes]


def test_fp16_skips_the_same_steps(workers: WorkerPools, tmp_path: Path) -> None:
    for plain, ours in workers(2).run(train_in_fp16, str(tmp_path)):
        assert_close(ours[0], plain[0], 1e-5)
        assert ours[1:] == plain[1:] and plain[2] < 6, "some step was to overflow"


# What is refused, and what there is nothing to do for --------------------------------------------------------------


def train_alone(rank: int, world_size: int, folder: str) -> tuple[int, dict[str, float]]:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[assignment]
    logging.getLogger("ddp_hooks").addHandler(handler)
    with as_torchrun_does(rank, world_size):
        trainer = make(Path(folder), DEAR, gpt2())
        trainer.train()
        trainer.train()
    logging.getLogger("ddp_hooks").removeHandler(handler)
    return sum("nothing to communicate" in record.getMessage() for record in records), trainer.comm_hook_stats()


def test_one_process_says_once_that_there_is_nothing_to_do(workers: WorkerPools, tmp_path: Path) -> None:
    assert workers(1).run(train_alone, str(tmp_path)) == [(1, {})]


class Forgetful(nn.Module):
    """A model with a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.unused = nn.Embedding(96, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.used(input_ids).square().mean()}


def train_forgetful(rank: int, world_size: int, folder: str, settings: dict[str, Any]) -> Any:
    with as_torchrun_does(rank, world_size):
        trainer = make(Path(folder), DEAR, Forgetful(), **settings)
        try:
            trainer.train()
        except RuntimeError as error:
            return str(error)
        finally:
            finish(trainer)
    return None


def test_unused_parameters(workers: WorkerPools, tmp_path: Path) -> None:
    for message in workers(2).run(train_forgetful, str(tmp_path), {}):
        assert "unused" in message and "TrainingArguments(ddp_find_unused_parameters=True)" in message
    assert workers(2).run(train_forgetful, str(tmp_path), {"ddp_find_unused_parameters": True}) == [None, None]


def refused(rank: int, world_size: int, folder: str, case: str) -> str:
    from ddp_hooks.integrations.transformers import attach

    with as_torchrun_does(rank, world_size):
        trainer = make(Path(folder), DEAR if case == "twice" else None, gpt2(), max_steps=1)
        config: Any = DEAR
        if case == "too late":
            trainer.train()
        if case == "two hooks":
            config = [DEAR, TOPK]
        if case == "no configuration":
            config = {"density": 0.1}
        try:
            attach(trainer, config)
        except (TypeError, ValueError) as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("twice", "has a communication hook already"),
        ("too late", "has prepared a model already: call attach()"),
        ("two hooks", 'write TopKConfig(pipeline="forward")'),
        ("no configuration", "a configuration is a DearConfig, TopKConfig"),
    ],
)
def test_refusals(workers: WorkerPools, tmp_path: Path, case: str, expected: str) -> None:
    assert all(expected in message for message in workers(2).run(refused, str(tmp_path), case))
