"""Loops with several models, several backwards, frozen parts or gradients of inputs, beside plain DDP.

Prevents: tables that learn what belongs to another model, go on learning when they are frozen, or lose a gradient
because something else has stepped meanwhile; ranks that part because they compute the same in another way.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_hooks import EmbeddingTables, GradScaler, shard_embeddings
from tests.support.embedding.twins import CONFIG, Side, Twins, batches, ids_of, sum_and_divide
from tests.support.messages import message_of
from tests.support.workers import WorkerPools

NUM_STEPS = 4
NEAR = 1e-12  # float64


def ids(rank: int, step: int) -> Tensor:
    return torch.randint(0, 20, (5,), generator=torch.Generator().manual_seed(100 * step + rank))


def inputs(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step + 77 * rank)
    return torch.randn(5, 4, dtype=torch.float64, generator=generator)


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label, self.out = nn.Embedding(20, 4), nn.Linear(4, 4)

    def forward(self, labels: Tensor) -> Tensor:
        made: Tensor = self.out(torch.tanh(self.label(labels)))
        return made


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.label, self.out = nn.Embedding(20, 4), nn.Linear(4, 1)

    def forward(self, made: Tensor, labels: Tensor) -> Tensor:
        score: Tensor = self.out(torch.tanh(made + self.label(labels))).sum()
        return score


class Scorer(nn.Module):
    """With a table in an encoder, beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4))
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, values: Tensor, labels: Tensor) -> Tensor:
        score: Tensor = self.outer(torch.tanh(self.inner(values) + self.encoder(labels))).sum()
        return score


class TwoLosses(Scorer):
    def forward(self, values: Tensor, labels: Tensor) -> Any:
        hidden = torch.tanh(self.inner(values) + self.encoder(labels))
        return self.outer(hidden).sum(), hidden.square().sum()


