"""A training loop with Accelerate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddp_hooks import DearConfig, QuantizedConfig, TopKConfig
from tests.support.integrations.launched import (
    gpt2,
    samples,
    weights_of,
)

DEAR = DearConfig(lanes=2, slice_mb=0.01, atom_mb=0.01)
TOPK = TopKConfig(density=0.1, lanes=2, dense_below_numel=16)
QUANTIZED = QuantizedConfig(bits=8)


class Loop:
    """Loop as a user would write it."""

    def __init__(self, hook: Any, folder: str = "", order: str = "together", **settings: Any) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from accelerate.utils import ProjectConfiguration

        from ddp_hooks.integrations.accelerate import attach

        project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
        no_dropout = settings.pop("deterministic", False)
        handlers = settings.pop("kwargs_handlers", [DistributedDataParallelKwargs(broadcast_buffers=False)])
        self.accelerator = Accelerator(cpu=True, project_config=project, kwargs_handlers=handlers, **settings)
        self.attachment = attach(self.accelerator, hook) if hook is not None else None
        model = gpt2(**(dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if no_dropout else {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        loader: Any = torch.utils.data.DataLoader(samples(48), batch_size=2)  # type: ignore[arg-type]
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 24)
        prepare = self.accelerator.prepare
        self.model: Any
        if order == "together":
            self.model, self.optimizer, self.loader, self.scheduler = prepare(model, optimizer, loader, scheduler)
        elif order == "optimizer first":
            self.optimizer, self.model, self.loader, self.scheduler = prepare(optimizer, model, loader, scheduler)
        else:
            self.model = prepare(model)
            self.optimizer, self.loader, self.scheduler = prepare(optimizer, loader, scheduler)

    def train(self, num_steps: int = 100, clip: float | None = None, clamp: float | None = None) -> list[float]:
        """One epoch, or less; norms before clipping."""
        norms = []
        for _, batch in zip(range(num_steps), self.loader, strict=False):
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients and clip is not None:
                    norms.append(self.accelerator.clip_grad_norm_(self.model.parameters(), clip).item())
                if self.accelerator.sync_gradients and clamp is not None:
                    self.accelerator.clip_grad_value_(self.model.parameters(), clamp)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return norms

    def weights(self) -> dict[str, Tensor]:
        return weights_of(self.accelerator.unwrap_model(self.model))

    def end(self) -> None:
        if self.attachment is not None:
            assert self.attachment.stats()["ddp_hooks/sent_mb"] > 0, "no hook was at work"
            self.attachment.close()
