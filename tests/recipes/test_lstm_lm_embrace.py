"""The LSTM recipe: a sharded table and a sparse one under plain DDP take the same steps."""

from __future__ import annotations

import json
import math
import random
from itertools import islice
from pathlib import Path

import pytest
import torch

from recipes.common import words as words_of_text
from recipes.common.batches import endless
from recipes.complete import lstm_lm_embrace as recipe
from tests.support.recipes.launched import torchrun
from tests.support.workers import WorkerPools

TINY = ["--steps=40", "--batch-size=4", "--sequence-length=16", "--embedding=20", "--hidden=32"]
LR = {"sgd": "--lr=1", "adam": "--lr=0.01"}


# Text ---------------------------------------------------------------------------------------------------


def test_words_and_punctuation() -> None:
    words = words_of_text.split_words("Don't  use `x_1 += 2`.\n")
    assert " ".join(words) == "Don ' t use ` x_1 + = 2 ` ."


def test_vocabulary_goes_from_frequent_to_rare() -> None:
    words = list("dbbcaaac")
    assert words_of_text.make_vocabulary(words, 10) == {"<unk>": 0, "a": 1, "b": 2, "c": 3, "d": 4}
    assert words_of_text.make_vocabulary(reversed(words), 3) == {"<unk>": 0, "a": 1, "b": 2}


def test_every_word_is_predicted_once() -> None:
    words = [str(number) for number in range(25)]
    vocabulary = words_of_text.make_vocabulary(words, 100)
    blocks = words_of_text.cut_into_blocks(words, vocabulary, 4)
    ids = [vocabulary[word] for word in words]
    assert blocks[:, :-1].flatten().tolist() == ids[:24]
    assert blocks[:, 1:].flatten().tolist() == ids[1:]
    assert words_of_text.cut_into_blocks(["never", "seen"], vocabulary, 1).tolist() == [[0, 0]]
    with pytest.raises(ValueError, match="more than --sequence-length = 4 words, found 3"):
        words_of_text.cut_into_blocks(words[:3], vocabulary, 4)


def test_a_tenth_is_held_out() -> None:
    training, held_out = recipe.hold_out(torch.arange(21)[:, None])
    assert held_out.flatten().tolist() == [0, 10, 20]
    assert sorted([*training.flatten().tolist(), 0, 10, 20]) == list(range(21))


# Batches ------------------------------------------------------------------------------------------------


