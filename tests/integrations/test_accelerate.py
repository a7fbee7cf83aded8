"""Accelerate's own loops with a hook train as they do without, on two real processes.

Prevents: hooks that are not there because ``prepare`` was called in another order; norms of shards; states that only
one rank can load; a scaler that lets ranks part.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from ddp_hooks import DearConfig, EmbeddingTables, TopKConfig, shard_embeddings
from ddp_hooks.integrations import Tables
from tests.support.integrations.accelerate_loops import DEAR, QUANTIZED, TOPK, Loop
from tests.support.integrations.launched import (
    as_torchrun_does,
    assert_close,
    assert_same_bits,
    gpt2,
    weights_of,
)
from tests.support.messages import message_of
from tests.support.workers import WorkerPools


def compare(
    rank: int, world_size: int, hook: Any, order: str, settings: dict[str, Any], how: dict[str, Any]
) -> list[tuple[dict[str, Tensor], list[float]]]:
    outcomes = []
    for config in (None, hook):
        with as_torchrun_does(rank, world_size):
            torch.manual_seed(0)
            loop = Loop(config, order=order, **settings)
            norms = loop.train(**how)
            outcomes.append((loop.weights(), norms))
            loop.end()
    return outcomes


@pytest.mark.quick("together", "optimizer first")
@pytest.mark.parametrize("order", ["together", "optimizer first", "one by one"])
def test_same_bits_in_any_order(workers: WorkerPools, order: str) -> None:
    for plain, ours in workers(2).run(compare, DEAR, order, {}, {}):
        assert_same_bits(ours[0], plain[0])


@pytest.mark.parametrize(
    "settings", [{"gradient_accumulation_steps": 3}, {"mixed_precision": "bf16"}], ids=["accumulate", "bf16"]
)
def test_same_bits_whatever_the_settings(workers: WorkerPools, settings: dict[str, Any]) -> None:
    for plain, ours in workers(2).run(compare, DEAR, "together", settings, {}):
        assert_same_bits(ours[0], plain[0])


@pytest.mark.quick("dear")
@pytest.mark.parametrize("hook", [DEAR, TopKConfig(density=1.0, lanes=2)], ids=["dear", "top-k of everything"])
def test_clipping(workers: WorkerPools, hook: Any) -> None:
    for plain, ours in workers(2).run(compare, hook, "together", {"gradient_accumulation_steps": 2}, {"clip": 0.5}):
        assert ours[1] == pytest.approx(plain[1], rel=1e-4) and len(plain[1]) == 6
        assert_close(ours[0], plain[0], 1e-4)
    for plain, ours in workers(2).run(compare, hook, "together", {}, {"clamp": 0.001}):
        assert_close(ours[0], plain[0], 1e-4)


def copied(rank: int, world_size: int) -> list[tuple[bool, str]]:
    """Return True if a pickled accelerator is plain, and the message of pickling after a step."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from ddp_hooks.integrations.accelerate import attach

    found = []
    for hook in (DEAR, TOPK):
        with as_torchrun_does(rank, world_size):
            accelerator = Accelerator(cpu=True)
            attachment = attach(accelerator, hook)
            twin, method = pickle.loads(pickle.dumps(accelerator)), accelerator.prepare_model
            plain = twin.prepare_model.__func__ is Accelerator.prepare_model and twin.prepare_model.__self__ is twin
            plain &= type(twin.ddp_handler) is DistributedDataParallelKwargs and method.__name__ == "prepare_model"
            model = nn.Linear(2, 2)
            ddp, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            ddp(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            found.append((plain, message_of(lambda accelerator=accelerator: pickle.dumps(accelerator))))  # type: ignore[misc]
            attachment.close()
    return found


def test_accelerators_are_pickled_as_plain_ones(workers: WorkerPools) -> None:
    for (is_plain, refused), (is_plain_too, not_refused) in workers(2).run(copied):
        assert is_plain and is_plain_too
        assert "full_optimizer_state_dict()" in refused and not_refused == "nothing was raised"


def save_and_load(rank: int, world_size: int, folder: str, saved_by: Any, loaded_by: Any, everywhere: bool) -> Any:
    with as_torchrun_does(rank, world_size):
        torch.manual_seed(0)
        first = Loop(saved_by, folder)
        first.accelerator.project_configuration.save_on_each_node = everywhere
        first.train(4)
        first.accelerator.save_state()
        first.train(4)
        expected = first.weights()
        first.end()
    with as_torchrun_does(rank, world_size):
        second = Loop(loaded_by, folder)
        second.train(1)  # another state than in the beginning
        second.accelerator.load_state()
        second.train(4)
        found = second.weights()
        second.end()
    return expected, found


HOOKS = {"plain": None, "dear": DEAR, "replicated": DearConfig(update="replicated", lanes=2, slice_mb=0.01)}


@pytest.mark.quick("dear-dear-False", "plain-dear-False")
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "everywhere"),
    [
        ("dear", "dear", False),
        ("dear", "dear", True),
        ("dear", "plain", False),
        ("plain", "dear", False),
        ("replicated", "dear", False),
    ],
)
def test_save_state_and_load_state(
    workers: WorkerPools, tmp_path: Path, saved_by: str, loaded_by: str, everywhere: bool
) -> None:
    outcomes = workers(2).run(save_and_load, str(tmp_path), HOOKS[saved_by], HOOKS[loaded_by], everywhere)
    for expected, found in outcomes:
        assert_same_bits(found, expected)


