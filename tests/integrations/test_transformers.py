"""Trainers with a hook train as plain ones do, on two real processes.

Prevents: clipping, logs, checkpoints or evaluation that see shards, stale parameters or local gradients; ranks that
save what they do not have; options of the Trainer that silently do without the hook.
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
    samples,
    weights_of,
)
from tests.support.integrations.trainers import DEAR, QUANTIZED, TOPK, finish, make, values
from tests.support.kept import kept
from tests.support.workers import WorkerPools

REPLICATED = DearConfig(update="replicated", lanes=2, slice_mb=0.01, atom_mb=0.01)
EXACT = {"dear": DEAR, "replicated": REPLICATED}


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


# Evaluation -------------------------------------------------------------------------------------------------------


def evaluate_between(rank: int, world_size: int, folder: str) -> Any:
    import transformers

    outcomes = []
    with as_torchrun_does(rank, world_size):
        for name, hook in (("plain", None), ("ours", DEAR)):
            settings: dict[str, Any] = {
                "max_steps": 8,
                "eval_strategy": "steps",
                "eval_steps": 2,
                "save_strategy": "steps",
                "save_steps": 2,
                "load_best_model_at_end": True,
                "metric_for_best_model": "eval_loss",
                "learning_rate": 0.3,  # so much that it gets worse
                "eval_dataset": samples(7, seed=1),  # not as many for each
                "callbacks": [transformers.EarlyStoppingCallback(2)],
            }
            trainer = make(Path(folder) / name, hook, gpt2(), **settings)
            trainer.evaluate()
            trainer.train()
            predicted = trainer.predict(samples(5, seed=2))
            outcomes.append(
                {
                    "weights": weights_of(trainer.model),
                    "losses": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
                    "steps": (trainer.state.best_global_step, trainer.state.global_step),
                    "predictions": predicted.predictions.tolist(),
                    "last": trainer.evaluate()["eval_loss"],
                }
            )
            finish(trainer)
    return outcomes


def test_evaluation_early_stopping_and_the_best_model(workers: WorkerPools, tmp_path: Path) -> None:
    for plain, ours in workers(2).run(evaluate_between, str(tmp_path)):
        assert_same_bits(ours.pop("weights"), plain.pop("weights"))
        assert ours == plain
        best, last = plain["steps"]
        assert best < last < 8, "it was to stop early, and go back to the best"


# Checkpoints ------------------------------------------------------------------------------------------------------


RESUMED: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}


def resume(rank: int, world_size: int, folder: str, saved_by: Any, resumed_by: Any, settings: dict[str, Any]) -> Any:
    """What a Trainer returns that goes on after half of another one's run."""
    settings = {**RESUMED, **settings}
    with as_torchrun_does(rank, world_size):
        train(make(Path(folder) / "first", saved_by, gpt2(), **settings))
        second = make(Path(folder) / "first", resumed_by, gpt2(), **settings)
        return train(second, resume_from_checkpoint=str(Path(folder) / "first" / "checkpoint-4"))


def break_off(rank: int, world_size: int, folder: str, saved_by: Any, resumed_by: Any) -> Any:
    """A run without a break, and one that was resumed by another Trainer after half of it."""
    with as_torchrun_does(rank, world_size):
        whole = train(make(Path(folder) / "whole", resumed_by, gpt2(), **RESUMED))
    return whole, resume(rank, world_size, folder, saved_by, resumed_by, {})


EITHER = {"plain": None, **EXACT}


@pytest.mark.quick("replicated-dear")
@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [("dear", "dear"), ("dear", "plain"), ("plain", "dear"), ("replicated", "dear"), ("dear", "replicated")],
)
def test_checkpoints_fit_everywhere(workers: WorkerPools, tmp_path: Path, saved_by: str, resumed_by: str) -> None:
    for whole, resumed in workers(2).run(break_off, str(tmp_path), EITHER[saved_by], EITHER[resumed_by]):
        assert_same_bits(resumed["weights"], whole["weights"])
        assert resumed["losses"][-4:] == whole["losses"][-4:]


@pytest.mark.parametrize("hook", [TOPK, QUANTIZED], ids=["topk", "quantized"])
def test_error_feedback_resumes_with_its_residuals(workers: WorkerPools, tmp_path: Path, hook: Any) -> None:
    for whole, resumed in workers(2).run(break_off, str(tmp_path), hook, hook):
        assert_same_bits(resumed["weights"], whole["weights"])
    folder = tmp_path / "first" / "checkpoint-4"
    assert sorted(path.name for path in folder.glob("ddp_hooks*")) == ["ddp_hooks_rank0.bin", "ddp_hooks_rank1.bin"]


