"""The EmbRace paper's page: counts that are those of formulas, bytes that are those of collectives, and orderings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddp_hooks.comm import AlphaBeta
from ddp_hooks.planning import Network, simulate
from ddp_hooks.planning.network import Round, all_to_all
from recipes.paper import embrace, embrace_training
from recipes.paper import embrace_model as model
from recipes.paper.embrace_counts import APPROACHES, DENSITY, count, table_2
from recipes.paper.embrace_model import (
    ALL_GATHER,
    ALL_REDUCE,
    GPUS,
    HORIZONTAL,
    HYBRID,
    MAIN,
    NAMES,
    PARALLAX,
    SCHEDULED,
    UNIQUE,
    Job,
    Rows,
    Setting,
    predicted,
    served,
    strategy_of,
)
from recipes.paper.strategies.rounds import gathered, sent_bytes

RTX3090, RTX2080 = GPUS
HALF_PCIE = Setting(0.4, model.PCIE_BYTES_S / 2)


# -- Table 2 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("name", APPROACHES)
def test_formulas_are_what_is_sent_but_for_the_server_beside_a_worker(name: str, workers: int) -> None:
    counted, formula = count(name, workers), table_2(name, workers)
    share = (workers - 1) / workers if name == "PS" else 1.0
    assert counted.sent == pytest.approx(formula.sent * share)
    assert counted.messages == pytest.approx(formula.messages * share)


def test_what_the_formulas_leave_out() -> None:
    assert count("AlltoAll", 8).rounds == 2 and count("AllReduce", 8).rounds == 14
    assert count("AllReduce", 8).ids == 0.0 < count("PS", 8).ids < count("AllGather", 8).ids
    assert count("AlltoAll", 8).ids == count("AllGather", 8).ids, "those of all workers"
    with pytest.raises(ValueError, match="7 workers do not share 960 rows of 256 numbers equally"):
        count("PS", 7)


@pytest.mark.parametrize("name", model.MODELS)
def test_sparsity_is_the_papers_before_coalescing(name: str) -> None:
    assert embrace.sparsity_of(name) == pytest.approx(embrace.SPARSITY[name], abs=0.06)


@pytest.mark.parametrize("workers", [4, 8])
def test_patterns_of_figure_4_send_what_is_counted(workers: int) -> None:
    network = Network(workers, AlphaBeta(0.0, 1.0))
    names = {"AlltoAll": "AlltoAll", "AllReduce": "AllReduce", "AllGather": "AllGather", "PS": embrace.SERVERS}
    for approach, name in names.items():
        patterns = embrace.exchange_patterns(name, network, DENSITY)
        sent = sum(sent_bytes(pattern) for pattern in patterns) / embrace.TABLE_BYTES
        assert sent == pytest.approx(count(approach, workers).sent)
    apart = embrace.exchange_patterns(embrace.APART, network, DENSITY)
    assert sum(map(sent_bytes, apart)) / embrace.TABLE_BYTES == pytest.approx(table_2("PS", workers).sent)


# -- Figure 4 ----------------------------------------------------------------------------------------------------------


def test_where_alltoall_becomes_fastest() -> None:
    """Bytes across a node's link alone decide: 1.75 M of a ring, 4 αM of AlltoAll; with a link each it always wins."""
    sparsities = [percent / 100 for percent in range(100)]
    shared = Network(8, AlphaBeta(0.0, 1e-10), 4, AlphaBeta(0.0, 1e-11))
    assert embrace.fastest_from(shared, embrace.EXCHANGES, sparsities) == pytest.approx(57)  # from 56.25 on
    assert embrace.fastest_from(MAIN.network(4, 1), embrace.EXCHANGES, sparsities) == 0
    assert embrace.fastest_from(HALF_PCIE.network(8), embrace.EXCHANGES, sparsities) < 40