def load_incomplete(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    """Load while the last checkpoint is incomplete; return its folder, and the message of loading it by name."""
    with as_torchrun_does(rank, world_size):
        loop = Loop(DEAR, folder)
        loop.train(2)
        loop.accelerator.save_state()
        expected = loop.weights()
        loop.train(2)
        second = loop.accelerator.save_state()
        assert not list(Path(folder).rglob("ddp_hooks_incomplete"))
        torch.distributed.barrier()
        if rank == 0:
            (Path(second) / "ddp_hooks_incomplete").touch()
        torch.distributed.barrier()
        loop.accelerator.load_state()
        assert_same_bits(loop.weights(), expected)
        try:
            loop.accelerator.load_state(str(second))
        except ValueError as error:
            return str(second), str(error)
        finally:
            loop.end()
    return "", "nothing"


def test_incomplete_checkpoints_are_left_out(workers: WorkerPools, tmp_path: Path) -> None:
    for name, message in workers(2).run(load_incomplete, str(tmp_path)):
        assert f"{name} was not written to its end" in message


@pytest.mark.parametrize("hook", [TOPK, QUANTIZED], ids=["topk", "quantized"])
def test_error_feedback_saves_its_residuals(workers: WorkerPools, tmp_path: Path, hook: Any) -> None:
    for expected, found in workers(2).run(save_and_load, str(tmp_path), hook, hook, False):
        assert_same_bits(found, expected)


def whole_weights(accelerator: Any, model: Any, tables: EmbeddingTables | None) -> dict[str, Tensor]:
    return weights_of(accelerator.unwrap_model(model)) if tables is None else tables.full_state_dict()


def tables_in_a_loop(rank: int, world_size: int, folder: str, hook: Any) -> Any:
    from accelerate import Accelerator

    from ddp_hooks.integrations.accelerate import attach

    outcomes = []
    for config in (None, hook):
        with as_torchrun_does(rank, world_size):
            accelerator = Accelerator(cpu=True)
            torch.manual_seed(1)
            model = nn.Sequential(nn.Embedding(4200, 12), nn.Flatten(), nn.Linear(96, 3))
            tables = None
            if config is not None:
                attachment = attach(accelerator, config)
                tables = shard_embeddings(model, optimizer_class=torch.optim.SGD, lr=0.1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer = accelerator.prepare(model, optimizer)
            norms = []
            for step in range(5):
                generator = torch.Generator().manual_seed(step * world_size + rank)
                ids = torch.randint(0, 4200, (4, 8), generator=generator)
                loss = model(ids).square().sum()
                accelerator.backward(loss)
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 2.0).item())
                optimizer.step()
                optimizer.zero_grad()
                if step == 2:
                    accelerator.save_state(str(Path(folder) / str(config is not None)))
                    weights = whole_weights(accelerator, model, tables)
            accelerator.load_state(str(Path(folder) / str(config is not None)))
            loaded = whole_weights(accelerator, model, tables)
            outcomes.append((weights, loaded, norms))
            if config is not None:
                assert attachment.stats()["ddp_hooks/tables_sent_mb"] > 0
                attachment.close()
                assert tables is not None
                tables.close()
    return outcomes


@pytest.mark.parametrize("hook", [Tables(), DEAR, [TopKConfig(density=1.0, lanes=2), Tables()]])
def test_tables(workers: WorkerPools, tmp_path: Path, hook: Any) -> None:
    for plain, ours in workers(2).run(tables_in_a_loop, str(tmp_path), hook):
        assert_same_bits(ours[1], ours[0])
        assert_close(ours[0], plain[0], 1e-5)
        assert ours[2] == pytest.approx(plain[2], rel=1e-4)


