"""Recipes for the Trainer, started as users start them, and the page that is made of their results.

Prevents: recipes that train without the hook they name, in one process, or on other data than with plain DDP; held-out
losses that differ because other tokens were hidden; runs that resume and take other steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, EvalPrediction

from ddp_hooks import DearConfig, TopKConfig
from ddp_hooks.integrations import Tables
from recipes.common import results
from recipes.common.pig_latin import pig_latin, sentences
from recipes.common.record import Record, all_reduce_mb, command_of, mean_stats, report
from recipes.common.texts import python_documentation
from recipes.common.tokens import Blocks, cut_into_blocks, shared_tokenizer
from recipes.complete import bert_mlm_trainer, gpt2_clm_trainer, t5_translation, trainer_base
from tests.support.launcher import launch
from tests.support.recipes.launched import torchrun

TINY = [
    *["--steps=4", "--log-every=1", "--batch-size=4", "--block-length=16"],
    *["--vocab-size=600", "--hidden-size=16", "--layers=1", "--heads=2"],
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of the documentation, which is read faster than all of it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(python_documentation()[:12]), encoding="utf-8")
    return path


def trained(recipe: str, hook: str, output: Path, *arguments: str, by_torchrun: bool = False) -> Record:
    """What a recipe has recorded that trained on two ranks, started by torchrun itself or as torchrun would."""
    given = [*TINY, "--hook", hook, "--output", str(output), *arguments]
    if by_torchrun:
        torchrun(f"recipes/complete/{recipe}.py", *given)
    else:
        launch(f"recipes/complete/{recipe}.py", given)
    (path,) = output.glob(f"{recipe}_{hook}*.json")
    record = Record.load(path)
    assert record.num_workers == 2 and record.command.startswith("torchrun --nproc-per-node 2 ")
    assert [step for step, _ in record.losses] == list(range(record.steps - len(record.losses) + 1, record.steps + 1))
    assert record.sent_mb_per_step is not None and record.sent_mb_per_step > 0
    assert (record.stall_s_per_step is None) == (hook == "none")
    return record


def losses_of(record: Record) -> list[float]:
    """Of training, and on what was held out."""
    return [*(loss for _, loss in record.losses), record.held_out["loss"]]


# Whole runs ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gpt2_trains_alike_with_and_without_dear(tmp_path: Path, text: Path) -> None:
    dear = trained("gpt2_clm_trainer", "dear", tmp_path, "--text", str(text), by_torchrun=True)
    none = trained("gpt2_clm_trainer", "none", tmp_path, "--text", str(text))
    assert dear.steps == none.steps == 4
    assert losses_of(dear) == pytest.approx(losses_of(none), rel=1e-5)
    assert none.losses[0][1] == pytest.approx(np.log(600), rel=0.1), "guessing: it is not multiplied by anything"
    assert dear.sent_mb_per_step == pytest.approx(none.sent_mb_per_step, rel=0.1)


def test_bert_with_spardl(tmp_path: Path, text: Path) -> None:
    record = trained("bert_mlm_trainer", "spardl", tmp_path, "--text", str(text))
    assert record.losses[0][1] == pytest.approx(np.log(600), rel=0.1), "guessing: it is not multiplied by anything"


@pytest.mark.slow
def test_t5_with_dear_and_tables(tmp_path: Path) -> None:
    record = trained("t5_translation", "dear+tables", tmp_path)
    assert set(record.held_out) == {"loss", "token accuracy"}


@pytest.mark.slow
def test_gpt2_with_topk(tmp_path: Path, text: Path) -> None:
    record = trained("gpt2_clm_trainer", "topk", tmp_path, "--text", str(text))
    assert record.sent_mb_per_step is not None
    assert record.sent_mb_per_step < 0.3 * all_reduce_mb([torch.empty(13_000, requires_grad=True)], 2)


@pytest.mark.slow
def test_gpt2_is_tuned(tmp_path: Path, text: Path) -> None:
    record = trained("gpt2_clm_trainer", "dear", tmp_path, "--text", str(text), "--tune", "--steps=12")
    assert record.hook == "dear-tuned" and record.steps == 12


@pytest.mark.slow
def test_bert_trains_alike_with_and_without_dear(tmp_path: Path, text: Path) -> None:
    dear, none = (trained("bert_mlm_trainer", hook, tmp_path, "--text", str(text)) for hook in ("dear", "none"))
    assert losses_of(dear) == pytest.approx(losses_of(none), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_t5_trains_alike_with_tables_whatever_carries_the_rest(tmp_path: Path) -> None:
    records = {hook: trained("t5_translation", hook, tmp_path / hook) for hook in ("tables", "dear+tables", "none")}
    assert losses_of(records["dear+tables"]) == pytest.approx(losses_of(records["tables"]), rel=1e-4)
    assert records["none"].losses[0] == pytest.approx(records["tables"].losses[0], rel=1e-6), "the same model and data"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gpt2_clm_trainer", "bert_mlm_trainer", "t5_translation"])
def test_one_process_needs_no_launcher(recipe: str, tmp_path: Path) -> None:
    launch(f"recipes/complete/{recipe}.py", [*TINY, "--output", str(tmp_path)], num_processes=0)
    (path,) = tmp_path.glob("*.json")
    assert Record.load(path).num_workers == 1


# What they are made of ----------------------------------------------------------------------------------


MAINS: dict[str, Callable[[list[str]], argparse.Namespace]] = {
    "gpt2": gpt2_clm_trainer.parse_arguments,
    "bert": bert_mlm_trainer.parse_arguments,
    "t5": t5_translation.parse_arguments,
}


@pytest.mark.parametrize(
    ("recipe", "arguments", "complaint"),
    [
        ("gpt2", ["--tune", "--hook=none"], "give --hook dear or topk"),
        ("gpt2", ["--heads=3"], "must be a multiple of --heads, got 256 and 3"),
        ("bert", ["--block-length=2"], "must be at least 3, got 2"),
        ("bert", ["--density=0"], r"must be in (0, 1], got 0.0"),
        ("t5", ["--text=novel.txt"], "--text has no translations"),
    ],
)
def test_arguments_that_cannot_work(
    recipe: str, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        MAINS[recipe](arguments)
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_hooks_are_those_that_are_asked_for() -> None:
    def hook_of(module: Any, *arguments: str) -> Any:
        return module.hook_of(module.parse_arguments(list(arguments)))

    for module in (gpt2_clm_trainer, bert_mlm_trainer, t5_translation):
        assert hook_of(module, "--hook=none") is None
    for module in (gpt2_clm_trainer, bert_mlm_trainer):
        assert hook_of(module, "--hook=dear") == DearConfig()
    tuned = hook_of(gpt2_clm_trainer, "--tune")
    assert isinstance(tuned, DearConfig) and tuned.tuner is not None
    sparse = [hook_of(gpt2_clm_trainer, "--hook=topk"), hook_of(bert_mlm_trainer, "--hook=spardl")]
    assert all(isinstance(hook, TopKConfig) and hook.density == 0.05 for hook in sparse)
    assert isinstance(hook_of(t5_translation, "--hook=tables"), Tables)
    dear, tables = hook_of(t5_translation, "--hook=dear+tables")
    assert isinstance(dear, DearConfig) and isinstance(tables, Tables)


def test_a_model_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"cannot load .* with AutoModelForSeq2SeqLM"):
        trainer_base.from_hub(AutoModelForSeq2SeqLM, str(tmp_path))


def test_measures_are_what_says_how_good_a_model_is() -> None:
    times = {"eval_runtime": 9.0, "eval_steps_per_second": 3, "epoch": 1}
    evaluated = {"eval_loss": 2.0, "eval_token_accuracy": 0.5, **times}
    assert trainer_base.measures_of(evaluated) == {"loss": 2.0, "token accuracy": 0.5}


def test_every_token_is_to_be_predicted() -> None:
    batch = gpt2_clm_trainer.own_labels([{"input_ids": torch.arange(3)}, {"input_ids": torch.arange(3, 6)}])
    assert batch["input_ids"].tolist() == batch["labels"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_held_out_tokens_are_hidden_once(text: Path) -> None:
    texts = [text.read_text(encoding="utf-8")]
    tokenizer = shared_tokenizer(texts, 600)
    blocks = Blocks(cut_into_blocks(texts, tokenizer, 16)[:40])
    first, second = (bert_mlm_trainer.hide_once(blocks, bert_mlm_trainer.hiding_of(tokenizer, 0)) for _ in range(2))
    collate = bert_mlm_trainer.Collate(bert_mlm_trainer.hiding_of(tokenizer, 1))
    batches = [collate([held_out[index] for index in range(40)]) for held_out in (first, first, second)]
    assert all(torch.equal(batch["input_ids"], batches[0]["input_ids"]) for batch in batches)
    hidden = batches[0]["labels"] != -100
    assert 0.05 < hidden.float().mean() < 0.25
    anew = [collate([blocks[index] for index in range(40)])["labels"] for _ in range(2)]
    assert not torch.equal(anew[0], anew[1])


# Translations -------------------------------------------------------------------------------------------


def test_pig_latin() -> None:
    sentence = "the string is quickly yielded by an apple , square rhythm ."
    assert pig_latin(sentence) == "ethay ingstray isway icklyquay ieldedyay ybay anway appleway , aresquay ythmrhay ."


def test_sentences_are_prose() -> None:
    code = "See x[1:2]**3 << y_4 for (a, b) in {5} here."
    text = f"It  returns\nthe length. {code} Short.\n\nA new paragraph has words: Yes."
    assert list(sentences([text])) == ["it returns the length .", "a new paragraph has words :"]


def test_pairs_end_and_are_cut(text: Path) -> None:
    pairs = [("the list of objects", "ethay istlay ofway objectsway"), ("an object", "anway objectway")]
    tokenizer = shared_tokenizer([" ".join(pair) for pair in pairs], 100, eos_token="[SEP]")
    encoded = t5_translation.encode(pairs, tokenizer, max_length=3)
    assert len(encoded) == 2 and all(len(ids) <= 3 and ids[-1] == tokenizer.eos_token_id for ids in encoded.targets)
    assert len(encoded[0]["input_ids"]) == 3


def test_t5_has_an_output_layer_of_its_own() -> None:
    args = t5_translation.parse_arguments(["--hidden-size=16", "--layers=1"])
    tokenizer = shared_tokenizer(["some text"], 40, eos_token="[SEP]")
    model = AutoModelForSeq2SeqLM.from_config(t5_translation.t5_config(args, tokenizer))
    assert model.lm_head.weight is model.shared.weight
    t5_translation.give_output_layer_its_own_weight(model)
    assert model.lm_head.weight is not model.shared.weight and torch.equal(model.lm_head.weight, model.shared.weight)
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight


def test_accuracy_leaves_padding_out() -> None:
    logits = torch.eye(4)[torch.tensor([[1, 2, 3, 0]])]
    labels = torch.tensor([[1, 2, 0, -100]])
    found = t5_translation.most_likely((logits, logits), labels)
    assert found.tolist() == [[1, 2, 3, 0]]
    accuracy = t5_translation.token_accuracy(EvalPrediction(found.numpy(), labels.numpy()))
    assert accuracy == {"token_accuracy": pytest.approx(2 / 3)}


def test_a_language_that_a_dataset_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"de": "ja", "en": "yes"}]
    monkeypatch.setattr(t5_translation, "read_dataset", lambda *_: rows)
    args = t5_translation.parse_arguments(["--dataset=wmt16"])
    assert t5_translation.read_pairs(args) == [("yes", "ja")]
    with pytest.raises(SystemExit, match="has the languages de, en, but not fr"):
        t5_translation.read_pairs(t5_translation.parse_arguments(["--dataset=wmt16", "--target=fr"]))


# Records and their page ---------------------------------------------------------------------------------


RECORD = Record(
    recipe="t5_translation",
    hook="none",
    command="torchrun --nproc-per-node 2 recipes/complete/t5_translation.py --hook none",
    created="2025-01-31 12:00 UTC",
    environment={"torch": "2.14", "CPU": "some"},
    data="some text",
    num_workers=2,
    steps=6,
    losses=[[3, 5.0], [6, 4.0]],
    held_out={"loss": 4.5},
    sent_mb_per_step=1.5,
)


def test_records_survive_their_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = report(RECORD, tmp_path / "folder")
    assert path.name == "t5_translation_none.json" and Record.load(path) == RECORD
    assert "held out: loss" in capsys.readouterr().out


def test_statistics_are_means_of_hooks_and_tables_together() -> None:
    logged = [
        {"loss": 1.0, "ddp_hooks/sent_mb": 1.0, "ddp_hooks/stall_s": 0.5},
        {"eval_loss": 1.0},
        {"ddp_hooks/sent_mb": 1.0, "ddp_hooks/tables_sent_mb": 2.0, "ddp_hooks/tables_stall_s": 0.5},
    ]
    assert mean_stats(logged) == (pytest.approx(2 * 2**20 / 1e6), pytest.approx(0.5))
    assert mean_stats([{"loss": 1.0}]) == (None, None)


def test_what_an_all_reduce_sends() -> None:
    parameters = [torch.zeros(1_000_000, requires_grad=True), torch.zeros(9)]
    assert all_reduce_mb(parameters, 1) == 0 and all_reduce_mb(parameters, 4) == pytest.approx(6.0)


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert command_of("one", ["--text", "my novel.txt"]) == "python recipes/complete/one.py --text 'my novel.txt'"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert command_of("one", []) == "torchrun --nproc-per-node 3 recipes/complete/one.py"


def test_page_has_a_section_per_recipe(tmp_path: Path) -> None:
    records = [
        replace(RECORD, recipe="my_recipe", held_out={"accuracy": 0.25}, stall_s_per_step=0.01),
        replace(RECORD, hook="dear+tables", held_out={"loss": 4.25, "token accuracy": 0.5}),
        RECORD,
    ]
    for number, record in enumerate(records):
        record.save(tmp_path / f"{number}.json")
    page = tmp_path / "page.md"
    results.main([*(str(tmp_path / f"{number}.json") for number in range(3)), "--markdown", str(page)])
    shown = page.read_text(encoding="utf-8")
    assert shown.index("## T5 with sharded tables") < shown.index("## my_recipe")
    first, second = "| none | 6 | 4.0000 | 4.5000 |  | 1.500 |  |", "| dear+tables | 6 | 4.0000 | 4.2500 | 0.5000 |"
    assert shown.index(first) < shown.index(second)
    assert "| none | 6 | 4.0000 | 0.2500 | 1.500 | 0.0100 |" in shown and RECORD.command in shown
    for recipe in ("t5_translation", "my_recipe"):
        assert f"(page_{recipe}.png)" in shown and 0 < (tmp_path / f"page_{recipe}.png").stat().st_size < 60_000


def test_runs_name_recipes_and_their_results() -> None:
    run = results.Run("gpt2_clm_trainer", "dear-tuned", ("--tune",))
    assert run.arguments == ["--hook", "dear", "--tune"] and run.file == "gpt2_clm_trainer_dear-tuned.json"
    for run in results.RUNS:
        parse = {"gpt2_clm_trainer": "gpt2", "bert_mlm_trainer": "bert", "t5_translation": "t5"}.get(run.recipe)
        if parse is not None:
            assert MAINS[parse](run.arguments).hook == run.hook.partition("-")[0]


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RUNS", (results.Run("gpt2_clm_trainer", "none"),))
    with pytest.raises(SystemExit, match=r"gpt2_clm_trainer with none took more than 0\.5 s"):
        results.main(["--run", "--timeout=0.5", "--output", str(tmp_path), "--markdown", str(tmp_path / "page.md")])
    assert not (tmp_path / "page.md").exists(), "there is nothing to show"


@pytest.mark.slow
def test_runs_make_a_page(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RUNS", (results.Run("gpt2_clm_trainer", "dear", (*TINY, "--text", str(text))),))
    results.main(["--run", "--timeout=100", "--output", str(tmp_path), "--markdown", str(tmp_path / "page.md")])
    assert "| dear | 4 |" in (tmp_path / "page.md").read_text(encoding="utf-8")