def test_ranks_share_the_blocks_and_epochs_reorder_them() -> None:
    blocks = torch.arange(48)[:, None] + torch.arange(3)
    epochs: list[list[int]] = [[], []]
    for rank in range(2):
        loader = recipe.make_loader(blocks, 8, seed=0, rank=rank, world_size=2)
        for number, (words, targets) in enumerate(islice(endless(loader), 6)):
            assert words.shape == targets.shape == (8, 2) and torch.equal(words + 1, targets)
            epochs[number // 3] += words[:, 0].tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(48))
    assert epochs[0] != epochs[1]


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch size \* ranks = 8 \* 2 blocks of text to train on, found 15"):
        recipe.make_loader(torch.zeros(15, 3), 8, seed=0, rank=0, world_size=2)


# Model --------------------------------------------------------------------------------------------------


def test_every_parameter_has_a_gradient_also_without_rare_words() -> None:
    """Otherwise DDP fails, in the first batch that has none."""
    model = recipe.LanguageModel(80, 8, 16)
    model(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_arguments() -> None:
    assert recipe.parse_arguments([]).lr == recipe.LEARNING_RATES["adam"]
    assert recipe.parse_arguments(["--optimizer=sgd"]).lr == recipe.LEARNING_RATES["sgd"]
    assert recipe.parse_arguments(["--optimizer=sgd", "--lr=0.5"]).lr == 0.5
    for wrong in ("--vocabulary=7", "--hidden=15", "--steps=0", "--tables=whole", "--compare=earlier.json"):
        with pytest.raises(SystemExit):
            recipe.parse_arguments([wrong])


# Whole runs ---------------------------------------------------------------------------------------------


def sentences() -> list[str]:
    """The same text with every Python: a few words are frequent, many rare, and some pairs usual."""
    chance = random.Random(0)
    words = [f"w{number}" for number in range(2000)]
    weights = [1.0 / (number + 1) for number in range(len(words))]
    usual = {word: chance.choices(words, weights, k=5) for word in words}
    text = ["w0"]
    while len(text) < 60_000:
        text.append(chance.choice(usual[text[-1]]) if chance.random() < 0.7 else chance.choices(words, weights)[0])
    return [" ".join(text)]


def train(rank: int, world_size: int, arguments: list[str]) -> recipe.Result:
    return recipe.train(recipe.parse_arguments([*TINY, *arguments]), sentences())


@pytest.mark.slow
@pytest.mark.quick("adam")
@pytest.mark.parametrize("optimizer", recipe.OPTIMIZERS)
def test_both_kinds_of_table_take_the_same_steps(workers: WorkerPools, optimizer: str) -> None:
    sharded, whole = (
        workers(2).run(train, [f"--tables={tables}", f"--optimizer={optimizer}", LR[optimizer]])
        for tables in ("embrace", "ddp")
    )
    for results in (sharded, whole):  # every rank reports the mean over ranks
        assert results[0].losses == results[1].losses
        assert results[0].validation_loss == results[1].validation_loss
    assert sharded[0].losses == pytest.approx(whole[0].losses, rel=1e-5)
    assert sharded[0].validation_loss == pytest.approx(whole[0].validation_loss, rel=1e-5)
    assert sharded[0].num_dense_parameters == whole[0].num_dense_parameters

    losses = whole[0].losses
    assert sum(losses[-5:]) / 5 < losses[0] - math.log(2), "perplexity has fallen by half at least"
    assert whole[0].validation_loss < losses[0] - math.log(2)
    for result in sharded:
        *before, last = result.stats
        assert len(result.stats) == len(losses)
        assert all(step.num_prior_rows > 0 and step.num_delayed_rows > 0 for step in before)
        assert all(step.num_rows < step.num_ids == 4 * 16 for step in result.stats)
        assert last.num_delayed_rows == 0 and last.delayed_bytes > 0  # nothing comes next; those of the step before
    assert whole[0].stats == []


def test_one_process_writes_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["--steps=3", "--vocabulary=500", "--log-every=1", *TINY[1:]]
    recipe.main([*run, "--tables=ddp", "--output", str(tmp_path / "ddp.json")])
    output = tmp_path / "new" / "embrace.json"
    recipe.main([*run, "--output", str(output), "--compare", str(tmp_path / "ddp.json")])
    printed = capsys.readouterr().out
    assert "step     3   perplexity on rank 0" in printed
    assert "500 × 20" in printed and "delayed ones" in printed
    ddp, embrace = (json.loads(path.read_text()) for path in (tmp_path / "ddp.json", output))
    assert embrace["perplexities"] == pytest.approx(ddp["perplexities"], rel=1e-4)
    assert embrace["validation_perplexity"] == pytest.approx(ddp["validation_perplexity"], rel=1e-4)
    assert embrace["stats"]["num_delayed_rows"] > 0 and ddp["stats"] is None
    assert output.with_suffix(".png").stat().st_size > 1000


@pytest.mark.slow
def test_torchrun(tmp_path: Path) -> None:
    """As a user starts it."""
    given = [*TINY, "--steps=20"]
    torchrun("recipes/complete/lstm_lm_embrace.py", *given, "--tables=embrace", f"--output={tmp_path / 'embrace.json'}")
    torchrun("recipes/complete/lstm_lm_embrace.py", *given, "--tables=ddp", f"--output={tmp_path / 'ddp.json'}")
    ddp, embrace = (json.loads((tmp_path / f"{tables}.json").read_text()) for tables in ("ddp", "embrace"))
    assert embrace["settings"]["ranks"] == 2
    assert embrace["losses"] == pytest.approx(ddp["losses"], rel=1e-5)
    assert embrace["validation_perplexity"] == pytest.approx(ddp["validation_perplexity"], rel=1e-4)
