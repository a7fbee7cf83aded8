"""Figures 7 to 10 of the EmbRace paper: steps of its models, simulated."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from recipes.paper import embrace_model as model
from recipes.paper.embrace_model import (
    ALL_GATHER,
    ALL_REDUCE,
    BASELINES,
    HOROVOD,
    HYBRID,
    OURS,
    PARALLAX,
    SCHEDULED,
    TITLES,
    UNIQUE,
    Job,
    Scope,
    Setting,
    predicted,
    scaling,
)
from recipes.paper.page import Claim, Section

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GPU_NAMES = tuple(gpu.name for gpu in model.GPUS)
NUM_GPUS = (4, 8, 16)


def speedup(gpu: str, name: str, workers: int, setting: Setting, baselines: Iterable[str] = HOROVOD) -> float:
    """Of EmbRace over the fastest of some baselines."""
    fastest_s = min(predicted(baseline, gpu, name, workers, setting).step_s for baseline in baselines)
    return fastest_s / predicted(SCHEDULED, gpu, name, workers, setting).step_s


def less_stall(gpu: str, name: str, setting: Setting, baselines: Iterable[str] = HOROVOD) -> float:
    """The least stall of some baselines, over EmbRace's, on 16 GPUs."""
    return min(_stall_ratio(baseline, gpu, name, setting) for baseline in baselines)


SPEEDUPS = {"RTX3090": (1.02, 1.77), "RTX2080": (1.09, 2.41)}
MODEL_SPEEDUPS = {
    "RTX3090": {"lm": (1.18, 1.77), "gnmt": (1.103, 1.268), "transformer": (1.115, 1.176), "bert": (1.02, 1.06)},
    "RTX2080": {"lm": (1.99, 2.41), "gnmt": (1.094, 1.296), "transformer": (1.105, 1.282), "bert": (1.10, 1.40)},
}


COMPARED = {"all four": BASELINES, "Horovod's two": HOROVOD}
"""Baselines of which the fastest counts. The paper has all four."""


def end_to_end(scope: Scope) -> Section:
    """Figure 7, as far as the text has its numbers."""
    claims, last = [], scope.settings[-1]
    for setting in scope.settings:
        for gpu, ends in SPEEDUPS.items():
            for over, baselines in COMPARED.items():
                cases = itertools.product(scope.models, NUM_GPUS)
                found = [speedup(gpu, name, workers, setting, baselines) for name, workers in cases]
                claims += _ends(f"{gpu}, {setting.name}, over {over}", found, ends)
    claims += [
        Claim(
            f"{TITLES[name]}, 16 × {gpu}, {last.name}, over {over}",
            speedup(gpu, name, 16, last, baselines),
            *MODEL_SPEEDUPS[gpu][name],
        )
        for gpu in GPU_NAMES
        for name in scope.models
        for over, baselines in COMPARED.items()
    ]
    columns = ("setting", "GPU", "model", "computing, ms", *(f"{n} GPUs" for n in NUM_GPUS))
    return Section(
        "Figure 7: speedup over the fastest baseline",
        "simulated",
        """\
EmbRace's speed over that of the fastest of all four baselines, as in the paper, and over the faster of Horovod's two
alone; in the table the latter in three columns, then the former in three. Copies through host memory, which slow
BytePS and Parallax down in the paper, are not simulated: Parallax sends between nodes what EmbRace without scheduling
sends, and BytePS, which reduces within nodes first, sends M between two nodes where a ring sends 1.75 M. With slow
links and two nodes it can even pass EmbRace, whose all-reduces are rings, as Table 2 has them.

* **Over all four baselines (less than the paper).** What remains over Parallax is scheduling, at most 1.2 times. The
  paper has Parallax the fastest baseline for most models on 16 RTX2080, and EmbRace up to 2.41 times as fast there; so
  its servers cost more than the bytes they send, by how much the paper does not say.

* **Which of Horovod's two is faster comes out as in the paper,** in every setting, but for GNMT-8 on 16 RTX3090, and
  for BERT on 4, where the two differ by less than 1 %: AllGather is ahead with LM, on RTX2080, and with Transformer on
  4 and 8 RTX3090; AllReduce with Transformer on 16, and with BERT on 8 and 16. With LM AllReduce takes 8 to 20 times as
  long as AllGather. With GNMT-8 on 16 AllGather stays ahead, by 1 to 5 %.
* **At line rate there is little to gain (less than the paper).** Nearly everything hides behind computing, but for LM
  and for Transformer's small batch on RTX2080. The paper's network cannot have been that fast: its Horovod AllReduce
  would scale better.
* **On 16 GPUs, with the network as the baseline shows it,** and over Horovod's two alone, all models but LM on RTX2080
  are within 6 % of the paper's ranges, which are over all four baselines and over 4, 8 and 16 GPUs.
* **LM on RTX2080 (less).** There the paper keeps both tables of 1.5 GB in host memory; that is not simulated.
* **On 4 GPUs (less).** All of it is within one node, where no setting but half of PCIe is slower than line rate, and
  what AllGather sends takes a few milliseconds. See Fig. 9.""",
        claims,
        (*columns, *(f"{n}, of all" for n in NUM_GPUS)),
        [_speedup_cells(*case) for case in itertools.product(scope.settings, GPU_NAMES, scope.models)],
        lambda figure: _draw_speeds(figure, scope),
    )