@pytest.mark.quick("to plain")
@pytest.mark.parametrize(("saved_by", "resumed_by"), [
    (None, TOPK), (TOPK, None), (TOPK, QUANTIZED),
], ids=["from plain", "to plain", "to another hook"])  # fmt: skip
def test_error_feedback_from_and_to_other_checkpoints(
    workers: WorkerPools, tmp_path: Path, saved_by: Any, resumed_by: Any
) -> None:
    """Weights and optimizer are the same files; what was left out begins with zero, or is left behind."""
    first, second = workers(2).run(resume, str(tmp_path), saved_by, resumed_by, {})
    assert_same_bits(first["weights"], second["weights"])
    assert len(first["losses"]) == len(second["losses"]) == 8


def resume_and_listen(rank: int, world_size: int, folder: str) -> list[str]:
    """Return the log of a run that resumes a checkpoint of sparse all-reduce without it."""
    heard: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddp_hooks").addHandler(listener)
    try:
        resume(rank, world_size, folder, TOPK, DEAR, {})
    finally:
        logging.getLogger("ddp_hooks").removeHandler(listener)
    return heard


def test_what_was_left_out_is_not_dropped_in_silence(workers: WorkerPools, tmp_path: Path) -> None:
    first, second = workers(2).run(resume_and_listen, str(tmp_path))
    assert [line for line in first if line.endswith("than this run has: they are dropped")]
    assert not [line for line in second if "dropped" in line], "one rank says it"


@pytest.mark.slow
def test_old_checkpoints_go_with_all_their_files(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(resume, str(tmp_path), TOPK, TOPK, {"save_steps": 2, "save_total_limit": 3})
    kept = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert kept == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]


def save_only_the_model(rank: int, world_size: int, folder: str) -> None:
    with as_torchrun_does(rank, world_size):
        settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "save_only_model": True}
        trainer = make(Path(folder), DEAR, gpt2(), **settings)
        expected = train(trainer)["weights"]
        trainer.save_model(str(Path(folder) / "end"))
    if rank == 0:
        from transformers import GPT2LMHeadModel

        for name in ("checkpoint-6", "end"):
            assert_same_bits(weights_of(GPT2LMHeadModel.from_pretrained(Path(folder) / name)), expected)
        assert not (Path(folder) / "checkpoint-6" / "optimizer.pt").exists()


