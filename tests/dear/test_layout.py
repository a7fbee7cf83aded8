"""Atoms, owners and fusion groups as pure functions.

Prevents: elements that nobody or two ranks own, groups that break the fusion rule, layouts that depend on the rank.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ddp_hooks.comm import in_order_of, is_dense
from ddp_hooks.dear.layout.memory import ManagedParameters, flatten, overlapping, unflatten
from ddp_hooks.dear.layout.model_layout import ModelLayout
from ddp_hooks.dear.layout.placement import Layout, held_in_shards
from ddp_hooks.intercept import GradientGuard
from ddp_hooks.planning.atoms import FusionRule, ParameterShape, cut_bucket, fuse

numels = st.lists(st.integers(0, 3000), min_size=1, max_size=12)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], int]:
    """Sizes of parameters, and bytes of an atom: for some 60 atoms at most, as tests take longer with each."""
    sizes = draw(numels)
    return sizes, draw(st.integers(max(4, 4 * sum(sizes) // 60), 20_000))


def layout_of(sizes: list[int], world_size: int, atom_bytes: int) -> tuple[Layout, list[ParameterShape]]:
    shapes = [ParameterShape(numel, 4, index // 2) for index, numel in enumerate(sizes)]
    half = len(sizes) // 2
    buckets = [b for b in (tuple(range(half)), tuple(range(half, len(sizes)))) if b]
    atoms = [a for i, b in enumerate(buckets) for a in cut_bucket(i, b, shapes, world_size, atom_bytes)]
    return Layout(tuple(buckets), tuple(atoms)), shapes


@given(cuts(), st.integers(1, 9))
def test_every_element_has_one_owner(cut: tuple[list[int], int], world_size: int) -> None:
    sizes, atom_bytes = cut
    layout, _ = layout_of(sizes, world_size, atom_bytes)
    owners = [torch.zeros(numel, dtype=torch.long) for numel in sizes]
    places = [torch.full((numel,), -1) for numel in sizes]  # in their atom's memory
    for atom in layout.atoms:
        for parameter, start, end, offset in atom.members:
            places[parameter][start:end] = torch.arange(offset, offset + end - start)
    for rank in range(world_size):
        for parameter, start, end in layout.ranges(rank):
            owners[parameter][start:end] += 1
        for _, (parameter, start, end, offset) in layout.owned(rank):
            assert torch.equal(places[parameter][start:end], torch.arange(offset, offset + end - start))
    assert all((owner == 1).all() for owner in owners)


@given(cuts(), st.integers(1, 9))
def test_atoms_tile_their_buckets(cut: tuple[list[int], int], world_size: int) -> None:
    sizes, atom_bytes = cut
    layout, _ = layout_of(sizes, world_size, atom_bytes)
    for index, bucket in enumerate(layout.buckets):
        atoms = [atom for atom in layout.atoms if atom.bucket == index]
        position = 0
        for atom in atoms:
            assert atom.start == position
            assert sum(member.end - member.start for member in atom.members) == atom.numel
            whole = all(member.end - member.start == sizes[member.parameter] for member in atom.members)
            assert whole or len(atom.members) == 1, "parameters are cut only into atoms of their own"
            assert atom.nbytes <= atom_bytes + 4, "an atom is too large"
            position += atom.numel
        assert position == sum(sizes[parameter] for parameter in bucket)


def test_gathers_go_in_the_order_of_need() -> None:
    """And what no forward has shown in the reverse of the backward."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    parameters = ManagedParameters(dict(model.named_parameters()))
    rule = FusionRule("none", 0.0, 0)
    planned = ModelLayout(parameters, model, 2, rule, 64, False)
    shapes = [ParameterShape(16, 4, index) for index in range(4)]
    bucket = (3, 2, 1, 0)
    layout = Layout((bucket,), tuple(cut_bucket(0, bucket, shapes, 2, 64)))
    assert planned.plan(layout, [2, 0, 3, 1]) == [(1,), (3,), (0,), (2,)]
    assert planned.plan(layout, [4, 4, 4, 4]) == [(0,), (1,), (2,), (3,)]


@given(numels, st.integers(1, 40))
def test_fusion_by_size(sizes: list[int], kilobytes: int) -> None:
    """DeAR, section IV-B: neighbours join while their total does not exceed the size; a larger one stands alone."""
    layout, shapes = layout_of(sizes, 2, 2000)
    rule = FusionRule("size", kilobytes / 1024, 1)
    groups = fuse(range(len(layout.atoms)), layout.atoms, shapes, rule)
    assert [index for group in groups for index in group] == list(range(len(layout.atoms)))
    totals = [sum(layout.atoms[i].nbytes for i in group) for group in groups]
    assert all(total <= kilobytes * 1024 or len(group) == 1 for total, group in zip(totals, groups, strict=True))
    for total, following in zip(totals, groups[1:], strict=False):
        assert total + layout.atoms[following[0]].nbytes > kilobytes * 1024, "the next atom would have fitted"