def test_only_all_reduce_does_not_care_about_sparsity() -> None:
    network = MAIN.network(8)
    for name in embrace.EXCHANGES:
        dense_s, sparse_s = (embrace.exchange_s(name, network, density) for density in (1.0, 0.1))
        assert (dense_s == sparse_s) if name == "AllReduce" else (dense_s > 5 * sparse_s)


def test_servers_of_a_node_get_what_all_other_nodes_send() -> None:
    assert served(MAIN.network(16), 100.0) == (Round(1, 12 * 100 / 4, 100.0),)
    assert sent_bytes(served(MAIN.network(16), 100.0)) == sent_bytes(all_to_all(16, 4, 100.0))
    assert served(MAIN.network(4), 100.0) == (Round(1, 0.0, 100.0),), "all within one node"


# -- steps -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", model.MODELS)
def test_sizes_and_tokens_are_those_of_the_paper(name: str) -> None:
    job, original_mib = Job(RTX3090, name), {"lm": 8.7, "gnmt": 26.0, "transformer": 35.2, "bert": 36.0}[name]
    assert len(job.tables) * job.rows.original == pytest.approx(original_mib * 2**20, rel=1e-3)
    assert job.rows.prior < job.rows.coalesced < job.rows.original
    dense = [tensor.num_bytes for tensor in job.step(0.4).tensors if tensor.name not in job.tables]
    assert sum(dense) == pytest.approx(job.workload.dense_bytes)
    assert job.step(0.4).compute_s == pytest.approx(job.compute_s(0.4)) and job.compute_s(0.2) == 2 * job.compute_s(0.4)


def test_tokens_of_berts_questions() -> None:
    assert Job(RTX3090, "bert").workload.tables[0].num_ids == 32 * 384
    assert Job(RTX2080, "bert").rows.original == Job(RTX3090, "bert").rows.original * 4 / 32


def test_every_strategy_sends_what_it_says() -> None:
    """Through a node's link, on 8 GPUs: dense gradients in a ring, and rows of tables as each strategy has them."""
    job = Job(RTX3090, "gnmt")
    rows, dense = job.rows, 2 * 7 / 8 * job.workload.dense_bytes
    ids = 2 * sent_bytes(gathered(8, 4, rows.ids))

    def exchanged(num_bytes: float) -> float:
        return 2 * sent_bytes(all_to_all(8, 4, num_bytes))

    expected = {
        ALL_REDUCE: dense + 2 * 7 / 8 * job.workload.table_bytes,
        ALL_GATHER: dense + 2 * sent_bytes(gathered(8, 4, rows.original)) + ids,
        PARALLAX: dense + 2 * exchanged(rows.original),
        HYBRID: dense + 2 * exchanged(rows.original) + ids,
        HORIZONTAL: dense + 2 * exchanged(rows.original) + ids,
        SCHEDULED: dense + exchanged(rows.original) + exchanged(rows.coalesced) + ids,
        UNIQUE: dense + 2 * exchanged(rows.coalesced) + ids,
    }
    for name, sent in expected.items():
        assert predicted(name, "RTX3090", "gnmt", 8).sent_bytes == pytest.approx(sent), name


@pytest.mark.parametrize("name", NAMES)
def test_without_a_network_nothing_stalls(name: str) -> None:
    job = Job(RTX3090, "lm")
    network = Network(8, AlphaBeta(), 4, AlphaBeta(), native=True)
    assert simulate(strategy_of(name, job, network), job.step(0.4), network).exposed_s == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("setting", [MAIN, HALF_PCIE], ids=lambda setting: setting.name)
@pytest.mark.parametrize("name", model.MODELS)
def test_each_technique_of_the_paper_helps(name: str, setting: Setting) -> None:
    stalls = {each: predicted(each, "RTX3090", name, 16, setting).exposed_s for each in NAMES}
    assert stalls[UNIQUE] < stalls[SCHEDULED] < stalls[HYBRID] < stalls[ALL_GATHER]
    assert stalls[HORIZONTAL] <= stalls[HYBRID] + 1e-9
    wider, narrower = (embrace_training.relative_speed(SCHEDULED, name, workers, setting) for workers in (16, 4))
    assert wider > narrower > 1.0