def _ends(what: str, found: Sequence[float], paper: tuple[float, float], unit: str = "×") -> list[Claim]:
    ends = zip(("least", "most"), (min(found), max(found)), paper, strict=True)
    return [Claim.number(f"{what}, {which}", ours, of_paper, unit) for which, ours, of_paper in ends]


def _speedup_cells(setting: Setting, gpu: str, name: str) -> list[str]:
    compute_s = Job(next(each for each in model.GPUS if each.name == gpu), name).compute_s(setting.utilisation)
    speedups = [speedup(gpu, name, workers, setting, some) for some in (HOROVOD, BASELINES) for workers in NUM_GPUS]
    return [setting.name, gpu, TITLES[name], f"{1e3 * compute_s:.0f}", *(f"{each:.3f}" for each in speedups)]


def _draw_speeds(figure: Figure, scope: Scope) -> None:
    """Batches per second of all GPUs together, a panel for each kind of GPU and model, with the last setting."""
    setting = scope.settings[-1]
    figure.set_size_inches(3.2 * len(scope.models), 6)
    figure.suptitle(f"Batches per second, all GPUs together: {setting.name}", fontsize=9)
    panels = figure.subplots(len(GPU_NAMES), len(scope.models), squeeze=False)
    names = (*BASELINES, SCHEDULED)
    for row, gpu in zip(panels, GPU_NAMES, strict=True):
        for ax, of_model in zip(row, scope.models, strict=True):
            speeds = {n: [w / predicted(n, gpu, of_model, w, setting).step_s for w in NUM_GPUS] for n in names}
            _bars(ax, speeds, [f"{n}" for n in NUM_GPUS])
            ax.set_title(f"{TITLES[of_model]}, {gpu}", fontsize=8)
    panels[0][0].legend(fontsize=6)


def _bars(ax: Axes, heights: dict[str, list[float]], labels: Sequence[str]) -> None:
    """Groups of bars beside each other, one of each colour per label."""
    width = 0.8 / len(heights)
    for number, (name, values) in enumerate(heights.items()):
        places = [group + width * (number - (len(heights) - 1) / 2) for group in range(len(labels))]
        ax.bar(places, values, width, label=name)
    ax.set_xticks(range(len(labels)), labels, fontsize=7)