def test_save_only_model(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(save_only_the_model, str(tmp_path))


def train_twice(rank: int, world_size: int, folder: str) -> Any:
    outcomes = []
    with as_torchrun_does(rank, world_size):
        for hook in (None, DEAR):
            trainer = make(Path(folder), hook, gpt2())
            trainer.train()
            trainer.train()
            outcomes.append(weights_of(trainer.model))
            finish(trainer)
    return outcomes


def test_a_second_train(workers: WorkerPools, tmp_path: Path) -> None:
    for plain, ours in workers(2).run(train_twice, str(tmp_path)):
        assert_same_bits(ours, plain)


# Batch sizes and searches -----------------------------------------------------------------------------------------


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


def train_two_models(rank: int, world_size: int, folder: str) -> Any:
    """model_init makes another model for the second train()."""
    outcomes = []
    for hook in (None, TopKConfig(density=1.0, lanes=2)):
        with as_torchrun_does(rank, world_size):
            trainer = make(Path(folder), hook, gpt2(), model_init=lambda _: gpt2(), max_steps=3)
            trainer.train()
            first = trainer.model
            trainer.train()
            assert trainer.model is not first
            if hook is not None:
                assert hooked(trainer).ddp.module is trainer.model
            outcomes.append(weights_of(trainer.model))
            finish(trainer)
    return outcomes


def test_another_model_in_the_same_trainer(workers: WorkerPools, tmp_path: Path) -> None:
    for plain, ours in workers(2).run(train_two_models, str(tmp_path)):
        assert_close(ours, plain, 1e-3)


def train_twice_with_batch_sizes(rank: int, world_size: int, folder: str, passes_optimizer: bool) -> Any:
    outcomes = []
    for hook in (None, DEAR):
        with as_torchrun_does(rank, world_size):
            model = gpt2()
            settings: dict[str, Any] = {"auto_find_batch_size": True, "max_steps": 3}
            if passes_optimizer:
                settings["optimizers"] = torch.optim.AdamW(model.parameters(), lr=0.001), None
            trainer = make(Path(folder), hook, model, **settings)
            trainer.train()
            trainer.train()
            outcomes.append(weights_of(trainer.model))
            finish(trainer)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("passes_optimizer", [False, True])
def test_a_second_train_keeps_the_optimizer_when_batch_sizes_are_tried(
    workers: WorkerPools, tmp_path: Path, passes_optimizer: bool
) -> None:
    for plain, ours in workers(2).run(train_twice_with_batch_sizes, str(tmp_path), passes_optimizer):
        assert_same_bits(ours, plain)


def write_over_a_checkpoint(rank: int, world_size: int, folder: str) -> list[str | None]:
    """Return the last complete checkpoints of a run, and of a second one in its folder that fails while it writes."""
    from ddp_hooks.integrations.transformers import last_complete_checkpoint

    found = []
    with as_torchrun_does(rank, world_size):
        for fails in (False, True):
            trainer = make(Path(folder), TOPK, gpt2(), save_strategy="steps", save_steps=3)
            if fails:
                trainer._save_scaler = _fail
            try:
                trainer.train()
            except OSError:
                pass
            finally:
                finish(trainer)
            found.append(last_complete_checkpoint(folder))
    return found


def _fail(*_: Any) -> None:
    raise OSError("no space left")


def test_a_checkpoint_that_is_written_over_is_none(workers: WorkerPools, tmp_path: Path) -> None:
    for first, second in workers(2).run(write_over_a_checkpoint, str(tmp_path)):
        assert first == str(tmp_path / "checkpoint-6") and second == first
        # the second run has ended at step 3
    assert not (tmp_path / "checkpoint-3" / "trainer_state.json").exists()


def find_batch_size(rank: int, world_size: int, folder: str, when: int) -> Any:
    """Weights after a batch of 4 did not fit into memory, in the ``when``-th forward."""
    from transformers import Trainer

    outcomes = []
    for hook in (None, DEAR):
        with as_torchrun_does(rank, world_size):
            model = gpt2()
            num_forwards = 0

            def fail(module: nn.Module, args: Any, kwargs: Any) -> None:
                nonlocal num_forwards
                num_forwards += 1
                if len(kwargs["input_ids"]) > 2 and num_forwards >= when:
                    raise RuntimeError("CUDA out of memory.")

            model.register_forward_pre_hook(fail, with_kwargs=True)
            settings: dict[str, Any] = {"per_device_train_batch_size": 4, "auto_find_batch_size": True}
            trainer = make(Path(folder), hook, model, **settings)
            assert isinstance(trainer, Trainer)
            outcomes.append((train(trainer)["weights"], trainer._train_batch_size))
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("when", [1, 3])
def test_auto_find_batch_size(workers: WorkerPools, tmp_path: Path, when: int) -> None:
    for plain, ours in workers(2).run(find_batch_size, str(tmp_path), when):
        assert ours[1] == plain[1] < 4
        if when == 1:  # later on the plain one keeps its optimizer's state, of steps that do not count
            assert_same_bits(ours[0], plain[0])


def learning_rates(trial: Any) -> dict[str, float]:
    return {"learning_rate": (0.001, 0.01)[trial.number]}


def search(rank: int, world_size: int, folder: str) -> Any:
    outcomes = []
    for name, hook in (("plain", None), ("ours", DEAR)):
        with as_torchrun_does(rank, world_size):
            settings: dict[str, Any] = {"model_init": lambda _: gpt2(), "max_steps": 3}
            settings["eval_dataset"] = samples(6, seed=1)
            trainer = make(Path(folder) / name, hook, gpt2(), **settings)
            best = trainer.hyperparameter_search(hp_space=learning_rates, n_trials=2, backend="optuna")
            if hook is not None:
                assert trainer.comm_hook_stats()["ddp_hooks/sent_mb"] > 0
            finish(trainer)
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            outcomes.append((None if best is None else best.objective, losses))
    return outcomes


@pytest.mark.slow
def test_hyperparameter_search(workers: WorkerPools, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    for plain, ours in workers(2).run(search, str(tmp_path)):
        assert ours == plain and len(plain[1]) == 3


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
