"""Train one model twice, with sharded tables and with whole ones under plain DDP, on whole-numbered gradients."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from ddp_hooks import EmbeddingTables, RowwiseAdamW, TableConfig, shard_embeddings
from tests.support.devices import on_device, rank_device

CONFIG = TableConfig(timeout_s=20, stall_warning_s=10)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.5, "lr_decay": 0.25}),
    "sparse_adam": (torch.optim.SparseAdam, {"lr": 0.25}),
    "rowwise_adamw": (RowwiseAdamW, {"lr": 0.25, "weight_decay": 0.125}),
}

Batch = dict[str, Tensor]


class Tables(nn.Module):
    """Three tables, of which one has padding, one few columns; and dense parameters. The forward returns a loss.

    Its gradients are whole numbers, multiples of the number of ranks, and do not depend on weights, so sums and means
    over ranks are exact in any order.
    """

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.encoder = nn.Embedding(40, 10, sparse=True)
        self.decoder = nn.ModuleDict({"words": nn.Embedding(30, 7, padding_idx=0, sparse=True)})
        self.narrow = nn.Embedding(12, 2, sparse=True)
        self.dense = nn.Parameter(torch.arange(6.0))
        self.factor = float(world_size)

    def forward(self, batch: Batch) -> Tensor:
        loss = self._weighted(self.encoder(batch["encoder"]), 1)
        loss = loss + self._weighted(self.decoder["words"](batch["decoder"]), 2)
        loss = loss + self._weighted(self.decoder["words"](batch["decoder"].flip(0)), 3)
        loss = loss + self._weighted(self.narrow(batch["narrow"]), 4)
        return loss + (self.dense * batch["dense"]).sum()

    def _weighted(self, vectors: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + vectors.shape[0])
        weights = torch.randint(-3, 4, vectors.shape, generator=generator) * self.factor
        return (vectors * weights.to(vectors)).sum()


def ids_of(batch: Batch) -> dict[str, Tensor | list[Tensor]]:
    """What prefetch is told."""
    return {
        "encoder": batch["encoder"],
        "decoder.words": [batch["decoder"], batch["decoder"].flip(0)],
        "narrow": batch["narrow"],
    }


def batches(rank: int, world_size: int, count: int) -> list[Batch]:
    """Of other lengths on every rank, sometimes empty; with rows that nobody, somebody or everybody uses next."""
    result = []
    for step in range(count):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        length = (step + 2 * rank) % 5  # 0 for some rank in most steps
        spread = 5 if step % 3 == 2 else 40  # few ids: used by all, again and again
        result.append(
            {
                "encoder": torch.randint(0, min(spread, 40), (length, 3), generator=generator),
                "decoder": torch.randint(0, min(spread, 30), (4, 2), generator=generator),
                "narrow": torch.randint(0, min(spread, 12), (length,), generator=generator).int(),
                "dense": torch.randint(-3, 4, (6,), generator=generator).float() * world_size,
            }
        )
    return result


def sum_and_divide(_, bucket):  # type: ignore[no-untyped-def]
    """Plain DDP's reduction, slow and obvious, dividing after the sum: exact for whole numbers.

    Without it DDP leaves sparse gradients to gloo, after which processes die now and then; see docs/tables.md.
    """
    buffer = bucket.buffer()
    world_size = dist.get_world_size()
    future = torch.futures.Future()
    if not buffer.is_sparse:
        dist.all_reduce(buffer)
        future.set_result(buffer.div_(world_size))
        return future
    touched = torch.zeros(buffer.shape[0], device=buffer.device)
    touched[buffer.coalesce().indices()[0]] = 1
    dist.all_reduce(touched)
    total = buffer.to_dense()
    dist.all_reduce(total)
    rows = touched.nonzero().view(-1)
    values = total[rows] / world_size
    future.set_result(torch.sparse_coo_tensor(rows[None], values, buffer.shape, is_coalesced=True))
    return future


@dataclass
class Side:
    """One of the twins, as a loop sees it."""

    ddp: DistributedDataParallel
    optimizers: list[torch.optim.Optimizer]
    tables: EmbeddingTables | None
    schedulers: list[Any] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)  # of the model's forwards in order, losses among them

    def __post_init__(self) -> None:
        self.ddp.module.register_forward_hook(
            lambda module, args, output: self.outputs.extend(
                leaf.detach().clone() for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)
            )
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()

    def state(self) -> dict[str, Tensor]:
        return self.tables.full_state_dict() if self.tables is not None else self.ddp.module.state_dict()


Loop = Callable[[Side, Iterator[Batch]], None]


@dataclass
class Twins:
    """The same model with sharded tables and with whole ones."""

    ours: Side
    plain: Side

    @staticmethod
    def of(
        world_size: int,
        optimizer: str = "sparse_adam",
        config: TableConfig = CONFIG,
        model: Callable[[int], nn.Module] = Tables,
        modules: Any = 1,
        wrap: Callable[[DistributedDataParallel, torch.optim.Optimizer], Any] | None = None,
        main: type[torch.optim.Optimizer] = torch.optim.SGD,
    ) -> Twins:
        kind, options = OPTIMIZERS[optimizer]
        torch.manual_seed(7 + dist.get_rank())  # the first rank's weights count
        original = model(world_size).to(rank_device())
        sides = []
        for sharded in (True, False):
            module = copy.deepcopy(original)
            tables = shard_embeddings(module, None, modules, kind, config=config, **options) if sharded else None
            ddp = DistributedDataParallel(module, gradient_as_bucket_view=True)
            embeddings = [m for m in module.modules() if isinstance(m, nn.Embedding)]
            held = {id(m.weight) for m in embeddings}
            dense = [p for p in module.parameters() if id(p) not in held]
            of_dense = main(dense, lr=0.5)  # type: ignore[call-arg]
            if tables is not None:
                tables.follow(of_dense)
                if wrap is not None:
                    wrap(ddp, of_dense)
                else:
                    ddp.register_comm_hook(None, sum_and_divide)
                sides.append(Side(ddp, [of_dense], tables))
            else:
                ddp.register_comm_hook(None, sum_and_divide)
                whole = list({id(m.weight): m.weight for m in embeddings}.values())
                sides.append(Side(ddp, [of_dense, kind(whole, **options)], None))
        return Twins(*sides)

    def train(self, loop: Loop, data: Iterable[Batch], prefetch: bool) -> None:
        """Run the loop over the data on both sides."""
        data = on_device(list(data))
        tables = self.ours.tables
        assert tables is not None
        loop(self.ours, iter(tables.prefetch(data, ids_of) if prefetch else data))
        loop(self.plain, iter(data))

    def gap(self) -> float:
        """The largest difference of weights, and of what forwards returned; 0.0 if they are equal bit for bit.

        Gradients may not depend on weights: then only outputs show that a forward has read old ones.
        """
        ours, plain = self.ours.state(), self.plain.state()
        assert list(ours) == list(plain)
        outputs = zip(self.ours.outputs, self.plain.outputs, strict=True)
        pairs = [(ours[name], plain[name]) for name in plain] + list(outputs)
        return max(_difference(one, other) for one, other in pairs)

    def optimizer_gap(self) -> float:
        """Likewise of the table optimizer's state."""
        assert self.ours.tables is not None
        ours = self.ours.tables.full_optimizer_state_dict()["state"]
        plain = self.plain.optimizers[1].state_dict()["state"]
        assert [s for s in ours if ours[s]] == [s for s in plain if plain[s]]
        gaps = [0.0]
        for position, state in plain.items():
            assert list(state) == list(ours.get(position, {}))
            gaps += [_difference(torch.as_tensor(ours[position][k]), torch.as_tensor(v)) for k, v in state.items()]
        return max(gaps)


def _difference(one: Tensor, other: Tensor) -> float:
    one, other = one.cpu(), other.cpu()  # whole states come to the processor
    if torch.equal(one, other):
        return 0.0
    if one.shape != other.shape:
        return math.inf
    difference = float((one.double() - other.double()).abs().max())
    return max(difference, 5e-324) if math.isfinite(difference) else math.inf


@contextmanager
def accumulating(side: Side) -> Iterator[None]:
    """DDP's own no_sync."""
    with side.ddp.no_sync():
        yield


def taken(data: Iterator[Batch], count: int) -> list[Batch]:
    """The next few batches."""
    return list(itertools.islice(data, count))
