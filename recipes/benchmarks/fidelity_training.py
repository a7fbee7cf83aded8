"""Training of the fidelity benchmark: all workers in one process, with one model.

Replicas have the same weights, so one model computes every worker's gradient in turn. Batch normalisation is as under
DDP: each worker's batch has its own statistics, and the running ones are the first worker's, which DDP broadcasts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torchvision.models.resnet import BasicBlock
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from recipes.benchmarks.fidelity import Trial
from recipes.benchmarks.fidelity_formats import DENSE, EXACT, FORMATS, GATHERS_DIFFERENCES, Differences, Setup
from recipes.common import byte_text
from recipes.common.byte_text import NUM_BYTES
from recipes.common.images import load_images
from recipes.common.pages import now
from recipes.common.pig_latin import docstrings
from recipes.common.schedules import warmed_cosine
from recipes.common.texts import python_documentation
from recipes.common.tokens import SPECIAL_TOKENS, cut_into_blocks, hold_out, shared_tokenizer

MASK = list(SPECIAL_TOKENS).index("mask_token")  # also a byte that no text has
IGNORED = -100  # label of a token that is not to be predicted


@dataclass(frozen=True)
class Task:
    """Something to learn; its numbers are those of one worker.

    Args:
        kind: of the model.
        width: of its layers; for a ResNet, channels of the first ones.
        layers: of the transformer or LSTM.
        batch: sequences or images per step.
        length: tokens of a sequence, or pixels of an image's side.
        lr: the largest learning rate.
        vocabulary: tokens; 256: bytes.
        masked: part of the tokens that BERT is to predict.
        noise: standard deviation of what is added to images, whose range is -1 to 1.
        validation: sequences, at most, or images, each as often as it takes, with other noise.
    """

    kind: Literal["gpt2", "bert", "llama", "lstm", "resnet"]
    width: int
    layers: int
    batch: int
    length: int
    lr: float
    vocabulary: int = 1000
    masked: float = 0.0
    noise: float = 1.0
    validation: int = 256

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        """Return AdamW for a transformer, SGD with momentum for the others."""
        if self.kind in ("lstm", "resnet"):
            return torch.optim.SGD(parameters, self.lr, momentum=0.9)
        return torch.optim.AdamW(parameters, self.lr, weight_decay=0.01, fused=True)


TASKS = {
    "GPT-2": Task("gpt2", 256, 4, 1, 64, 3e-4),
    # Bytes, in short sequences: of words it learns no more than their frequencies in so few steps.
    "BERT": Task("bert", 256, 4, 4, 16, 3e-4, vocabulary=NUM_BYTES, masked=0.25, validation=1024),
    "Llama": Task("llama", 256, 4, 1, 64, 3e-4),
    "LSTM": Task("lstm", 256, 2, 2, 32, 0.3, validation=512),
    "ResNet": Task("resnet", 32, 3, 8, 16, 0.01, noise=2.0, validation=1436),
    "tiny": Task("resnet", 4, 1, 4, 8, 0.05, validation=32),
}


def train(trial: Trial) -> dict[str, Any]:
    """Train once; return the trial's fields, the validation loss, the training losses and the seconds.

    "exact" is trained under bfloat16 autocast, where it sends 16 bits, and its means are compared with plain DDP's.
    """
    torch.set_num_threads(1)
    begin_s = time.perf_counter()
    task = TASKS[trial.task]
    torch.manual_seed(trial.seed)
    model = make_model(task)
    parameters = list(reversed(list(model.parameters())))  # as DDP's bucket has them
    setup = Setup([parameter.shape for parameter in parameters], trial.workers, trial.steps)
    mean_of, dense = FORMATS[trial.format](setup), FORMATS[DENSE](setup)
    compares = trial.format == EXACT
    differences = Differences(trial.format, setup) if trial.format in GATHERS_DIFFERENCES else None
    # The model reads what all workers have of the parameters, and owners update masters.
    masters = parameters if differences is None else [nn.Parameter(each.detach().clone()) for each in parameters]
    optimizer = task.optimizer(masters)
    schedule = LambdaLR(optimizer, warmed_cosine(max(1, trial.steps // 10), trial.steps))
    batches = [draw(task, 1000 * trial.seed + rank) for rank in range(trial.workers)]
    losses, differs_at = [], None
    for step in range(trial.steps):
        loss, gradients = gradients_of(model, parameters, [next(each) for each in batches], autocast=compares)
        expected = dense([gradient.clone() for gradient in gradients]) if compares else None
        mean = mean_of(gradients)
        if expected is not None and differs_at is None and not torch.equal(mean, expected):
            differs_at = step
        for master, part in zip(masters, mean.split(setup.numels), strict=True):
            master.grad = part.view_as(master)
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        schedule.step()
        if differences is not None:
            shown, precise = (nn.utils.parameters_to_vector(each).detach() for each in (parameters, masters))
            differences.gather(shown, precise)
            nn.utils.vector_to_parameters(shown, parameters)
        losses.append(loss)
    found = {"loss": validate(model, task), "training_losses": losses, "differs_at": differs_at}
    return {**asdict(trial), **found, "settings": repr(task), "date": now(), "seconds": time.perf_counter() - begin_s}


def gradients_of(
    model: nn.Module, parameters: list[nn.Parameter], batches: list[tuple[Tensor, ...]], autocast: bool
) -> tuple[float, list[Tensor]]:
    """Return the mean loss, and every worker's gradient, (numel,); buffers become the first worker's."""
    buffers = list(model.buffers())
    losses, gradients = [], []
    first: list[Tensor] = []
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(*batch)
        parts = torch.autograd.grad(loss, parameters)
        gradients.append(torch.cat([part.flatten() for part in parts]))
        losses.append(loss.item())
        first = first or [buffer.clone() for buffer in buffers]
    for buffer, value in zip(buffers, first, strict=True):
        buffer.copy_(value)
    return math.fsum(losses) / len(losses), gradients


@torch.no_grad()
def validate(model: nn.Module, task: Task) -> float:
    """Return the mean loss of what was held out, in evaluation mode; it leaves this mode on."""
    model.eval()
    held_out = validation_set(task)
    losses = [model(*part).item() * len(part[0]) for part in zip(*(each.split(32) for each in held_out), strict=True)]
    return math.fsum(losses) / len(held_out[0])


# -- data --------------------------------------------------------------------------------------------------------------


def draw(task: Task, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield one worker's batches without end."""
    generator = torch.Generator().manual_seed(seed)
    samples = training_set(task)
    while True:
        chosen = torch.randint(len(samples[0]), (task.batch,), generator=generator)
        yield prepared(task, tuple(each[chosen] for each in samples), generator)


