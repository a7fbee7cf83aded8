"""Training with P workers in one process: real gradients, real exchanges, and the fabric's clock over their messages.

All workers have the same weights, so there is one model; each has its own batches, residual and memory. The messages of
a step are noted and sent again on the fabric for every network of interest: their bytes are multiplied by the ratio of
the paper's number of parameters to that of the small model, and nothing else changes.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset
from torchvision.models.vgg import cfgs, make_layers

from ddp_hooks.comm import Algorithm, AlphaBeta, Round, run_on_fabric
from ddp_hooks.sparse import Name, SparseSum, SparseVector, Sparsity
from ddp_hooks.sparse.codec import EntryCodec
from ddp_hooks.sparse.common import Exchange
from ddp_hooks.sparse.error_feedback import Collection
from ddp_hooks.sparse.spardl import SpAllGather, TopHController
from recipes.common.images import load_images
from recipes.common.texts import python_documentation

WIRE = EntryCodec("exact", torch.float32)  # four bytes of index and four of value: the paper's two words per entry
VOCABULARY, SENTENCE = 1000, 20  # words
VGG_LAYERS = {11: "A", 16: "D", 19: "E"}  # torchvision's names


@dataclass(frozen=True)
class Network:
    """Links of ``gbit_s`` in each direction, and seconds that a message takes beyond its bytes."""

    gbit_s: float
    alpha_s: float

    def __str__(self) -> str:
        return f"{self.gbit_s:g} Gbit/s, {1e6 * self.alpha_s:g} µs"

    def cost(self, scale: float = 1.0) -> AlphaBeta:
        """Of messages whose bytes count ``scale`` times."""
        return AlphaBeta(self.alpha_s, scale * 8 / (1e9 * self.gbit_s))


@dataclass(frozen=True)
class Method:
    """A sparse all-reduce; no name: the dense sum.

    Args:
        name: of the algorithm.
        density: k/n.
        teams, sag: of SparDL.
        collection: of residuals.
        adjusts: whether B-SAG's controller does; else it stays at its upper end, so that nothing is left out before.
    """

    name: Name | None = "spardl"
    density: float = 0.01
    teams: int = 1
    sag: SpAllGather = "r"
    collection: Collection = "global"
    adjusts: bool = True

    def __str__(self) -> str:
        names = {"topka": "TopkA", "topkdsa": "TopkDSA", "gtopk": "gTopk", "oktopk": "Ok-Topk", None: "dense"}
        if self.name != "spardl":
            return names[self.name]
        return "SparDL" if self.teams == 1 else f"{self.sag.upper()}-SAG, d = {self.teams}"

    @property
    def follows_data(self) -> bool:
        """Whether the lengths of messages depend on what the gradients are."""
        return self.name in ("topkdsa", "oktopk") or (self.name == "spardl" and self.teams > 1 and self.sag == "b")

    def sums(self, numel: int, workers: int) -> list[SparseSum]:
        """Every worker's part."""
        assert self.name is not None
        k = max(1, round(self.density * numel))
        sparsity = Sparsity(self.name, k, WIRE, self.teams, self.sag, collection=self.collection)
        return [SparseSum(sparsity, numel, rank, workers) for rank in range(workers)]


@dataclass
class WatchedController(TopHController):
    """B-SAG's controller, which remembers how many entries there were after gathering among teams."""

    adjusts: bool = True
    gathered: list[int] = field(default_factory=list)

    def observe(self, num_entries: int) -> None:
        self.gathered.append(num_entries)
        if self.adjusts:
            super().observe(num_entries)

    @staticmethod
    def instead_of(memory: TopHController, adjusts: bool) -> WatchedController:
        """The same controller, watched; not adjusting it sends all that the block keeps."""
        start = memory.h if adjusts else float(memory.target)
        return WatchedController(memory.target, memory.num_teams, start, memory.step, adjusts=adjusts)


@dataclass(frozen=True)
class Messages:
    """All rounds of one exchange, by rank: who sends how many bytes to whom, without what they say."""

    rounds: Sequence[Sequence[Round]]

    @staticmethod
    def like(rounds: Sequence[Sequence[Round]]) -> Messages:
        """Of the same lengths, all in one short memory that is zero."""
        longest = max((each.tensor.nbytes for rank in rounds for part in rank for each in part), default=0)
        zeros = torch.zeros(longest, dtype=torch.uint8)
        return Messages([
            [[type(each)(each.peer, zeros[: each.tensor.nbytes]) for each in part] for part in rank] for rank in rounds
        ])

    def seconds(self, cost: AlphaBeta) -> float:
        """The slowest rank's clock when the same messages are sent once more."""
        return max(traffic.clock_s for traffic in run_on_fabric([_again(rounds) for rounds in self.rounds], cost))

    def without_waiting_s(self, cost: AlphaBeta) -> float:
        """The mean worker's rounds, and the bytes that it receives, if none had to wait for one that has more to send.

        Table I counts like this.
        """
        traffic = run_on_fabric([_again(rounds) for rounds in self.rounds])
        seconds = (each.rounds * cost.alpha_s + each.received_bytes * cost.beta_s_per_byte for each in traffic)
        return sum(seconds) / len(traffic)


