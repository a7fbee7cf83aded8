"""Networks with their batches and optimizers, as compared with plain DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from ddp_hooks import DearConfig
from tests.support.dear.twins import CONFIG, compare

TOLERANCE = 1e-10
IMAGE_CONFIG = DearConfig(atom_mb=1, fusion_mb=2, slice_mb=0.1, lanes=2, timeout_s=20, stall_warning_s=10)


class Classifier(nn.Module):
    """An image network with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(images), labels)


class LanguageModel(nn.Module):
    """A transformers model with its loss."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.network(input_ids=ids, labels=ids).loss
        return loss


class Encoder(nn.Module):
    """``MultiheadAttention.out_proj`` and, in evaluation, whole layers are read without their forward running."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 40, dropout=0.0, batch_first=True)
        self.network = nn.TransformerEncoder(layer, 3)

    def forward(self, values: Tensor) -> Tensor:
        output: Tensor = self.network(values)
        return output.square().mean()


class Backwards(nn.Module):
    """Modules run in another order than they are registered, one of them twice, and one as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(20, 3)
        self.shared = nn.Linear(20, 20)
        self.functional = nn.Linear(20, 20)  # its forward never runs
        self.scale = nn.Parameter(torch.tensor(1.5))  # owned by the root
        self.first = nn.Linear(8, 20)

    def forward(self, values: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(values)) * self.scale
        hidden = torch.tanh(self.shared(hidden))
        hidden = nn.functional.linear(hidden, self.functional.weight, self.functional.bias)
        hidden = torch.tanh(self.shared(hidden))
        output: Tensor = self.last(hidden)
        return output.square().mean()


class Recomputed(nn.Module):
    """Activations are computed again in backward, inside of a backward of its own if ``reentrant``."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.Linear(96, 24)) for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        values.requires_grad_()
        for layer in self.layers:
            values = torch.utils.checkpoint.checkpoint(layer, values, use_reentrant=self.reentrant)
        return values.square().mean()


class Restless(nn.Module):
    """Takes another path from step to step, so that no traced order holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, values: Tensor, order: Tensor) -> Tensor:
        for index in order.tolist():
            values = torch.tanh(self.layers[index](values))
        return values.square().mean()


def resnet(world_size: int) -> nn.Module:
    from torchvision.models import ResNet
    from torchvision.models.resnet import BasicBlock

    network = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10, width_per_group=64)
    return Classifier(network.to(memory_format=torch.channels_last)).double()


def images(rank: int, world_size: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(31 * (step % 2) + rank)
    batch = torch.randn(6, 3, 16, 16, generator=generator, dtype=torch.float64)
    return batch.to(memory_format=torch.channels_last), torch.randint(0, 10, (6,), generator=generator)


def bert(world_size: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(**sizes, intermediate_size=64, max_position_embeddings=32)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return LanguageModel(BertForMaskedLM(config)).double()


def gpt2(world_size: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 120, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return LanguageModel(GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))).double()


def encoder(world_size: int) -> nn.Module:
    return Encoder().double()


def backwards(world_size: int) -> nn.Module:
    return Backwards().double()


def restless(world_size: int) -> nn.Module:
    return Restless().double()


def recomputed(world_size: int) -> nn.Module:
    return Recomputed(False).double()


def recomputed_reentrant(world_size: int) -> nn.Module:
    return Recomputed(True).double()


def frozen(world_size: int) -> nn.Module:
    model = Backwards().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("shared", "first.bias")))
    return model


def ids(rank: int, world_size: int, step: int) -> tuple[Tensor]:
    return (torch.randint(0, 12, (3, 16), generator=torch.Generator().manual_seed(13 * step + rank)),)


def sequences(rank: int, world_size: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(13 * step + rank)
    return (torch.randn(2, 6, 16, generator=generator, dtype=torch.float64),)


def rows(width: int, rank: int, world_size: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(13 * step + rank)
    return (torch.randn(5, width, generator=generator, dtype=torch.float64),)


def rows_in_any_order(rank: int, world_size: int, step: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(4, generator=torch.Generator().manual_seed(step))
    return *rows(12, rank, world_size, step), order


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.AdamW(groups, lr=3e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)


def fast_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


MODELS = {
    "resnet": (resnet, images, sgd),
    "bert": (bert, ids, adamw),
    "gpt2": (gpt2, ids, adamw),
    "encoder": (encoder, sequences, adamw),
    "backwards": (backwards, partial(rows, 8), adamw),
    "restless": (restless, rows_in_any_order, fast_sgd),
    "recomputed": (recomputed, partial(rows, 24), adamw),
    "recomputed-reentrant": (recomputed_reentrant, partial(rows, 24), adamw),
    "frozen": (frozen, partial(rows, 8), adamw),
}


def settings(name: str) -> Any:
    """Small pieces for small models; 40 MB in pieces of 2 kB would only take long."""
    if name == "resnet":
        return partial(compare, ddp_options={"bucket_cap_mb": 2}, config=IMAGE_CONFIG)
    return partial(compare, config=CONFIG)


class Conditional(nn.Module):
    """Each rank uses another branch in each step; one branch is used by nobody for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, values: Tensor, choice: int) -> Tensor:
        output: Tensor = self.head(torch.tanh(self.branches[choice](values)))
        return output.square().mean()


def conditional(world_size: int) -> nn.Module:
    return Conditional().double()


def choices(rank: int, world_size: int, step: int) -> tuple[Tensor, int]:
    return *rows(8, rank, world_size, step), (rank + step // 2) % 3 if step < 6 else 3
