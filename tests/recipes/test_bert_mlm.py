"""The BERT recipe: the same batches and losses in every run, whatever the hook."""

from __future__ import annotations

import re
from itertools import islice

import pytest
import torch
from torch import Tensor
from transformers import BertForMaskedLM, PreTrainedTokenizerFast

from recipes.common.batches import endless
from recipes.common.texts import python_documentation
from recipes.common.tokens import cut_into_blocks, shared_tokenizer
from recipes.complete import bert_mlm
from tests.support.launcher import launch
from tests.support.recipes.launched import torchrun
from tests.support.workers import WorkerPools

TINY = [
    *["--steps=20", "--batch-size=4", "--lr=0.01"],
    *["--block-length=32", "--vocab-size=500", "--hidden-size=32", "--layers=1", "--heads=2"],
]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return python_documentation()


@pytest.fixture(scope="module")
def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    return shared_tokenizer(texts, vocab_size=1000)


@pytest.fixture(scope="module")
def blocks(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    return cut_into_blocks(texts, tokenizer, block_length=32)


# Batches ------------------------------------------------------------------------------------------------


def first_batches(
    blocks: Tensor, tokenizer: PreTrainedTokenizerFast, count: int, *, rank: int, seed: int = 0
) -> list[dict[str, Tensor]]:
    loader = bert_mlm.make_loader(blocks, tokenizer, batch_size=8, seed=seed, rank=rank, world_size=2)
    return list(islice(endless(loader), count))


def original(batch: dict[str, Tensor]) -> Tensor:
    """The tokens before some were hidden."""
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


def test_batches_hide_a_part_of_the_tokens(blocks: Tensor, tokenizer: PreTrainedTokenizerFast) -> None:
    batches = first_batches(blocks, tokenizer, 40, rank=0)
    hidden = torch.cat([batch["labels"] != -100 for batch in batches])
    assert 0.11 < hidden[:, 1:-1].float().mean() < 0.19
    assert not hidden[:, [0, -1]].any()  # never [CLS] and [SEP]
    masked = torch.cat([batch["input_ids"] == tokenizer.mask_token_id for batch in batches])
    assert 0.7 < masked.sum() / hidden.sum() < 0.9
    assert not (masked & ~hidden).any()


def test_batches_are_the_same_in_every_run(blocks: Tensor, tokenizer: PreTrainedTokenizerFast) -> None:
    runs = [first_batches(blocks, tokenizer, 4, rank=1) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first["input_ids"], second["input_ids"])
        assert torch.equal(first["labels"], second["labels"])
    other_seed = first_batches(blocks, tokenizer, 4, rank=1, seed=1)
    assert not torch.equal(original(runs[0][0]), original(other_seed[0]))


def test_ranks_share_the_blocks_and_epochs_reorder_them(tokenizer: PreTrainedTokenizerFast) -> None:
    words = torch.arange(10, 58)
    blocks = words.repeat(3, 1).T  # 48 blocks, three batches of 8 for each of two ranks
    shares = []
    for rank in range(2):
        batches = first_batches(blocks, tokenizer, 6, rank=rank)
        shares.append(torch.cat([original(batch)[:, 0] for batch in batches]).view(2, 24))
    epochs = torch.cat(shares, dim=1)  # (epoch, block), one column per block of either rank
    assert torch.equal(epochs.sort(dim=1).values, words.expand(2, -1))
    assert not torch.equal(epochs[0], epochs[1])


def test_too_little_text_is_refused(blocks: Tensor, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match=r"batch size \* ranks = 8 \* 2 blocks of text, found 15"):
        first_batches(blocks[:15], tokenizer, 1, rank=0)


# Model --------------------------------------------------------------------------------------------------


def test_model_is_tied_and_every_parameter_is_in_one_group(tokenizer: PreTrainedTokenizerFast) -> None:
    model = BertForMaskedLM(bert_mlm.bert_config(bert_mlm.parse_arguments(TINY), tokenizer))
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight

    decayed, plain = bert_mlm.parameter_groups(model, weight_decay=0.01)
    assert decayed["weight_decay"] == 0.01 and plain["weight_decay"] == 0.0
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)] for p in [*decayed["params"], *plain["params"]]} == set(names.values())
    assert len(decayed["params"]) + len(plain["params"]) == len(names)
    assert all(names[id(p)].endswith("bias") or "LayerNorm" in names[id(p)] for p in plain["params"])


# Whole runs ---------------------------------------------------------------------------------------------


def train(rank: int, world_size: int, hook: str) -> bert_mlm.Result:
    args = bert_mlm.parse_arguments([*TINY, "--hook", hook])
    return bert_mlm.train(args, python_documentation(), torch.device("cpu"))


@pytest.mark.slow
def test_three_ranks_end_with_the_same_loss_with_and_without_dear(workers: WorkerPools) -> None:
    without = [result.final_loss for result in workers(3).run(train, "none")]
    with_dear = [result.final_loss for result in workers(3).run(train, "dear")]
    assert len(set(without)) == len(set(with_dear)) == 1  # every rank reports the mean over ranks
    assert with_dear[0] == pytest.approx(without[0], abs=1e-4)
    assert without[0] < 5.8  # log(500) = 6.2 is what guessing among 500 tokens costs: it learned


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_ends_with_the_same_loss_with_and_without_dear() -> None:
    arguments = *TINY, "--hook"
    dear = torchrun("recipes/complete/bert_mlm.py", *arguments, "dear")
    none = launch("recipes/complete/bert_mlm.py", [*arguments, "none"])
    assert final_loss(dear) == pytest.approx(final_loss(none), abs=1e-4)


def final_loss(printed: str) -> float:
    """The loss that the recipe reports."""
    match = re.search(r"final loss\s+(\S+)", printed)
    assert match, printed
    return float(match[1])


def test_one_process_needs_no_launcher(capsys: pytest.CaptureFixture[str]) -> None:
    bert_mlm.main([*TINY, "--steps", "2", "--log-every", "1"])
    printed = capsys.readouterr().out
    assert "step     2   loss on rank 0" in printed
    assert re.search(r"ranks +1 on cpu", printed)
    assert re.search(r"final loss +\d", printed)
