"""Trainer and Accelerate with FSDP2, extended by the same configuration object that hooks have.

Accelerate shards models on accelerators only; what it does there runs on CPUs, too, when it is told to.

Prevents: models that are prepared and not extended; checkpoints without what gradients have lost; DDP's hooks on FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_hooks import DearConfig, TableConfig
from fsdp_ext import ExtConfig
from tests.support.integrations.launched import as_torchrun_does, gpt2, samples
from tests.support.workers import WorkerPools

RINGS = ExtConfig(lanes=2, slice_mb=0.01, timeout_s=30)
SPARSE = ExtConfig(lanes=2, slice_mb=0.01, timeout_s=30, reduce_scatter="sparse", density=0.1)


@contextmanager
def sharding(rank: int, world_size: int, version: int = 2) -> Iterator[Any]:
    """A plugin of FSDP's, which Accelerate heeds on CPUs, too."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    original = AcceleratorState.__init__

    def initialise(state: Any, *args: Any, **kwargs: Any) -> None:
        original(state, *args, **kwargs)
        state._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}

    with as_torchrun_does(rank, world_size), pytest.MonkeyPatch.context() as patch:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
        )
        patch.setattr(AcceleratorState, "__init__", initialise)
        yield plugin


def whole(model: Any) -> dict[str, Tensor]:
    """All weights, on every rank."""
    return {name: value.full_tensor().detach().clone() for name, value in model.named_parameters()}


# -- Accelerate -------------------------------------------------------------------------------------------------------


def loop(config: Any, folder: str = "", num_steps: int = 6, resume: str | None = None) -> dict[str, Any]:
    from accelerate import Accelerator

    from ddp_hooks.integrations.accelerate import attach

    accelerator = Accelerator(cpu=True)
    attachment = attach(accelerator, config) if config is not None else None
    model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader: Any = torch.utils.data.DataLoader(samples(48), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume is not None:
        accelerator.load_state(resume)
    for number, batch in enumerate(loader):
        if number < (3 if resume is not None else 0):
            continue
        if number >= num_steps:
            break
        if folder and number == 3:
            accelerator.save_state(folder)
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    found = {"weights": whole(model), "stats": attachment.stats() if attachment is not None else {}}
    if attachment is not None:
        attachment.close()
    return found


def compare_loops(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    found = []
    for config in (None, RINGS):
        with sharding(rank, world_size):
            found.append(loop(config))
    return found[0], found[1]


def test_accelerate_with_rings(workers: WorkerPools) -> None:
    for plain, ours in workers(2).run(compare_loops):
        assert ours["stats"]["ddp_hooks/sent_mb"] > 0, "the model was not extended"
        assert ours["weights"].keys() == plain["weights"].keys()
        for name, value in plain["weights"].items():
            torch.testing.assert_close(ours["weights"][name], value, rtol=0, atol=1e-6)


def save_and_resume(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    with sharding(rank, world_size):
        straight = loop(SPARSE, folder)
    with sharding(rank, world_size):
        return straight, loop(SPARSE, resume=folder)


def test_accelerate_resumes_with_what_was_left_out(workers: WorkerPools, tmp_path: Path) -> None:
    for straight, resumed in workers(2).run(save_and_resume, str(tmp_path)):
        assert (tmp_path / "fsdp_ext" / ".metadata").exists()
        for name, value in straight["weights"].items():
            assert torch.equal(resumed["weights"][name], value), name


# -- Trainer ----------------------------------------------------------------------------------------------------------


def trainer_of(folder: Path, config: Any, by: str, **settings: Any) -> Any:
    import transformers

    from ddp_hooks.integrations.transformers import CommHookMixin, attach

    class Mixed(CommHookMixin, transformers.Trainer):
        pass

    arguments = {"max_steps": 6, "learning_rate": 0.01, "logging_steps": 1, "save_strategy": "no", **settings}
    args = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=2,
        **arguments,
    )
    data: Any = samples(48)
    if by == "mixin":
        return Mixed(gpt2(), args, train_dataset=data, comm_hook=config)
    trainer = transformers.Trainer(gpt2(), args, train_dataset=data)
    if config is not None:
        attach(trainer, config)
    return trainer


def train(trainer: Any, **how: Any) -> dict[str, Any]:
    try:
        trainer.train(**how)
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        return {"weights": whole(trainer.model), "losses": [entry["loss"] for entry in log], "log": log}
    finally:
        if getattr(trainer, "_attachment", None) is not None:
            trainer._detach()


def compare_trainers(rank: int, world_size: int, folder: str, by: str) -> tuple[dict[str, Any], dict[str, Any]]:
    found = []
    for config in (None, RINGS):
        with sharding(rank, world_size):
            found.append(train(trainer_of(Path(folder), config, by)))
    return found[0], found[1]


@pytest.mark.parametrize("by", ["mixin", "attach"])
def test_trainer_with_rings(workers: WorkerPools, tmp_path: Path, by: str) -> None:
    for plain, ours in workers(2).run(compare_trainers, str(tmp_path), by):
        assert len(ours["losses"]) == 6
        assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-5)
        assert all(entry["ddp_hooks/sent_mb"] > 0 for entry in ours["log"]), "the model was not extended"


def resume_trainer(rank: int, world_size: int, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    settings = {"save_strategy": "steps", "save_steps": 3}
    with sharding(rank, world_size):
        straight = train(trainer_of(Path(folder), SPARSE, "mixin", **settings))
    with sharding(rank, world_size):
        again = trainer_of(Path(folder), SPARSE, "mixin", **settings)
        return straight, train(again, resume_from_checkpoint=f"{folder}/checkpoint-3")


def test_trainer_resumes_with_what_was_left_out(workers: WorkerPools, tmp_path: Path) -> None:
    for straight, resumed in workers(2).run(resume_trainer, str(tmp_path)):
        assert (tmp_path / "checkpoint-3" / "fsdp_ext" / ".metadata").exists()
        assert resumed["losses"] == straight["losses"]
        for name, value in straight["weights"].items():
            assert torch.equal(resumed["weights"][name], value), name


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused(rank: int, world_size: int, case: str) -> str:
    from accelerate import Accelerator

    from ddp_hooks.integrations.accelerate import attach

    try:
        if case == "not sharded":
            with as_torchrun_does(rank, world_size):
                attach(Accelerator(cpu=True), RINGS)
        else:
            with sharding(rank, world_size, version=1 if case == "version 1" else 2):
                attach(Accelerator(cpu=True), DearConfig() if case == "hook" else RINGS)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("not sharded", "ExtConfig extends FSDP2, and this accelerator does not shard models: pass Trainer"),
        ("version 1", 'this accelerator trains with FSDP1: set "fsdp_version": 2 in Trainer\'s fsdp_config'),
        ("hook", "this accelerator trains with FSDP: launch without it, or give an ExtConfig, which extends FSDP2"),
    ],
)
def test_refusals(workers: WorkerPools, case: str, expected: str) -> None:
    messages = workers(2).run(refused, case)
    assert expected in messages[0] and messages[0] == messages[1]
    assert "docs/troubleshooting.md#" in messages[0]


def test_goes_alone() -> None:
    from ddp_hooks.integrations.settings import combination_of

    with pytest.raises(ValueError, match="ExtConfig is for models that FSDP2 shards, and goes alone"):
        combination_of([RINGS, TableConfig()])
    assert combination_of([RINGS]).extension is RINGS