class Player:
    """A model with its optimizer, with sharded tables or with whole ones."""

    def __init__(self, make: Callable[[], nn.Module], sharded: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = make().double()
        self.tables: EmbeddingTables | None = None
        if sharded:
            self.tables = shard_embeddings(self.model, None, 1, torch.optim.SGD, config=CONFIG, lr=0.1)
        self.ddp = DistributedDataParallel(self.model, **options)
        if not sharded:
            self.ddp.register_comm_hook(None, sum_and_divide)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.follow(self.optimizer)

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        if self.tables is not None:
            self.tables.follow(optimizer)

    def end(self) -> dict[str, Tensor]:
        state = self.tables.full_state_dict() if self.tables is not None else self.model.state_dict()
        state = copy.deepcopy(state)
        if self.tables is not None:
            self.tables.close()
        return state


Play = Callable[[bool, int], list[Player]]


def gap_of(play: Play, rank: int) -> float:
    """How far apart players with sharded tables and with whole ones end up."""
    ours = [player.end() for player in play(True, rank)]
    plain = [player.end() for player in play(False, rank)]
    return max(
        float((one[name] - other[name]).abs().max()) for one, other in zip(ours, plain, strict=True) for name in other
    )


# Several models ---------------------------------------------------------------------------------------------


def dcgan(sharded: bool, rank: int) -> list[Player]:
    """The generator's backward runs through the critic, between its step and its zero_grad()."""
    maker, critic = Player(Generator, sharded), Player(Critic, sharded, broadcast_buffers=False)
    for step in range(NUM_STEPS):
        labels = ids(rank, step)
        critic.model.zero_grad()
        (-critic.ddp(inputs(rank, step), labels)).backward()
        made = maker.ddp(labels)
        critic.ddp(made.detach(), labels).backward()
        critic.optimizer.step()
        maker.model.zero_grad()
        (-critic.ddp(made, labels)).backward()
        maker.optimizer.step()
    return [maker, critic]


def frozen_critic(sharded: bool, rank: int) -> list[Player]:
    maker, critic = Player(Generator, sharded), Player(Critic, sharded, broadcast_buffers=False)
    for step in range(NUM_STEPS):
        labels = ids(rank, step)
        (-critic.ddp(inputs(rank, step), labels)).backward()
        with torch.no_grad():
            made = maker.ddp(labels)
        critic.ddp(made, labels).backward()
        critic.optimizer.step()
        critic.optimizer.zero_grad()
        critic.model.requires_grad_(False)
        (-critic.model(maker.ddp(labels), labels)).backward()
        maker.optimizer.step()
        maker.optimizer.zero_grad()
        critic.model.requires_grad_(True)
    return [maker, critic]


def one_optimizer(sharded: bool, rank: int) -> list[Player]:
    """It steps for the critic between the generator's forward and its backward."""
    maker, critic = Player(Generator, sharded), Player(Critic, sharded, broadcast_buffers=False)
    both = torch.optim.SGD([*maker.model.parameters(), *critic.model.parameters()], lr=0.1)
    maker.follow(both)
    critic.follow(both)
    for step in range(NUM_STEPS):
        labels = ids(rank, step)
        made = maker.ddp(labels)
        critic.ddp(made.detach(), labels).backward()
        both.step()
        both.zero_grad()
        (-critic.ddp(made, labels)).backward()
        both.step()
        both.zero_grad()
    return [maker, critic]


def penalty(sharded: bool, rank: int) -> list[Player]:
    """Gradients of the output by the input, of first order beside the loss and of second order in it."""
    player = Player(Scorer, sharded)
    for step in range(NUM_STEPS):
        values = inputs(rank, step).requires_grad_()
        player.optimizer.zero_grad()
        score = player.ddp(values, ids(rank, step))
        torch.autograd.grad(score, values, retain_graph=True)
        (slope,) = torch.autograd.grad(score, values, create_graph=True)
        (score + (slope.square().sum() - 1) ** 2).backward()
        player.optimizer.step()
    return [player]


def one_backward_or_two(sharded: bool, rank: int) -> list[Player]:
    """Under no_sync() the first rank runs a backward for each loss, the others one for both."""
    player = Player(TwoLosses, sharded)
    for step in range(NUM_STEPS):
        player.optimizer.zero_grad()
        with player.ddp.no_sync():
            one, two = player.ddp(inputs(rank, step), ids(rank, step))
            if rank == 0:
                one.backward(retain_graph=True)
                two.backward()
            else:
                (one + two).backward()
        one, two = player.ddp(inputs(rank, step + 20), ids(rank, step + 20))
        (one + two).backward()
        player.optimizer.step()
    return [player]


PLAYS: dict[str, Play] = {
    play.__name__: play for play in (dcgan, frozen_critic, one_optimizer, penalty, one_backward_or_two)
}


def play(rank: int, world_size: int, name: str) -> float:
    return gap_of(PLAYS[name], rank)


@pytest.mark.parametrize("name", PLAYS)
def test_as_with_whole_tables(workers: WorkerPools, name: str) -> None:
    assert max(workers(2).run(play, name)) < NEAR


def spoilt(rank: int, world_size: int) -> str:
    """What a backward between a step and its zero_grad() has left is not to be applied."""
    player = Player(Scorer, True)
    for step in range(2):
        player.ddp(inputs(rank, step), ids(rank, step)).backward()
        if not step:
            player.optimizer.step()
    message = message_of(player.optimizer.step)
    assert player.tables is not None
    player.tables.zero_grad()
    player.tables.close()
    return message


def test_a_step_with_gradients_that_were_applied(workers: WorkerPools) -> None:
    for message in workers(2).run(spoilt):
        assert "a backward after a step, without zero_grad() between them" in message


def too_late(rank: int, world_size: int) -> str:
    """A step has ended what a forward had begun, and the backward of that forward comes afterwards."""
    side = Twins.of(world_size).ours  # whose gradients do not need weights that the step has changed
    first, second = batches(rank, world_size, 2)
    early = side.ddp.module(first)
    side.ddp.module(second).backward()
    side.step()
    side.zero_grad()
    message = message_of(early.backward)
    assert side.tables is not None
    side.tables.close()
    return message


def test_a_gradient_that_comes_too_late(workers: WorkerPools) -> None:
    for message in workers(2).run(too_late):
        assert "belongs to a forward whose gradients have been sent, or left behind by a step" in message


# Frozen tables ----------------------------------------------------------------------------------------------


def encoder_of(player: Player) -> nn.Sequential:
    encoder = player.model.encoder
    assert isinstance(encoder, nn.Sequential)
    return encoder


def freeze(player: Player, way: str, frozen: bool) -> None:
    encoder = encoder_of(player)
    if way == "the encoder":
        encoder.requires_grad_(not frozen)
    elif way == "the model":
        player.model.requires_grad_(not frozen)
        player.model.inner.requires_grad_(True)
    else:
        encoder[1].requires_grad_(not frozen)
        if way == "the table":
            encoder[0].requires_grad_(not frozen)
        elif player.tables is not None:
            player.tables.requires_grad_(not frozen)
        else:
            encoder[0].weight.requires_grad_(not frozen)


def thaw_and_freeze(rank: int, world_size: int, way: str) -> tuple[float, list[float]]:
    """The gap, and by how much the table has moved while it was trained, frozen, and trained."""
    moved: list[float] = []

    def play(sharded: bool, rank: int) -> list[Player]:
        player = Player(Scorer, sharded)
        for turn, frozen in enumerate((False, True, False)):
            freeze(player, way, frozen)
            ddp = DistributedDataParallel(player.model)
            if not sharded:
                ddp.register_comm_hook(None, sum_and_divide)
            optimizer = torch.optim.SGD([p for p in player.model.parameters() if p.requires_grad], lr=0.1)
            player.follow(optimizer)
            state = player.tables.full_state_dict() if player.tables is not None else player.model.state_dict()
            before = state["encoder.0.weight"].clone()
            for step in range(3):
                player.model.zero_grad()
                ddp(inputs(rank, step + 10 * turn), ids(rank, step)).backward()
                optimizer.step()
            state = player.tables.full_state_dict() if player.tables is not None else player.model.state_dict()
            moved.append(float((state["encoder.0.weight"] - before).abs().max()))
        return [player]

    return gap_of(play, rank), moved[:3]


@pytest.mark.parametrize("way", ["the encoder", "the model", "the table", "the tables"])
def test_freezing_reaches_tables(workers: WorkerPools, way: str) -> None:
    for gap, (trained, frozen, trained_again) in workers(2).run(thaw_and_freeze, way):
        assert gap < NEAR
        assert frozen == 0.0 and trained > 0 and trained_again > 0


def all_frozen(rank: int, world_size: int) -> int:
    """Lookups that are kept of a part of the model that is frozen altogether, whose output needs no gradient."""
    torch.manual_seed(0)
    encoder, head = nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 4)), nn.Linear(4, 1)
    tables = shard_embeddings(encoder, None, 1, torch.optim.SGD, config=CONFIG, lr=0.1)
    encoder.requires_grad_(False)
    ddp = DistributedDataParallel(nn.Sequential(encoder, head))
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    tables.follow(optimizer)
    for step in range(6):
        optimizer.zero_grad()
        ddp(ids(rank, step)).sum().backward()
        optimizer.step()
    kept = len(list(tables._scheduler.expected.lookups()))
    tables.close()
    return kept