@cache
def validation_set(task: Task) -> tuple[Tensor, ...]:
    """Return samples that nothing is trained on, with their masks or noise; the same for all formats and seeds."""
    samples = _data(task)[1]
    again = -(-task.validation // len(samples[0])) if task.kind == "resnet" else 1
    chosen = tuple(each.repeat(again, *[1] * (each.dim() - 1))[: task.validation] for each in samples)
    return prepared(task, chosen, torch.Generator().manual_seed(0))


def training_set(task: Task) -> tuple[Tensor, ...]:
    return _data(task)[0]


def prepared(task: Task, samples: tuple[Tensor, ...], generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return the arguments of the model: noise is added to images, and BERT's tokens are masked."""
    if task.kind == "resnet":
        images, classes = samples
        return images + task.noise * torch.randn(images.shape, generator=generator), classes
    (ids,) = samples
    if task.kind != "bert":
        return ids, ids
    chosen = torch.rand(ids.shape, generator=generator).argsort(1)[:, : max(1, round(task.masked * task.length))]
    labels = torch.full_like(ids, IGNORED).scatter_(1, chosen, ids.gather(1, chosen))
    return ids.scatter(1, chosen, MASK), labels


@cache
def _data(task: Task) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return samples to train on and samples held out."""
    if task.kind == "resnet":
        images = load_images(None, task.length)
        train, held_out = ([part[index] for index in range(len(part))] for part in (images.train, images.held_out))
        return _stacked(train), _stacked(held_out)
    texts = [*python_documentation(), *docstrings()]
    if task.vocabulary == NUM_BYTES:
        blocks = byte_text.cut_into_blocks(texts, task.length)
    else:
        blocks = cut_into_blocks(texts, shared_tokenizer(texts, task.vocabulary), task.length, marked=False)
    training, held_out_blocks = hold_out(blocks)
    # In any order: the second half of the text are docstrings.
    order = torch.randperm(len(held_out_blocks), generator=torch.Generator().manual_seed(0))
    return (training,), (held_out_blocks[order],)


def _stacked(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
    images, classes = zip(*pairs, strict=True)
    return torch.stack(images), torch.stack(classes)


# -- models ------------------------------------------------------------------------------------------------------------


def make_model(task: Task) -> nn.Module:
    """Return a model whose forward returns the mean loss of a batch; without dropout."""
    if task.kind == "resnet":
        return ResNet(task.width, task.layers)
    if task.kind == "lstm":
        return Lstm(task)
    return Transformer(task)


class Transformer(nn.Module):
    """A GPT-2, BERT or Llama of transformers."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        heads = max(1, task.width // 64)
        sizes: dict[str, Any] = {"hidden_size": task.width, "num_hidden_layers": task.layers}
        sizes |= {"num_attention_heads": heads, "vocab_size": task.vocabulary, "max_position_embeddings": task.length}
        if task.kind == "gpt2":
            off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            off |= {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
            self.model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **off))
        elif task.kind == "bert":
            off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            self.model = BertForMaskedLM(BertConfig(**sizes, intermediate_size=4 * task.width, **off))
            # Random positions do not say which tokens are neighbours, and training is short.
            positions = self.model.bert.embeddings.position_embeddings.weight
            with torch.no_grad():
                positions.copy_(sinusoids(*positions.shape) * math.sqrt(2) * self.model.config.initializer_range)
        else:
            width = task.width * 8 // 3 // 16 * 16  # of three matrices, as many elements as two of four times the width
            off = {"use_cache": False, "tie_word_embeddings": True}
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=width, **off))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss


def sinusoids(length: int, width: int) -> Tensor:
    """Return positional encodings, (length, width), of Vaswani et al., 2017, section 3.5, the sines first."""
    angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(width // 2) / (width // 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Lstm(nn.Module):
    """A language model of LSTM layers between an embedding and a linear layer."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.embedding = nn.Embedding(task.vocabulary, task.width)
        self.lstm = nn.LSTM(task.width, task.width, task.layers, batch_first=True)
        self.head = nn.Linear(task.width, task.vocabulary)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.lstm(self.embedding(ids[:, :-1]))[0])
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


class ResNet(nn.Module):
    """A ResNet for small images: one block per stage, each stage with half the pixels and twice the channels."""

    def __init__(self, width: int, stages: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks = [BasicBlock(width, width)]
        for _ in range(1, stages):
            shortcut = nn.Sequential(nn.Conv2d(width, 2 * width, 1, 2, bias=False), nn.BatchNorm2d(2 * width))
            blocks.append(BasicBlock(width, 2 * width, 2, shortcut))
            width *= 2
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stages(self.first(images)).mean((2, 3))), classes)