STALLS = {"RTX3090": (1.45, 2.56), "RTX2080": (1.37, 3.02)}
STALL_REDUCTIONS = {("lm", "bert"): 49.7, ("gnmt", "transformer"): 26.4}


def stalls(scope: Scope) -> Section:
    """Figure 8."""
    claims = []
    for setting in scope.settings:
        for gpu, ends in STALLS.items():
            claims += _ends(f"{gpu}, {setting.name}", [less_stall(gpu, name, setting) for name in scope.models], ends)
        for models, least in STALL_REDUCTIONS.items():
            present = [name for name in models if name in scope.models]
            reduction = min(100 - 100 / less_stall(gpu, name, setting) for gpu in GPU_NAMES for name in present)
            which = " and ".join(TITLES[name] for name in present)
            claims.append(Claim.at_least(f"least reduction, {which}, {setting.name}", reduction, least, "%"))
    shown = (*BASELINES, HYBRID, UNIQUE, OURS)
    return Section(
        "Figure 8: computation stall on 16 GPUs",
        "simulated",
        """\
Seconds per step that are not computing, over EmbRace's; claims are about the Horovod variant with the least. The
paper counts the time in which rows are split as a stall of EmbRace; it is not simulated.

* **LM (less than the paper).** Its dense layers are two blocks. The first one's all-reduce, half of the dense
  gradients, begins when the backward ends and must end before the next forward begins: no schedule of whole blocks
  hides that, and it is most of the stall of EmbRace and AllGather alike. The same holds, with smaller blocks, for
  RTX2080 at line rate.
* **BERT on RTX3090 (less).** EmbRace's stall is mostly the lookup of all 12,288 ids of a batch, 36 MB per worker, as
  Table 2 has it, while AllReduce sends the table of 89 MB once. Only 15 % of these ids differ. With each looked up
  once the stall is half of that, and the paper's reduction comes out (column `EmbRace, ids once`): the paper's code
  may do so although its cost model does not.
* **GNMT-8 on RTX3090 with slow links (more).** Its dense gradients do not fit behind the backward there, and nearly
  fit behind backward and forward together. Whether they do depends on the computing time, which is our assumption.
* **`ddp_hooks`** has less stall than the paper's EmbRace in most lines. Not where dense gradients do not fit behind the
  backward: `optimizer.step()` waits for all reduce-scatters, while a queue by priority lets the first block pass.""",
        claims,
        ("setting", "GPU", "model", "EmbRace, ms", *shown),
        [_stall_cells(*case, shown) for case in itertools.product(scope.settings, GPU_NAMES, scope.models)],
        lambda figure: _draw_stalls(figure, scope, shown),
    )


def _stall_cells(setting: Setting, gpu: str, name: str, shown: Iterable[str]) -> list[str]:
    own_s = predicted(SCHEDULED, gpu, name, 16, setting).exposed_s
    ratios = (f"{_stall_ratio(other, gpu, name, setting):.2f}" for other in shown)
    return [setting.name, gpu, TITLES[name], f"{1e3 * own_s:.1f}", *ratios]


def _stall_ratio(other: str, gpu: str, name: str, setting: Setting) -> float:
    """Over EmbRace's stall, on 16 GPUs."""
    other_s, own_s = (predicted(each, gpu, name, 16, setting).exposed_s for each in (other, SCHEDULED))
    return other_s / own_s


def _draw_stalls(figure: Figure, scope: Scope, shown: Sequence[str]) -> None:
    setting = scope.settings[-1]
    figure.set_size_inches(11, 4)
    figure.suptitle(f"Stall over EmbRace's: {setting.name}; dense tables of LM are beyond the picture", fontsize=9)
    for ax, gpu in zip(figure.subplots(1, len(GPU_NAMES)), GPU_NAMES, strict=True):
        ratios = {other: [_stall_ratio(other, gpu, name, setting) for name in scope.models] for other in shown}
        _bars(ax, ratios, [TITLES[name] for name in scope.models])
        ax.axhline(1.0, color="black", linewidth=1)
        ax.set(title=gpu, ylim=(0, 6))
        ax.legend(fontsize=6)