def test_fusion_by_layers_and_none() -> None:
    layout, shapes = layout_of([500] * 12, 2, 2000)
    order = range(len(layout.atoms))
    for group in fuse(order, layout.atoms, shapes, FusionRule("layers", 1, 2)):
        assert len({shapes[m.parameter].layer for i in group for m in layout.atoms[i].members}) <= 2
    assert fuse(order, layout.atoms, shapes, FusionRule("none", 1, 2)) == [(i,) for i in order]


def model_of_all_layouts() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(7, 5), nn.Linear(40, 30), nn.Linear(1, 1))
    model.scale = nn.Parameter(torch.tensor(2.0))
    model.transposed = nn.Parameter(torch.randn(6, 4).t())
    model.gaps = nn.Parameter(torch.randn(4, 8)[:, ::2])
    return model.to(memory_format=torch.channels_last)


def test_flattening_changes_memory_not_values() -> None:
    model = model_of_all_layouts()
    parameters = list(model.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    strides = [parameter.stride() if is_dense(parameter) else None for parameter in parameters]
    layout, _ = layout_of([parameter.numel() for parameter in parameters], 3, 512)
    flats = flatten(layout, parameters)
    for parameter, value, stride in zip(parameters, before, strides, strict=True):
        assert torch.equal(parameter, value) and is_dense(parameter)
        assert parameter.stride() == stride or stride is None
    for atom, flat in zip(layout.atoms, flats, strict=True):
        for member in atom.members:
            ordered = in_order_of(parameters[member.parameter].detach(), parameters[member.parameter])
            piece = flat[member.offset : member.offset + member.end - member.start]
            assert torch.equal(piece, ordered[member.start : member.end])
            piece.mul_(2)  # the parameter sees what is written into the atom
    assert all(torch.equal(p, 2 * value) for p, value in zip(parameters, before, strict=True))
    memory = list(flats)
    unflatten(layout, parameters, flats)
    assert not flats
    first = layout.atoms[0]
    if len(first.members) > 1:
        memory[0].zero_()
    assert all(torch.equal(p, 2 * value) for p, value in zip(parameters, before, strict=True))
    assert overlapping(parameters) is None


def test_overlapping_parameters_are_found() -> None:
    memory = torch.zeros(10)
    assert overlapping([memory[:4], torch.zeros(3), memory[3:]]) == (0, 2)
    assert overlapping([memory[:4], memory[4:]]) is None


def test_one_call_zeroes_several_guards() -> None:
    guards = [GradientGuard.standing_for(torch.ones(2), name, held_in_shards) for name in ("first", "second")]
    values = torch.ones(3)
    torch._foreach_zero_([guards[0], values, guards[1]])
    assert all(guard.zeroed for guard in guards) and not values.any()


@pytest.mark.parametrize("shape", [(3, 4), (), (1,), (0,)])
def test_guard_refuses_everything_but_metadata_and_zeroing(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    guard = GradientGuard.standing_for(parameter, "layer.weight", held_in_shards)
    parameter.grad = guard
    assert parameter.grad.shape == shape and parameter.grad.dtype == torch.float32 and not parameter.grad.is_sparse
    for use in (lambda g: g + 1, lambda g: g.sum(), lambda g: g.mul_(2), lambda g: torch.isnan(g), lambda g: g.clone()):
        with pytest.raises(RuntimeError, match=r"layer\.weight"):
            use(parameter.grad)
    assert not guard.zeroed
    module = nn.Module()
    module.weight = parameter
    module.zero_grad(set_to_none=False)
    assert guard.zeroed and parameter.grad is guard
    torch.optim.SGD([parameter]).zero_grad(set_to_none=False)
    assert parameter.grad is guard


def test_the_last_bucket_is_cut_finer() -> None:
    shapes = [ParameterShape(numel, 4, 0) for numel in (40, 40, 40, 40, 900, 30)]
    usual = cut_bucket(0, range(6), shapes, 2, 1600)
    tail = cut_bucket(0, range(6), shapes, 2, 1600, tail=True)
    assert [[m.parameter for m in atom.members] for atom in usual] == [[0, 1, 2, 3], [4], [4], [4], [5]]
    assert [[m.parameter for m in atom.members] for atom in tail] == [[0, 1], [2, 3], [4], [4], [4], [5]]
    assert all(atom.tail for atom in tail) and not any(atom.tail for atom in usual)


def test_autograd_cannot_add_to_a_guard() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = GradientGuard.standing_for(parameter, "weight", held_in_shards)
    with pytest.raises(RuntimeError):
        parameter.sum().backward()