def test_frozen_parts_keep_nothing(workers: WorkerPools) -> None:
    assert max(workers(2).run(all_frozen)) <= 2  # of the last forward and the one before, which could be repeated


def freeze_by_loop(rank: int, world_size: int) -> list[Any]:
    player = Player(Scorer, True)
    tables = player.tables
    assert tables is not None
    for parameter in encoder_of(player).parameters():
        parameter.requires_grad = False
    ddp = DistributedDataParallel(player.model)
    found: list[Any] = [message_of(lambda: ddp(inputs(rank, 0), ids(rank, 0)))]
    for train in (False, True):
        tables.requires_grad_(train, ["encoder.0"])
        before = tables.full_state_dict()["encoder.0.weight"]
        player.optimizer.zero_grad()
        ddp(inputs(rank, 0), ids(rank, 0)).backward()
        player.optimizer.step()
        found.append(bool((tables.full_state_dict()["encoder.0.weight"] != before).any()))
    found.append(message_of(lambda: tables.requires_grad_(True, ["encoder"])))
    tables.close()
    return found


def test_a_loop_that_freezes_everything_around_a_table(workers: WorkerPools) -> None:
    for doubt, moved_frozen, moved_trained, unknown in workers(2).run(freeze_by_loop):
        assert "all parameters of Sequential were frozen" in doubt
        assert 'tables.requires_grad_(False, ["encoder.0"])' in doubt
        assert not moved_frozen and moved_trained
        assert "'encoder' is no sharded table; these are encoder.0" in unknown


# Prefetch and evaluation --------------------------------------------------------------------------------------


