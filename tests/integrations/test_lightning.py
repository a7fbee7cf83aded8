"""Lightning's Trainer and Fabric with a hook train as with plain DDP, on two real processes.

Prevents: hooks that are not registered off CUDA; clipping inside of the closure, where shards have no gradients yet;
checkpoints of one rank's shards.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_hooks import DearConfig, TopKConfig
from tests.support.integrations.launched import as_torchrun_does, assert_close, assert_same_bits, weights_of
from tests.support.integrations.lightning_modules import (
    DEAR,
    QUANTIZED,
    TOPK,
    loader,
    loss_of,
    module,
    network,
    trainer,
)
from tests.support.workers import WorkerPools

REPLICATED = DearConfig(update="replicated", lanes=2, slice_mb=0.01, atom_mb=0.01)
EVERYTHING = TopKConfig(density=1.0, lanes=2)
HOOKS = {
    "plain": None,
    "dear": DEAR,
    "replicated": REPLICATED,
    "topk": TOPK,
    "everything": EVERYTHING,
    "quantized": QUANTIZED,
}


class Watch:
    """Callback that checks, at the end of training, that the hook was at work."""

    def __new__(cls) -> Any:
        from lightning.pytorch import Callback

        class Watching(Callback):
            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                from ddp_hooks.integrations.lightning import CommHookStrategy

                if isinstance(trainer.strategy, CommHookStrategy):
                    assert trainer.strategy.stats()["ddp_hooks/sent_mb"] > 0

        return Watching()


def compare(rank: int, world_size: int, folder: str, hook: Any, settings: dict[str, Any], manual: bool) -> Any:
    outcomes = []
    for config in (None, hook):
        with as_torchrun_does(rank, world_size):
            model = module(manual)
            torch.manual_seed(0)
            fitting = trainer(config, folder, callbacks=[Watch()], **settings)
            fitting.fit(model, loader(), loader(8, 1))
            outcomes.append((weights_of(model), fitting.callback_metrics["val_loss"].item()))
    return outcomes


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "accumulation": {"accumulate_grad_batches": 3},
    "bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.quick("dear-accumulation", "replicated-bf16")
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("hook", ["dear", "replicated"])
def test_same_bits_as_plain_ddp(workers: WorkerPools, tmp_path: Path, hook: str, settings: str) -> None:
    for plain, ours in workers(2).run(compare, str(tmp_path), HOOKS[hook], SETTINGS[settings], False):
        assert_same_bits(ours[0], plain[0])
        assert ours[1] == plain[1]


def train_in_fp16(rank: int, world_size: int, folder: str, hook: Any) -> Any:
    from lightning.pytorch.plugins import MixedPrecision

    outcomes = []
    for config in (None, hook):
        with as_torchrun_does(rank, world_size):
            model = module()
            torch.manual_seed(0)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
            precision = MixedPrecision("16-mixed", "cpu", scaler)
            fitting = trainer(config, folder, plugins=[precision], gradient_clip_val=0.1, callbacks=[Watch()])
            fitting.fit(model, loader())
            assert precision.scaler is not None and (precision.scaler is scaler) == (config is None)
            outcomes.append((weights_of(model), precision.scaler.get_scale()))
    return outcomes


@pytest.mark.parametrize("hook", ["dear", "replicated"])
def test_fp16_skips_the_same_steps(workers: WorkerPools, tmp_path: Path, hook: str) -> None:
    for plain, ours in workers(2).run(train_in_fp16, str(tmp_path), HOOKS[hook]):
        assert_close(ours[0], plain[0], 1e-4)
        assert ours[1] == plain[1] < 2.0**24, "some steps were to overflow"


@pytest.mark.parametrize("hook", ["dear", "replicated"])
def test_manual_optimization(workers: WorkerPools, tmp_path: Path, hook: str) -> None:
    for plain, ours in workers(2).run(compare, str(tmp_path), HOOKS[hook], {}, True):
        assert_same_bits(ours[0], plain[0])


@pytest.mark.quick("dear-norm")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("hook", ["dear", "replicated", "everything"])
def test_clipping(workers: WorkerPools, tmp_path: Path, hook: str, algorithm: str) -> None:
    settings = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    unclipped = workers(2).run(compare, str(tmp_path), HOOKS[hook], {}, False)[0][0][0]
    for plain, ours in workers(2).run(compare, str(tmp_path), HOOKS[hook], settings, False):
        assert_close(ours[0], plain[0], 1e-4)
        assert any(not torch.allclose(value, unclipped[name], atol=1e-3) for name, value in plain[0].items())


def average_weights(rank: int, world_size: int, folder: str, hook: Any, kind: str) -> Any:
    """Callbacks that copy parameters: Lightning's own at the ends of epochs, and somebody's after each step."""
    from lightning.pytorch import Callback
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    class Average(Callback):
        total: dict[str, Tensor]

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            copies = {name: value.detach().clone() for name, value in pl_module.named_parameters()}
            former = getattr(self, "total", copies)
            self.total = {name: 0.5 * (value + former[name]) for name, value in copies.items()}

    outcomes = []
    for config in (None, hook):
        with as_torchrun_does(rank, world_size):
            model = module()
            torch.manual_seed(0)
            callback: Any = StochasticWeightAveraging(0.05, swa_epoch_start=1) if kind == "swa" else Average()
            trainer(config, folder, callbacks=[callback], max_epochs=4).fit(model, loader())
            outcomes.append(weights_of(model) if kind == "swa" else callback.total)
    return outcomes


@pytest.mark.quick("swa")
@pytest.mark.parametrize("kind", ["swa", "after each step"])
def test_callbacks_that_average(workers: WorkerPools, tmp_path: Path, kind: str) -> None:
    for plain, ours in workers(2).run(average_weights, str(tmp_path), DEAR, kind):
        assert_same_bits(ours, plain)


def resume(rank: int, world_size: int, folder: str, saved_by: Any, resumed_by: Any) -> Any:
    with as_torchrun_does(rank, world_size):
        model = module()
        torch.manual_seed(0)
        whole = trainer(resumed_by, folder, max_epochs=4)
        whole.fit(model, loader())
        expected = weights_of(model)
        model = module()
        torch.manual_seed(0)
        first = trainer(saved_by, folder, max_epochs=2)
        first.fit(model, loader())
        random = torch.get_rng_state()
        path = str(Path(folder) / "half.ckpt")
        first.save_checkpoint(path)  # after the fit, as most do
        model = module()
        second = trainer(resumed_by, folder, max_epochs=4)
        torch.set_rng_state(random)
        second.fit(model, loader(), ckpt_path=path)
        return expected, weights_of(model)


@pytest.mark.quick("replicated-dear")
@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        *[("dear", "dear"), ("dear", "plain"), ("plain", "dear"), ("replicated", "dear"), ("topk", "topk")],
        ("quantized", "quantized"),
    ],
)
def test_checkpoints_fit_everywhere(workers: WorkerPools, tmp_path: Path, saved_by: str, resumed_by: str) -> None:
    for expected, found in workers(2).run(resume, str(tmp_path), HOOKS[saved_by], HOOKS[resumed_by]):
        assert_same_bits(found, expected)


def checkpoint_while_training(rank: int, world_size: int, folder: str) -> list[str]:
    from lightning.pytorch.callbacks import ModelCheckpoint

    with as_torchrun_does(rank, world_size):
        saving = ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True)
        fitting = trainer(TOPK, folder, callbacks=[saving], enable_checkpointing=True, max_epochs=3)
        fitting.fit(module(), loader(), loader(8, 1))
    return sorted(path.name for path in Path(folder).iterdir())


def test_checkpoints_that_are_removed_take_their_files_along(workers: WorkerPools, tmp_path: Path) -> None:
    for names in workers(2).run(checkpoint_while_training, str(tmp_path)):
        checkpoints = [name for name in names if name.endswith(".ckpt")]
        assert len(checkpoints) == 2
        assert sorted(names) == sorted([*checkpoints, *(f"{name}.ddp_hooks" for name in checkpoints)])


def fabric_step(fabric: Any, model: Any, optimizer: Any, batches: list[Any], clip: str, number: int) -> None:
    for part in range(2):
        with fabric.no_backward_sync(model, enabled=part == 0):
            fabric.backward(loss_of(model, batches[(2 * number + part) % len(batches)]))
    if clip == "norm":
        fabric.clip_gradients(model, optimizer, max_norm=0.05)
    elif clip == "value":
        fabric.clip_gradients(model, optimizer, clip_val=0.001)
    optimizer.step()
    optimizer.zero_grad()


def fabric_loop(rank: int, world_size: int, folder: str, hook: Any, clip: str) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    from ddp_hooks.integrations.lightning import CommHookFabricStrategy

    outcomes = []
    for config in (None, hook):
        with as_torchrun_does(rank, world_size):
            strategy: Any = DDPStrategy() if config is None else CommHookFabricStrategy(config)
            fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
            fabric.launch()
            torch.manual_seed(0)
            inner = network()
            optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01, foreach=False)
            model, optimizer = fabric.setup(inner, optimizer)
            batches = list(fabric.setup_dataloaders(loader()))
            step = partial(fabric_step, fabric, model, optimizer, batches, clip)
            for number in range(3):
                step(number)
            path = str(Path(folder) / f"{config is not None}.ckpt")
            state = {"model": model, "optimizer": optimizer, "step": 3}
            random = torch.get_rng_state()
            fabric.save(path, state)
            for number in range(3, 6):
                step(number)
            expected = weights_of(inner)
            rest = fabric.load(path, state)
            assert state["step"] == 3 and not rest
            torch.set_rng_state(random)
            for number in range(3, 6):
                step(number)
            assert_same_bits(weights_of(inner), expected)
            if config is not None:
                assert strategy.stats()["ddp_hooks/sent_mb"] > 0
                strategy.hooked_models.release()
            outcomes.append(expected)
    return outcomes


@pytest.mark.quick("dear-norm", "replicated-none", "replicated-value")
@pytest.mark.parametrize("clip", ["none", "norm", "value"])
@pytest.mark.parametrize("hook", ["dear", "replicated"])
def test_fabric(workers: WorkerPools, tmp_path: Path, hook: str, clip: str) -> None:
    for plain, ours in workers(2).run(fabric_loop, str(tmp_path), HOOKS[hook], clip):
        assert_close(ours, plain, 0.0 if clip == "none" else 1e-5)


def test_fabric_saves_what_was_left_out(workers: WorkerPools, tmp_path: Path) -> None:
    workers(2).run(fabric_loop, str(tmp_path), TOPK, "norm")


def misuse(rank: int, world_size: int, folder: str, case: str) -> str:
    from ddp_hooks.integrations.lightning import CommHookStrategy

    with as_torchrun_does(rank, world_size):
        try:
            if case == "another hook":
                CommHookStrategy(DEAR, ddp_comm_hook=print)
            if case == "two hooks":
                CommHookStrategy([DEAR, TOPK])
        except ValueError as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "expected"),
    [("another hook", "leave it out"), ("two hooks", 'write TopKConfig(pipeline="forward")')],
)
def test_refusals(workers: WorkerPools, tmp_path: Path, case: str, expected: str) -> None:
    assert all(expected in message for message in workers(2).run(misuse, str(tmp_path), case))