def test_prior_rows_pass_what_waits() -> None:
    """The split helps where the link is busy with the gradients of blocks when the backward ends."""
    slow = replace(MAIN, between_bytes_s=model.INFINIBAND_BYTES_S / 8)
    spans = predicted(SCHEDULED, "RTX3090", "gnmt", 8, slow).spans
    last_block, *_ = [span.start_s for span in spans if span.name == "block 0" and span.track.startswith("lane")]
    delayed, *_ = [span.start_s for span in spans if span.name == "delayed rows"]
    prior, *_ = [span.start_s for span in spans if span.name == "prior rows"]
    looked_up, *_ = [span.start_s for span in spans if span.name == "lookup"]
    assert prior < looked_up < last_block < delayed


def test_the_faster_of_horovods_two_is_the_papers() -> None:
    def gathers(gpu: str, name: str, workers: int) -> bool:
        return predicted(ALL_GATHER, gpu, name, workers).step_s < predicted(ALL_REDUCE, gpu, name, workers).step_s

    assert all(gathers("RTX3090", "transformer", workers) for workers in (4, 8))
    assert not gathers("RTX3090", "transformer", 16)
    assert not gathers("RTX3090", "bert", 16)
    assert all(gathers("RTX2080", name, workers) for name in model.MODELS for workers in (4, 8, 16))
    assert predicted(ALL_REDUCE, "RTX3090", "lm", 16).step_s > 8 * predicted(ALL_GATHER, "RTX3090", "lm", 16).step_s
    assert gathers("RTX3090", "gnmt", 16), "the page says that this one differs from the paper"


def test_what_smaller_batches_have_in_common_matters_little() -> None:
    class Different(Job):
        @property
        def rows(self) -> Rows:
            rows = super().rows
            return Rows(rows.ids, rows.original, rows.original, rows.original)

    for name in ("gnmt", "transformer", "bert"):
        job, network = Different(RTX2080, name), MAIN.network(16)
        different_s = simulate(strategy_of(SCHEDULED, job, network), job.step(MAIN.utilisation), network).step_s
        assert 1.0 <= different_s / predicted(SCHEDULED, "RTX2080", name, 16).step_s < 1.02


def test_the_last_link_scales_the_baseline_as_in_the_paper() -> None:
    rate = model.link_by_the_baseline("bert")
    assert rate < model.INFINIBAND_BYTES_S
    assert model.scaling(ALL_REDUCE, "bert", replace(MAIN, between_bytes_s=rate)) == pytest.approx(3.81, abs=0.005)


# -- the page ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_writes_every_section(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    embrace.main(["--quick", "--markdown", str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    figures = ("## Table 2", "## Figure 4", "## Figure 7", "## Figure 8", "## Figure 9", "## Figure 10")
    assert [title.partition(":")[0] for title in titles] == [*figures, "## Repeating it"]
    assert text.count("*Counted.*") == 1 and text.count("*Simulated.*") == 5
    assert len(list(tmp_path.glob("page_figure_*.png"))) == 5
    assert text.count("| what | ours, ") == 6, "the paper's numbers beside ours, in every section"
    assert "Figure 10" in capsys.readouterr().out


def test_what_is_given_is_no_claim() -> None:
    slower = model.by_the_baseline()
    scope = model.Scope(("gnmt", "bert"), (MAIN, slower), (), (), slower)
    claims = [claim.what for claim in embrace_training.scalability(scope).claims]
    assert f"GNMT-8, {ALL_REDUCE}, {slower.name}" in claims and f"BERT-base, {ALL_REDUCE}, {MAIN.name}" in claims
    assert f"BERT-base, {ALL_REDUCE}, {slower.name}" not in claims
