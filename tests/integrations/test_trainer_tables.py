"""A Trainer shards and prefetches tables, and trains as a plain one with whole embeddings and the same update does.

Prevents: batches that tables hear of in another order than they are trained with; learning rates that stay where they
began; checkpoints without tables; evaluation that waits for ranks with fewer batches.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_hooks import TableConfig, TopKConfig
from ddp_hooks.integrations import Tables
from tests.support.integrations.launched import (
    as_torchrun_does,
    assert_close,
    assert_same_bits,
    gpt2,
    samples,
    weights_of,
)
from tests.support.integrations.trainer_tables import TABLES, ids_of, model
from tests.support.integrations.trainers import DEAR, QUANTIZED, finish, make, values
from tests.support.workers import WorkerPools

UNANNOUNCED = Tables(None, "transformer.wte", torch.optim.SGD)
HOOKS: dict[str, Any] = {
    "tables": TABLES,
    "without prefetch": UNANNOUNCED,
    "dear": [DEAR, TABLES],
    "top-k of everything": [TopKConfig(density=1.0, lanes=2), TABLES],
}
SETTINGS: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "linear"}


def whole_weights(trainer: Any) -> dict[str, Tensor]:
    """Return all weights, with sharded tables or without."""
    tables = getattr(trainer, "_tables", None)
    whole = weights_of(trainer.model) if tables is None else tables.full_state_dict()
    return {name: value.clone() for name, value in whole.items()}


def train(trainer: Any, **how: Any) -> dict[str, Any]:
    try:
        trainer.train(**how)
        log = trainer.state.log_history
        outcome = {"weights": whole_weights(trainer), "log": log}
        if getattr(trainer, "_comm_hook", None) is not None:
            assert trainer._tables is not None and values(outcome, "ddp_hooks/tables_sent_mb")[-1] > 0
            outcome["stats"] = trainer._tables.stats()
        return outcome
    finally:
        finish(trainer)


def train_both(rank: int, world_size: int, folder: str, hook: Any, settings: dict[str, Any]) -> Any:
    with as_torchrun_does(rank, world_size):
        given = {**SETTINGS, **settings}
        plain = train(make(Path(folder) / "plain", None, model(), **given))
        return plain, train(make(Path(folder) / "ours", hook, model(), **given))


@pytest.mark.quick("{}-dear", "{'gradient_accumulation_steps': 3}-dear", "{'max_grad_norm': 0.5}-tables")
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 3}, {"max_grad_norm": 0.5}], ids=str)
def test_as_with_whole_embeddings(workers: WorkerPools, tmp_path: Path, hook: str, settings: dict[str, Any]) -> None:
    for plain, ours in workers(2).run(train_both, str(tmp_path), HOOKS[hook], settings):
        assert_close(ours["weights"], plain["weights"], 2e-5)
        assert values(ours, "loss") == pytest.approx(values(plain, "loss"), rel=1e-4)
        assert values(ours, "grad_norm") == pytest.approx(values(plain, "grad_norm"), rel=1e-3)
        if hook == "tables":  # some rows could wait, which shows that the next batch was known
            assert ours["stats"].num_delayed_rows > 0


def test_evaluation_with_other_numbers_of_batches(workers: WorkerPools, tmp_path: Path) -> None:
    evaluation = {"eval_dataset": samples(7, seed=1), "eval_strategy": "steps", "eval_steps": 2}
    for plain, ours in workers(2).run(train_both, str(tmp_path), [DEAR, TABLES], evaluation):
        assert values(ours, "eval_loss") == pytest.approx(values(plain, "eval_loss"), rel=1e-4)
        assert len(values(ours, "eval_loss")) == 3


def resume(rank: int, world_size: int, folder: str, hook: Any) -> Any:
    settings = {**SETTINGS, "max_steps": 8, "save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    with as_torchrun_does(rank, world_size):
        whole = train(make(Path(folder) / "ours", hook, model(), **settings))
        trainer = make(Path(folder) / "ours", hook, model(), **settings)
        resumed = train(trainer, resume_from_checkpoint=str(Path(folder) / "ours" / "checkpoint-3"))
        return whole["weights"], resumed["weights"]


@pytest.mark.quick("tables")
@pytest.mark.parametrize("hook", ["tables", "dear", "quantized"])
def test_resumed_bit_for_bit(workers: WorkerPools, tmp_path: Path, hook: str) -> None:
    adam = Tables(ids_of, "transformer.wte", torch.optim.SparseAdam, {"lr": 0.01})
    given = {"tables": adam, "dear": [DEAR, adam], "quantized": [QUANTIZED, adam]}[hook]
    for whole, resumed in workers(2).run(resume, str(tmp_path), given):
        assert_same_bits(resumed, whole)


def save_the_end(rank: int, world_size: int, folder: str) -> None:
    from transformers import GPT2LMHeadModel

    with as_torchrun_does(rank, world_size):
        trainer = make(Path(folder), [DEAR, TABLES], model(), save_strategy="steps", save_steps=6, **SETTINGS)
        trainer.train()
        expected = whole_weights(trainer)
        if trainer.is_world_process_zero():  # as many do: on one rank alone
            trainer.save_model(str(Path(folder) / "end"))
            for name in ("end", "checkpoint-6"):
                assert_same_bits(weights_of(GPT2LMHeadModel.from_pretrained(Path(folder) / name)), expected)
        finish(trainer)


def test_models_are_saved_whole(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(save_the_end, str(tmp_path))


def save_in_the_end(rank: int, world_size: int, folder: str) -> None:
    """A callback that saves on the first rank alone when training ends; noise on embeddings; a scheduler of its own."""
    import transformers

    class Saving(transformers.TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.is_world_process_zero:
                given["model"].save_pretrained(Path(folder) / "end")

    with as_torchrun_does(rank, world_size):
        settings = {**SETTINGS, "neftune_noise_alpha": 5.0, "lr_scheduler_type": "reduce_lr_on_plateau"}
        settings |= {"eval_dataset": samples(4, seed=1), "eval_strategy": "steps", "eval_steps": 1}
        settings |= {"lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0}, "callbacks": [Saving]}
        trainer = make(Path(folder), [DEAR, TABLES], model(), **settings)
        trainer.train()
        expected = whole_weights(trainer)
        rates = {group["lr"] for group in trainer._tables.optimizer.param_groups}
        assert rates != {0.5}, "the plateau was to lower the rate"
        finish(trainer)
        if rank == 0:
            saved = transformers.GPT2LMHeadModel.from_pretrained(Path(folder) / "end")
            assert_same_bits(weights_of(saved), expected)


def test_callbacks_noise_and_plateaus(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(save_in_the_end, str(tmp_path))


def misuse(rank: int, world_size: int, folder: str, case: str) -> str:
    with as_torchrun_does(rank, world_size):
        settings = {**SETTINGS, "save_strategy": "steps", "save_steps": 3}
        how = {}
        if case == "a plain checkpoint":
            train(make(Path(folder), None, model(), **settings))
            how = {"resume_from_checkpoint": str(Path(folder) / "checkpoint-3")}
        network = model()
        if case == "an optimizer of the user":
            settings["optimizers"] = (torch.optim.SGD(network.parameters(), lr=0.1), None)
        tied = Tables(ids_of, "transformer.wte", torch.optim.SGD)
        trainer = make(Path(folder), tied, gpt2() if case == "tied" else network, **settings)
        try:
            trainer.train(**how)
        except ValueError as error:
            return str(error)
        finally:
            finish(trainer)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("a plain checkpoint", "was saved without sharded tables"),
        ("an optimizer of the user", "pass optimizer_cls_and_kwargs=(class, arguments) instead of optimizers"),
        ("tied", "untie"),
    ],
)
def test_refusals(workers: WorkerPools, tmp_path: Path, case: str, expected: str) -> None:
    assert all(expected in message for message in workers(2).run(misuse, str(tmp_path), case))


def train_t5(rank: int, world_size: int, folder: str, hook: Any) -> Any:
    """Encoder and decoder share one table, which both look up in every forward."""
    import transformers

    outcomes = []
    with as_torchrun_does(rank, world_size):
        for config in (None, hook):
            torch.manual_seed(3)
            sizes: dict[str, Any] = {"vocab_size": 96, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1}
            network = transformers.T5ForConditionalGeneration(transformers.T5Config(num_heads=2, **sizes))
            network.config.decoder_start_token_id = 0
            network.lm_head.weight = nn.Parameter(network.lm_head.weight.detach().clone())  # T5 ties it in any case
            trainer = make(Path(folder), config, network, **SETTINGS)
            outcomes.append(train(trainer))
    return outcomes


def ids_of_t5(batch: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    labels = batch["labels"]
    shifted = torch.cat([torch.zeros_like(labels[:, :1]), labels[:, :-1]], 1)
    return {"shared": [batch["input_ids"], shifted]}


def test_t5_with_one_table_for_both_sides(workers: WorkerPools, tmp_path: Path) -> None:
    tables = Tables(ids_of_t5, "shared", torch.optim.SGD, config=TableConfig())
    for plain, ours in workers(2).run(train_t5, str(tmp_path), [DEAR, tables]):
        assert values(ours, "loss") == pytest.approx(values(plain, "loss"), rel=1e-4)
        assert ours["stats"].num_delayed_rows > 0
