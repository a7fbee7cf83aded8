"""Several runs of one Trainer with a hook: a second train(), batch sizes that are tried, a search.

Prevents: hooks of a former model, and optimizers that begin anew, or go on, where plain ones do not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_hooks import TopKConfig
from tests.support.integrations.launched import (
    as_torchrun_does,
    assert_close,
    assert_same_bits,
    gpt2,
    samples,
    weights_of,
)
from tests.support.integrations.trainers import DEAR, finish, hooked, make, train
from tests.support.workers import WorkerPools


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