def misuse(rank: int, world_size: int, case: str) -> str:
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import DDPCommunicationHookType

    from ddp_hooks.integrations.accelerate import attach

    handlers = []
    if case == "another hook":
        handlers = [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)]
    with as_torchrun_does(rank, world_size):
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
        model = gpt2()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            if case == "prepared before":
                accelerator.prepare(model)
            attachment = attach(accelerator, DEAR)
            if case == "twice":
                attach(accelerator, TopKConfig())
            if case == "no optimizer":
                model = accelerator.prepare(model)
                model(input_ids=torch.zeros(1, 4, dtype=torch.int64))
            if case == "between parts":
                model, optimizer = accelerator.prepare(model, optimizer)
                ids = torch.zeros(1, 4, dtype=torch.int64)
                with accelerator.no_sync(model):
                    accelerator.gradient_state._set_sync_gradients(False)
                    accelerator.backward(model(input_ids=ids, labels=ids).loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if case == "part of the model":
                model, optimizer = accelerator.prepare(model, optimizer)
                ids = torch.zeros(1, 4, dtype=torch.int64)
                accelerator.backward(model(input_ids=ids, labels=ids).loss)
                accelerator.clip_grad_norm_(list(model.parameters())[:3], 1.0)
        except (RuntimeError, ValueError) as error:
            if case not in ("another hook", "prepared before"):
                attachment.close()
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("another hook", "is a hook of its own, and DDP has one: leave it out"),
        ("twice", "has a communication hook already: pass attach() one configuration"),
        ("prepared before", "call attach() before accelerator.prepare()"),
        ("no optimizer", "no single optimizer with all of its trained parameters"),
        ("between parts", "write `if accelerator.sync_gradients:` before it"),
        ("part of the model", "clipping was asked for 3 of the model's"),
    ],
)
def test_refusals(workers: WorkerPools, case: str, expected: str) -> None:
    assert all(expected in message for message in workers(2).run(misuse, case))


def save_model(rank: int, world_size: int, folder: str) -> None:
    from accelerate import Accelerator
    from safetensors.torch import load_file

    from ddp_hooks.integrations.accelerate import attach

    with as_torchrun_does(rank, world_size):
        accelerator = Accelerator(cpu=True)
        attachment = attach(accelerator, DEAR)
        model: Any = nn.Sequential(nn.Embedding(4200, 12), nn.Flatten(), nn.Linear(96, 3))
        tables = shard_embeddings(model, optimizer_class=torch.optim.SGD, lr=0.1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(torch.arange(32).view(4, 8) + rank).square().sum())
        optimizer.step()
        accelerator.save_model(model, folder)
        expected = tables.full_state_dict()
        tables.close()
        with mock.patch.object(accelerator.state, "destroy_process_group"):  # which other tests need
            accelerator.end_training()
        assert not list(attachment.hooked_models)
    if rank == 0:
        assert_same_bits(load_file(Path(folder) / "model.safetensors"), expected)


def test_models_are_saved_whole(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(save_model, str(tmp_path))


def several_optimizers(rank: int, world_size: int) -> Any:
    """Sparse all-reduce leaves optimizers alone, so a model may have two."""
    from accelerate import Accelerator

    from ddp_hooks.integrations.accelerate import attach

    outcomes = []
    for hook in (None, TopKConfig(density=1.0, lanes=2)):
        with as_torchrun_does(rank, world_size):
            accelerator = Accelerator(cpu=True)
            attachment = attach(accelerator, hook) if hook is not None else None
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
            first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
            model, one, two = accelerator.prepare(model, first, second)
            for step in range(3):
                accelerator.backward(model(torch.full((2, 8), 1.0 + rank + step)).square().sum())
                for optimizer in (one, two):
                    optimizer.step()
                    optimizer.zero_grad()
            outcomes.append(weights_of(accelerator.unwrap_model(model)))
            if attachment is not None:
                assert attachment.stats()["ddp_hooks/sent_mb"] > 0
                attachment.close()
    return outcomes


def test_sparse_all_reduce_with_several_optimizers(workers: WorkerPools) -> None:
    for plain, ours in workers(2).run(several_optimizers):
        assert_close(ours, plain)


def free_and_train_another(rank: int, world_size: int) -> bool:
    with as_torchrun_does(rank, world_size):
        loop = Loop(DEAR)
        loop.train(2)
        first = loop.model
        loop.accelerator.free_memory()
        assert not list(loop.attachment.hooked_models)  # type: ignore[union-attr]
        model = gpt2()
        loop.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop.model, loop.optimizer = loop.accelerator.prepare(model, loop.optimizer)
        loop.train(2)
        loop.end()
    return first is not loop.model


def test_free_memory_lets_another_model_be_trained(workers: WorkerPools) -> None:
    assert workers(2).run(free_and_train_another) == [True, True]