ABLATION = {16: ((2.9, 51.0), (3.0, 26.0)), 4: ((1.5, 14.6), (0.7, 7.5))}


def relative_speed(variant: str, name: str, workers: int, setting: Setting) -> float:
    """Over Horovod AllGather's, on RTX3090."""
    one, other = (predicted(each, "RTX3090", name, workers, setting).step_s for each in (ALL_GATHER, variant))
    return one / other


def ablation(scope: Scope) -> Section:
    """Figure 9."""
    claims = []
    for setting in scope.settings:
        for workers, (of_hybrid, of_scheduling) in ABLATION.items():
            where = f"{workers} GPUs, {setting.name}"
            hybrid = [100 * relative_speed(HYBRID, name, workers, setting) - 100 for name in scope.models]
            both = [100 * relative_speed(SCHEDULED, name, workers, setting) - 100 for name in scope.models]
            gains = [after - before for after, before in zip(both, hybrid, strict=True)]
            claims += _ends(f"hybrid communication, {where}", hybrid, of_hybrid, "%")
            claims += _ends(f"2D scheduling, {where}", gains, of_scheduling, "%")
    shown = (ALL_REDUCE, HYBRID, model.HORIZONTAL, SCHEDULED, OURS)
    return Section(
        "Figure 9: ablation on RTX3090",
        "simulated",
        """\
Speed over that of Horovod AllGather, and how many points of it each technique adds. (The paper's largest, 51.0 and
26.0, add up to the 1.77 of Fig. 7: they are points of one scale.)

* **On 16 GPUs** both techniques gain with every model, in every setting, but at line rate less than in the paper, for
  the reason given with Fig. 7. With the network as the baseline shows it hybrid communication gains 10 to 15 %, and
  scheduling up to 15 points. The paper's 51 % must be LM's; in our simulation AllGather costs LM less than that.
* **On 4 GPUs (less).** AllGather sends 3 αM within the node, AlltoAll 1.5 αM: a few milliseconds either way. For the
  paper's 14.6 % PCIe would have to be many times slower than its line rate, or gathering to cost more than its bytes:
  all rows of all workers are then added up and applied by every GPU, which AlltoAll divides among them. That is not
  simulated, and we cannot say how much of the difference it is.
* **Horizontal scheduling** gains where dense gradients do not fit behind the backward, and nothing elsewhere. With
  GNMT-8 and half of PCIe it is ahead of both schedulings together: rows that are to be split wait for the end of the
  backward (Algorithm 1), while whole ones leave when they come. The paper does not show it by itself.""",
        claims,
        ("setting", "GPUs", "model", *shown),
        [_ablation_cells(*case, shown) for case in itertools.product(scope.settings, ABLATION, scope.models)],
        lambda figure: _draw_ablation(figure, scope, (ALL_GATHER, *shown)),
    )


def _ablation_cells(setting: Setting, workers: int, name: str, shown: Iterable[str]) -> list[str]:
    speeds = (f"{relative_speed(each, name, workers, setting):.3f}" for each in shown)
    return [setting.name, f"{workers}", TITLES[name], *speeds]


def _draw_ablation(figure: Figure, scope: Scope, shown: Sequence[str]) -> None:
    setting = scope.settings[-1]
    figure.set_size_inches(11, 4)
    figure.suptitle(f"Speed over that of Horovod AllGather: {setting.name}", fontsize=9)
    for ax, workers in zip(figure.subplots(1, len(ABLATION)), ABLATION, strict=True):
        speeds = {each: [relative_speed(each, name, workers, setting) for name in scope.models] for each in shown}
        _bars(ax, speeds, [TITLES[name] for name in scope.models])
        ax.set(title=f"{workers} GPUs", ylim=(0, 1.25 * max(map(max, speeds.values()))))
        ax.legend(fontsize=6, ncols=3)