def _again(rounds: Iterable[Round]) -> Algorithm:
    yield from rounds


def exchange(sums: Sequence[SparseSum], residuals: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[
    SparseVector, Messages
]:
    """One all-reduce of all workers: the sum, which all have, and what was sent."""
    rounds: list[list[Round]] = [[] for _ in sums]
    results: dict[int, SparseVector] = {}

    def noted(rank: int, algorithm: Exchange) -> Algorithm:
        while True:
            try:
                each = next(algorithm)
            except StopIteration as end:
                results[rank] = end.value
                return
            rounds[rank].append(each)
            yield each

    parts = zip(sums, residuals, gradients, strict=True)
    run_on_fabric([noted(rank, part.run(residual, gradient)) for rank, (part, residual, gradient) in enumerate(parts)])
    for result in results.values():
        assert torch.equal(result.indices, results[0].indices), "replicas differ"
    return results[0], Messages.like(rounds)


def messages_of_noise(method: Method, workers: int, k: int, density: float = 0.1, shared: float = 0.0) -> Messages:
    """One exchange of ``k`` entries of normal noise, of which all workers have the part ``shared`` in common.

    What SparDL with one team or R-SAG, TopkA and gTopk send depends on ``k`` only, not on gradients.
    """
    generator = torch.Generator().manual_seed(0)
    numel = max(workers, round(k / density))
    common = shared**0.5 * torch.randn(numel, generator=generator)
    gradients = [common + (1 - shared) ** 0.5 * torch.randn(numel, generator=generator) for _ in range(workers)]
    sums = Method(method.name, k / numel, method.teams, method.sag).sums(numel, workers)
    return exchange(sums, [torch.zeros(numel) for _ in gradients], gradients)[1]


@dataclass(frozen=True)
class Task:
    """Something to learn.

    Args:
        name: of it.
        make: the model, from inputs to logits (…, classes).
        train, held_out: inputs and classes.
        batch: samples per worker and step.
        lr: the learning rate, which falls to 0 over the second half of the steps.
    """

    name: str
    make: Callable[[], nn.Module]
    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]
    batch: int
    lr: float

    def epoch(self, workers: int) -> int:
        """Steps in which as many samples are drawn as there are."""
        return -(-len(self.train[0]) // (self.batch * workers))


def vgg(depth: int, num_classes: int, divisor: int = 1) -> nn.Sequential:
    """A VGG with batch normalisation for images of 32 × 32 pixels, of which layers have a part of the channels."""
    layers: list[str | int] = [each if isinstance(each, str) else each // divisor for each in cfgs[VGG_LAYERS[depth]]]
    return nn.Sequential(make_layers(layers, batch_norm=True), nn.Flatten(), nn.Linear(512 // divisor, num_classes))


class LanguageModel(nn.Module):
    """Two layers of LSTM units between an embedding and a linear layer, in the proportions of LSTM-PTB."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.lstm = nn.LSTM(hidden, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0])


@cache
def digits(divisor: int) -> Task:
    """Handwritten digits, and VGG-11 with a part of its channels."""
    images = load_images(None, 32)
    train, held_out = _stacked(images.train), _stacked(images.held_out)
    return Task("VGG", lambda: vgg(11, images.num_classes, divisor), train, held_out, batch=8, lr=0.02)


def _stacked(part: Subset[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    images, classes = zip(*(part[index] for index in range(len(part))), strict=True)
    return torch.stack(images), torch.stack(classes)


@cache
def words(hidden: int) -> Task:
    """The next word of Python's documentation."""
    found = re.findall(r"\w+|[^\w\s]", "\n".join(python_documentation()).lower())
    common = {word: number for number, (word, _) in enumerate(Counter(found).most_common(VOCABULARY - 1), 1)}
    ids = torch.tensor([common.get(word, 0) for word in found])
    ids = ids[: len(ids) // (SENTENCE + 1) * (SENTENCE + 1)].view(-1, SENTENCE + 1)
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))]
    inputs, following, cut = ids[:, :-1], ids[:, 1:], len(ids) // 10
    held_out, train = (inputs[:cut], following[:cut]), (inputs[cut:], following[cut:])
    return Task("LSTM", lambda: LanguageModel(hidden), train, held_out, batch=5, lr=1.0)


@dataclass
class Run:
    """What one training has shown.

    Args:
        numel: of the small model.
        timed: the steps whose messages count for the mean time.
        losses: of all workers' batches, per step.
        gathered: entries after gathering among teams, all blocks together, per step; empty without B-SAG.
        filled: entries of the sum over k, per step.
        messages: per step; none of the dense sum.
        accuracy: on what was held out, in the end; 0 to 1.
    """

    numel: int
    timed: slice
    losses: list[float] = field(default_factory=list)
    gathered: list[int] = field(default_factory=list)
    filled: list[float] = field(default_factory=list)
    messages: list[Messages] = field(default_factory=list)
    accuracy: float = 0.0
    _means: dict[tuple[float, Network, bool], float] = field(default_factory=dict)

    def seconds(self, parameters: float, network: Network) -> list[float]:
        """Of the messages of every step, if the model had so many parameters."""
        cost = network.cost(parameters / self.numel)
        return [each.seconds(cost) for each in self.messages]

    def mean_s(self, parameters: float, network: Network, every: int = 1, waiting: bool = True) -> float:
        """Of every so many of the timed steps; without waiting, see :meth:`Messages.without_waiting_s`."""
        key = parameters, network, waiting
        if key not in self._means:
            cost = network.cost(parameters / self.numel)
            timed = self.messages[self.timed][::every]
            seconds = (each.seconds(cost) if waiting else each.without_waiting_s(cost) for each in timed)
            self._means[key] = statistics.fmean(seconds)
        return self._means[key]

    @property
    def final_loss(self) -> float:
        """Over the last tenth of the steps."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 10) :])


class Training:
    """All workers of one training.

    Args:
        task: what is learnt.
        method: how gradients are summed.
        workers: how many.
        steps: in all; the learning rate depends on it.
        seed: of weights and batches.
    """

    def __init__(self, task: Task, method: Method, workers: int, steps: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.task, self.workers, self.steps = task, workers, steps
        self.model = task.make()
        self.parameters = list(self.model.parameters())
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.numel = sum(self.sizes)
        self.sums = method.sums(self.numel, workers) if method.name is not None else []
        self.residuals = [torch.zeros(self.numel) for _ in self.sums]
        self._generator = torch.Generator().manual_seed(seed)
        for each in self.sums:
            if isinstance(each.memory, TopHController):
                each.memory = WatchedController.instead_of(each.memory, method.adjusts)
        # Controllers of the first team: one per block.
        first = self.sums[: workers // method.teams]
        self.controllers = [each.memory for each in first if isinstance(each.memory, WatchedController)]

    def step(self, number: int) -> tuple[float, int, Messages | None]:
        """One update: the loss, the entries of the sum, and the messages."""
        losses, gradients = zip(*(self._gradient() for _ in range(self.workers)), strict=True)
        messages = None
        if self.sums:
            total, messages = exchange(self.sums, self.residuals, gradients)
            update = torch.zeros(self.numel).index_copy_(0, total.indices, total.values)
            entries = len(total)
        else:
            update, entries = torch.stack(gradients).sum(0), self.numel
        lr = self.task.lr * min(1.0, 2 * (1 - number / self.steps))
        with torch.no_grad():
            for parameter, part in zip(self.parameters, update.split(self.sizes), strict=True):
                parameter.sub_(part.view_as(parameter), alpha=lr / self.workers)
        return sum(losses) / self.workers, entries, messages

    def _gradient(self) -> tuple[float, Tensor]:
        inputs, classes = self.task.train
        chosen = torch.randint(len(inputs), (self.task.batch,), generator=self._generator)
        loss = F.cross_entropy(self.model(inputs[chosen]).flatten(0, -2), classes[chosen].flatten())
        gradients = torch.autograd.grad(loss, self.parameters)
        return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])

    @torch.no_grad()
    def accuracy(self) -> float:
        """On what was held out, from 0 to 1."""
        inputs, classes = self.task.held_out
        self.model.eval()
        parts = zip(inputs.split(64), classes.split(64), strict=True)
        right = [self.model(part).argmax(-1) == target for part, target in parts]
        self.model.train()
        return float(torch.cat(right).double().mean())


def train(task: Task, method: Method, workers: int, steps: int, timed: slice = slice(None)) -> Run:
    """Train from the same weights, with the same batches, whatever the method."""
    training = Training(task, method, workers, steps)
    run = Run(training.numel, timed)
    k = max(1.0, method.density * training.numel)
    for number in range(steps):
        loss, entries, messages = training.step(number)
        run.losses.append(loss)
        run.filled.append(entries / k)
        if messages is not None:
            run.messages.append(messages)
    run.gathered += [sum(counts) for counts in zip(*(each.gathered for each in training.controllers), strict=True)]
    run.accuracy = training.accuracy()
    return run