def evaluate_on_one_rank(rank: int, world_size: int, case: str) -> float:
    """Inside of local(), when ranks expect another batch than the one that is trained next."""

    def loop(side: Side, data: Iterator[Any]) -> None:
        for number, batch in enumerate(data):
            if case == "after a skipped batch" and number == 3:
                continue
            if number % 2 == 0:
                whole = side.tables.local() if side.tables is not None else contextlib.nullcontext()
                with whole, torch.no_grad():
                    if rank == 0:
                        side.ddp.module(batches(rank, world_size, 1)[0])
            side.zero_grad()
            side.ddp(batch).backward()
            side.step()
            if case == "after an early end" and number == 3:
                break

    twins = Twins.of(world_size)
    for _ in range(2):
        twins.train(loop, batches(rank, world_size, 8), prefetch=True)
    gap = twins.gap()
    assert twins.ours.tables is not None
    twins.ours.tables.close()
    return gap


@pytest.mark.parametrize("case", ["after an early end", "after a skipped batch"])
def test_evaluation_on_one_rank(workers: WorkerPools, case: str) -> None:
    assert workers(2).run(evaluate_on_one_rank, case) == [0.0, 0.0]


def teacher_after_early_end(rank: int, world_size: int) -> list[bool]:
    """Whether batches are prefetched at the end of every epoch, each of which ends early."""
    twins = Twins.of(world_size)
    tables = twins.ours.tables
    assert tables is not None
    loader: DataLoader[Any] = DataLoader(batches(rank, world_size, 9), batch_size=None)  # type: ignore[arg-type]
    found = []
    for _ in range(3):
        for number, batch in enumerate(tables.prefetch(loader, ids_of)):
            with torch.no_grad():
                twins.ours.ddp.module(batch)
            twins.ours.zero_grad()
            twins.ours.ddp(batch).backward()
            twins.ours.step()
            if number == 5:
                break
        found.append(tables._scheduler.lookups.current is not None)
    tables.close()
    return found


def test_prefetch_goes_on_beside_a_teacher(workers: WorkerPools) -> None:
    assert workers(2).run(teacher_after_early_end) == [[True] * 3] * 2


def evaluate_in_inference_mode(rank: int, world_size: int, optimizer: str) -> tuple[float, int]:
    """Delayed rows with scaled gradients are applied in the evaluation's first lookup."""
    delayed = 0

    def loop(side: Side, data: Iterator[Any]) -> None:
        nonlocal delayed
        scaler = GradScaler("cpu", init_scale=4.0, enabled=side.tables is not None)
        for number, batch in enumerate(data):
            side.zero_grad()
            scaler.scale(side.ddp(batch)).backward()
            scaler.step(side.optimizers[0])
            for one in side.optimizers[1:]:
                one.step()
            scaler.update()
            if number % 2:
                delayed += side.tables.stats().num_delayed_rows if side.tables is not None else 0
                with torch.inference_mode():
                    side.ddp.module(batch)

    twins = Twins.of(world_size, optimizer)
    twins.train(loop, batches(rank, world_size, 8), prefetch=True)
    result = twins.gap(), delayed
    assert twins.ours.tables is not None
    twins.ours.tables.close()
    return result


@pytest.mark.parametrize("optimizer", ["sparse_adam", "rowwise_adamw"])
def test_evaluation_in_inference_mode(workers: WorkerPools, optimizer: str) -> None:
    for gap, delayed in workers(2).run(evaluate_in_inference_mode, optimizer):
        assert gap == 0.0 and delayed > 0


# Gradients that loops change ----------------------------------------------------------------------------------


def multiply(rank: int, world_size: int) -> float:
    """As trainers do that divide by the number of tokens after the backward; also of backwards under no_sync()."""

    def loop(side: Side, data: Iterator[Any]) -> None:
        side.zero_grad()
        for number, batch in enumerate(data):
            if number % 3 == 1:
                with side.ddp.no_sync():
                    side.ddp(batch).backward()
                    by(side, 2.0)
                continue
            side.ddp(batch).backward()
            by(side, 0.5)
            side.step()
            side.zero_grad()

    def by(side: Side, factor: float) -> None:
        for parameter in side.ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        if side.tables is not None:
            side.tables.multiply_gradients(factor)

    twins = Twins.of(world_size, "sgd")
    twins.train(loop, batches(rank, world_size, 9), prefetch=True)
    gap = twins.gap()
    assert twins.ours.tables is not None
    twins.ours.tables.close()
    return gap


def test_gradients_are_multiplied(workers: WorkerPools) -> None:
    assert workers(2).run(multiply) == [0.0, 0.0]