SCALINGS = {  # EmbRace's, and the second-best approach with its own
    "lm": (3.14, PARALLAX, 3.06),
    "gnmt": (3.42, ALL_REDUCE, model.ALL_REDUCE_SCALING["gnmt"]),
    "transformer": (2.53, ALL_REDUCE, model.ALL_REDUCE_SCALING["transformer"]),
    "bert": (3.94, ALL_REDUCE, model.ALL_REDUCE_SCALING["bert"]),
}


def scalability(scope: Scope) -> Section:
    """Figure 10."""
    claims = []
    for setting in scope.settings:
        for name in scope.models:
            own, other, of_other = SCALINGS[name]
            found = scaling(SCHEDULED, name, setting)
            claims.append(Claim.number(f"{TITLES[name]}, EmbRace, {setting.name}", found, own))
            if (other, name, setting) != (ALL_REDUCE, "bert", scope.by_baseline):  # there it is given
                found = scaling(other, name, setting)
                claims.append(Claim.number(f"{TITLES[name]}, {other}, {setting.name}", found, of_other))
    shown = (*BASELINES, SCHEDULED, OURS)
    return Section(
        "Figure 10: from 4 to 16 GPUs on RTX3090",
        "simulated",
        """\
How many times as fast 16 GPUs are as 4; 4 at best. The last setting's link is the median of those that AllReduce's
numbers give. That is BERT's, whose own number is therefore given, and no claim.

* **At line rate (more than the paper).** Too little is left to lose; BERT alone comes out as in the paper, within 4 %.
* **Transformer (more, in all settings).** We cannot explain the paper's 2.5. Transformer computes longer per byte of
  dense gradients than GNMT-8, by our count (0.47 against 0.35 s per GB at 40 %), and so should scale better; the
  paper has it scale much worse. Nor is it EmbRace's doing, as AllReduce scales alike.
* **LM with the slower link (less).** LM computes for 21 ms only, by dense operations alone; what we leave out,
  updates of rows and the sampled softmax, makes steps longer, and longer steps scale better. We do not know by how
  much.
* **EmbRace and AllReduce.** In the paper EmbRace scales better than AllReduce, by 0.02 to 0.13, with GNMT-8,
  Transformer and BERT. So it does here where links are slower than line rate, by up to 0.8, but with BERT they are
  equal; at line rate they differ by less than 0.1 either way.
* **EmbRace and Parallax.** In the paper LM scales better with EmbRace (3.14 and 3.06); here equally well.""",
        claims,
        ("setting", "model", *shown),
        [
            [setting.name, TITLES[name], *(f"{scaling(each, name, setting):.2f}" for each in shown)]
            for setting in scope.settings
            for name in scope.models
        ],
        lambda figure: _draw_scaling(figure, scope),
    )


def _draw_scaling(figure: Figure, scope: Scope) -> None:
    setting = scope.settings[-1]
    figure.set_size_inches(3.2 * len(scope.models), 3.4)
    figure.suptitle(f"Batches per second, all GPUs together: {setting.name}", fontsize=9)
    for ax, name in zip(figure.subplots(1, len(scope.models), squeeze=False)[0], scope.models, strict=True):
        for each in (SCHEDULED, SCALINGS[name][1]):
            speeds = [workers / predicted(each, "RTX3090", name, workers, setting).step_s for workers in NUM_GPUS]
            (line,) = ax.plot(NUM_GPUS, speeds, marker=".", label=each)
            ideal = [speeds[0] * workers / NUM_GPUS[0] for workers in NUM_GPUS]
            ax.plot(NUM_GPUS, ideal, ":", color=line.get_color())
        ax.set(title=TITLES[name], xlabel="GPUs", xticks=NUM_GPUS, ylim=(0, None))
        ax.legend(fontsize=6)
