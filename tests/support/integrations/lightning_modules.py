"""Modules and loaders for Lightning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_hooks import DearConfig, QuantizedConfig, TopKConfig
from tests.support.integrations.launched import samples

DEAR = DearConfig(lanes=2, slice_mb=0.01, atom_mb=0.01)
TOPK = TopKConfig(density=0.1, lanes=2, dense_below_numel=16)
QUANTIZED = QuantizedConfig(bits=8)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Embedding(96, 16), nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 96)
    )


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"][:, 0])


def module(manual: bool = False) -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, _: int) -> Any:
            loss = loss_of(self.network, batch)
            if not manual:
                return loss
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val_loss", loss_of(self.network, batch), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, foreach=False)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Module()


def loader(number: int = 32, seed: int = 0) -> Any:
    return torch.utils.data.DataLoader(samples(number, seed), batch_size=2)  # type: ignore[arg-type]


def trainer(hook: Any, folder: str, num_processes: int = 2, **settings: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy

    from ddp_hooks.integrations.lightning import CommHookStrategy

    strategy = DDPStrategy() if hook is None else CommHookStrategy(hook)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    settings = {"max_epochs": 2, "enable_checkpointing": False} | settings
    cpus: dict[str, Any] = {"accelerator": "cpu", "devices": num_processes}
    return Trainer(strategy=strategy, default_root_dir=folder, **cpus, **quiet, **settings)
