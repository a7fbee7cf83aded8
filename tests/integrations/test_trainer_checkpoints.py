"""Evaluation and checkpoints of a Trainer with a hook are those of a plain one, on two real processes.

Prevents: evaluation that sees shards or stale parameters; ranks that save what they do not have, or go on without it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.integrations.launched import as_torchrun_does, assert_same_bits, gpt2, samples, weights_of
from tests.support.integrations.trainers import DEAR, EXACT, QUANTIZED, TOPK, finish, make, train
from tests.support.workers import WorkerPools


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
