"""Parameters in flight: who reads them waits for exactly what it reads, and nothing else notices.

Prevents: values of the step before, writes into a gather, copies that wait for ever, classes that stay changed.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_hooks.comm import Recorder
from ddp_hooks.comm.torch_compat.overrides import without_overrides
from ddp_hooks.overlap import FeedPipe
from ddp_hooks.overlap.deferred import PendingState
from ddp_hooks.overlap.waiting import METADATA, Waiting

OLD, NEW = 1.0, 2.0


class Gather:
    """A gather of one parameter that writes when it is awaited, so that a read that does not wait shows."""

    def __init__(self, parameter: nn.Parameter, error: Exception | None = None) -> None:
        self.label = "a gather"
        self.done = False
        self._values = parameter.detach()
        self._error = error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._values.fill_(NEW)
        self.done = True


class Flight:
    """A model whose parameters hold ``OLD``, and ``NEW`` once awaited; each travels alone."""

    def __init__(
        self, model: Any, arrived: Callable[[Any], None] | None = None, error: Exception | None = None
    ) -> None:
        self.model = model
        self.parameters = list(model.parameters())
        self.pipe = FeedPipe(model, self.parameters, Recorder(False), arrived)
        self.pipe.plan([(index,) for index in range(len(self.parameters))])
        self.launch(error)

    def launch(self, error: Exception | None = None) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.fill_(OLD)
        self.pipe.launched([Gather(parameter, error) for parameter in self.parameters])

    @property
    def awaited(self) -> list[int]:
        return [index for index, p in enumerate(self.parameters) if not isinstance(p, Waiting)]


def layers() -> Any:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


class Layers(nn.Module):
    """Has a forward of its own: ``compile()`` of an ``nn.Sequential`` compiles nothing in torch 2.11."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.layers(values)
        return result


def average(model: Any) -> Tensor:
    return torch.zeros(3, 3).lerp_(model[0].weight.detach(), 1.0)


def other_view(model: Any) -> Tensor:
    return next(iter(torch.nn.utils.parameters_to_vector([model[0].weight]).split(3)))


FIRST = [0]
READS: dict[str, tuple[Callable[[Any], Any], list[int]]] = {
    "functional": (lambda m: F.linear(torch.eye(3), m[0].weight), FIRST),
    "data": (lambda m: m[0].weight.data, FIRST),
    "average": (average, FIRST),
    "vector": (other_view, FIRST),
    "numpy": (lambda m: torch.from_numpy(m[0].weight.detach().numpy()), FIRST),
    "item": (lambda m: torch.tensor(m[0].weight[0, 0].item()), FIRST),
    "tolist": (lambda m: torch.tensor(m[0].weight.tolist()), FIRST),
    "iteration": (lambda m: torch.stack(list(m[0].weight)), FIRST),
    "storage": (lambda m: torch.tensor([]).set_(m[0].weight.untyped_storage()), FIRST),
    "deepcopy": (lambda m: copy.deepcopy(m[0].weight), FIRST),
    "pickle": (lambda m: pickle.loads(pickle.dumps(m[0].weight)), FIRST),
    "foreach": (lambda m: torch._foreach_add([m[0].weight.detach(), m[0].bias.detach()], 0.0)[0], [0, 1]),
    "list of parameters": (lambda m: torch.cat([m[0].weight, m[2].weight]), [0, 2]),
    "keyword": (lambda m: F.linear(input=torch.eye(3), weight=m[0].weight), FIRST),
    "state_dict": (lambda m: m[0].state_dict()["weight"], [0, 1]),
    "functional_call": (
        lambda m: torch.func.functional_call(m[0], {"bias": torch.zeros(3)}, (torch.eye(3),)), [0, 1],
    ),
    "a parameter made of it": (lambda m: nn.Parameter(m[0].weight), FIRST),
    "gradient of a function": (
        lambda m: torch.func.grad(lambda p: p["0.weight"].square().sum() / 2)(dict(m.named_parameters()))["0.weight"],
        [0, 1, 2, 3],
    ),
    "vmap over it": (lambda m: torch.vmap(lambda row: row * 1)(m[0].weight), FIRST),
    "vmap": (lambda m: torch.vmap(lambda row: m[0].weight @ row)(torch.eye(3)), FIRST),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_a_read_waits_for_what_it_reads(name: str) -> None:
    flight = Flight(layers())
    read, expected = READS[name]
    values = torch.as_tensor(read(flight.model)).detach()
    assert values.eq(NEW).all(), values
    assert flight.awaited == expected
    assert all(type(flight.parameters[index]) is nn.Parameter for index in expected)


def test_whole_models_can_be_copied_saved_and_printed() -> None:
    for act in (copy.deepcopy, _saved_and_loaded):
        flight = Flight(layers())
        found = act(flight.model)
        assert all(p.eq(NEW).all() and type(p) is nn.Parameter for p in found.parameters())
        assert flight.awaited == [0, 1, 2, 3]
        flight.launch()
        found(torch.zeros(1, 3))  # the copy waits for nobody
        assert flight.awaited == []
    flight = Flight(layers())
    assert "2." in repr(flight.model[0].weight) and flight.awaited == FIRST


def _saved_and_loaded(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_write_happens_after_the_arrival() -> None:
    for write in (
        lambda p: p.data.clamp_(-0.5, 0.5),
        lambda p: torch.no_grad()(p.clamp_)(-0.5, 0.5),
        lambda p: nn.init.constant_(p, 0.5),
        lambda p: torch.no_grad()(p.copy_)(torch.full((3, 3), 0.5)),
        lambda p: setattr(p, "data", torch.full((3, 3), 0.5)),
    ):
        flight = Flight(layers())
        write(flight.model[0].weight)
        flight.pipe.finish()
        assert flight.parameters[0].eq(0.5).all() and flight.parameters[1].eq(NEW).all()


def test_metadata_and_gradients_do_not_wait() -> None:
    flight = Flight(layers())
    parameter = flight.parameters[0]
    assert (parameter.shape, parameter.dtype, parameter.device) == ((3, 3), torch.float32, torch.device("cpu"))
    assert parameter.requires_grad and parameter.is_leaf and parameter.ndim == 2
    assert isinstance(parameter, nn.Parameter) and parameter.numel() == len(parameter) * 3 == 9
    parameter.grad = torch.ones(3, 3)
    assert parameter.grad is not None and parameter.grad.eq(1).all()
    parameter.grad = None
    flight.model.zero_grad()
    flight.model.requires_grad_(False)
    assert not parameter.requires_grad and next(iter(flight.model.parameters())) is parameter
    assert flight.awaited == [] and len(METADATA) > 30


def test_a_module_that_is_converted_converts_the_new_values() -> None:
    flight = Flight(layers())
    flight.model.double()
    assert all(p.dtype == torch.float64 and p.eq(NEW).all() and type(p) is nn.Parameter for p in flight.parameters)


class Scaled(nn.Parameter):
    """A class of parameters that a user has written."""

    seen: list[Any] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        with without_overrides():
            return func(*args, **(kwargs or {}))


def test_a_users_class_is_put_back() -> None:
    model = nn.Linear(3, 3)
    model.weight = Scaled(model.weight.detach())
    flight = Flight(model)
    Scaled.seen.clear()
    assert torch.add(model.weight, 0.0).eq(NEW).all()
    assert type(model.weight) is Scaled and torch.add in Scaled.seen, "its own __torch_function__ sees the call as well"
    assert flight.awaited == [0]


class Seen(TorchDispatchMode):
    """Notes the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    """Notes the functions that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_modes_transforms_and_tracers_of_the_reader_do_not_see_the_wait() -> None:
    flight = Flight(layers())
    weight = flight.parameters[0]
    with Seen() as seen, Called() as called:
        doubled = weight * 2
    assert doubled.eq(2 * NEW).all() and seen.names == ["mul"] and called.functions == [Tensor.mul]
    flight.launch()
    gradient = torch.func.grad(lambda x: (weight * x).sum())(torch.ones(3, 3))  # refuses writes into what it captures
    assert gradient.eq(NEW).all()
    flight.launch()
    traced = torch.jit.trace(flight.model[0], torch.zeros(1, 3))
    assert traced(torch.zeros(1, 3)).eq(NEW).all() and "fill_" not in str(traced.graph)


def test_parameters_made_of_one_in_flight_wait_for_nothing() -> None:
    flight = Flight(layers())
    weight = flight.parameters[0]
    made = type(weight)(torch.ones(3), requires_grad=False)
    assert type(made) is nn.Parameter and flight.awaited == []
    again = nn.Parameter(weight)
    assert type(again) is nn.Parameter and again.eq(NEW).all() and flight.awaited == FIRST
    assert again.data_ptr() == weight.data_ptr()
    flight.launch()
    swapped: Any = nn.Parameter(torch.zeros(3, 3))
    swapped.__class__, swapped.data = type(weight), weight.detach()  # as torch.utils.swap_tensors leaves it
    assert swapped.eq(NEW).all() and type(swapped) is nn.Parameter


def test_who_finishes_waits_for_an_update_of_another_thread() -> None:
    began, go_on = threading.Event(), threading.Event()

    def update(_: Any) -> None:
        began.set()
        assert go_on.wait(10)

    flight = Flight(nn.Linear(3, 3, bias=False), update)
    reader = threading.Thread(target=lambda: flight.parameters[0].sum())
    reader.start()
    assert began.wait(10)
    finisher = threading.Thread(target=flight.pipe.finish)
    finisher.start()
    finisher.join(0.1)
    waited = finisher.is_alive()
    go_on.set()
    reader.join(10)
    finisher.join(10)
    assert waited and not finisher.is_alive() and not flight.pipe.in_flight


def run_without_overrides(model: nn.Module) -> None:
    with without_overrides():
        model(torch.zeros(1, 3))


def test_a_module_waits_for_its_own_parameters_where_overrides_are_off() -> None:
    flight = Flight(layers())
    run_without_overrides(flight.model[2])
    assert flight.awaited == [2, 3]


def test_what_failed_to_arrive_goes_on_raising() -> None:
    flight = Flight(layers(), error=RuntimeError("rank 1 died"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="rank 1 died"):
            flight.model(torch.zeros(1, 3))
    flight.pipe.close()
    with pytest.raises(RuntimeError, match="rank 1 died"):
        flight.model[0].weight.sum()


def test_a_parameter_in_two_gathers_waits_for_both() -> None:
    flight = Flight(layers())
    large, small, *others = flight.parameters
    flight.pipe.finish()
    flight.pipe.plan([(0,), (0, 1), (2, 3)])
    flight.pipe.launched([Gather(large), Gather(small), Gather(others[0])])
    small.sum()
    assert flight.awaited == [1], "another part of the large one is under way"
    assert large.eq(NEW).all()
    assert flight.awaited == [0, 1]


def test_gathers_before_the_one_that_failed_have_arrived() -> None:
    flight = Flight(layers())
    flight.pipe.launched([Gather(p, RuntimeError("lost") if i == 2 else None) for i, p in enumerate(flight.parameters)])
    with pytest.raises(RuntimeError, match="lost"):
        flight.pipe.finish()
    assert flight.awaited == [0, 1] and flight.parameters[0].eq(NEW).all()


# -- the order of gathers -------------------------------------------------------------------------------------------


class Crossed(nn.Module):
    """Uses its layers in another order than they are registered in, one of them as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, values: Tensor, swapped: bool = False) -> Tensor:
        if swapped:
            return self.last(self.first(F.linear(values, self.middle.weight)))
        return self.last(F.linear(self.first(values), self.middle.weight))


def test_the_order_is_that_in_which_the_last_forward_waited() -> None:
    flight = Flight(Crossed())
    flight.pipe.finish()  # as before the first step: nothing is in flight

    def forward(swapped: bool = False) -> list[int]:
        flight.pipe.begin_forward(training=True)
        flight.model(torch.zeros(1, 3), swapped)
        flight.pipe.end_forward()
        return flight.pipe.order_of_need()

    assert forward() == [2, 1, 0]
    assert flight.awaited == [0, 1, 2]
    flight.launch()
    assert forward(swapped=True) == [2, 0, 1]
    flight.launch()
    flight.pipe.finish()
    assert forward() == [2, 0, 1], "a forward that waited for nothing tells nothing"


# -- other threads, and streams --------------------------------------------------------------------------------------


def test_another_thread_may_read_and_update() -> None:
    """A parameter that another thread updates is not to be seen half updated by the thread that trains."""
    halfway, go_on = threading.Event(), threading.Event()
    updated: list[int] = []

    def update(indices: Any) -> None:
        for index in indices:
            updated.append(index)
            values = flight.parameters[index]
            values.data[:1].mul_(10.0)
            if threading.current_thread() is reader:
                halfway.set()
                assert go_on.wait(10)
            values.data[1:].mul_(10.0)

    flight = Flight(layers(), update)
    read: list[float] = []
    reader = threading.Thread(target=lambda: read.append(float(flight.model[0].weight.detach().mean())))
    reader.start()
    assert halfway.wait(10)
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    assert torch.add(flight.parameters[0], 0.0).eq(10 * NEW).all()  # waits for the other thread's update
    reader.join(10)
    assert read == [10 * NEW] and updated == [0]
    assert flight.awaited == [0]


def test_a_thread_that_logs_never_reads_half_an_update() -> None:
    """The thread that trains updates a parameter while another one reads it."""
    halfway, go_on = threading.Event(), threading.Event()

    def update(indices: Any) -> None:
        for index in indices:
            values = flight.parameters[index].data
            values[:1].mul_(10.0)
            if index == 0:
                halfway.set()
                assert go_on.wait(10)
            values[1:].mul_(10.0)

    flight = Flight(nn.Linear(3, 3, bias=False), update)
    read: list[bool] = []

    def log() -> None:
        assert halfway.wait(10)
        read.append(bool(flight.parameters[0].eq(10 * NEW).all()))

    reader = threading.Thread(target=log)
    reader.start()
    threading.Timer(0.2, go_on.set).start()
    flight.pipe.finish()
    reader.join(10)
    assert read == [True]


def test_the_optimizers_state_waits_for_updates_to_come() -> None:
    finished: list[str] = []
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for use in (
        lambda state: state[model.weight],
        lambda state: list(state),
        lambda state: dict(state),
        lambda state: model.weight in state,
        lambda state: copy.deepcopy(state),
        lambda state: pickle.dumps(state),
        lambda state: state.clear(),
    ):
        optimizer.state = PendingState(optimizer.state, lambda: finished.append("updates"))
        finished.clear()
        use(optimizer.state)
        assert finished
    assert type(copy.deepcopy(optimizer).state) is defaultdict and len(optimizer.state) == 0


class FakeStream:
    """As much of a CUDA stream and its event as the pipe asks for."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.cuda_stream = number
        self.is_complete = False
        self._log = log

    def record_event(self) -> FakeStream:
        return self

    def query(self) -> bool:
        return self.is_complete

    def synchronize(self) -> None:
        self._log.append("host")
        self.is_complete = True

    def wait_event(self, event: FakeStream) -> None:
        self._log.append(f"stream {self.cuda_stream} waits for {event.cuda_stream}")


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Flight, dict[str, FakeStream], list[str]]]:
    """A flight that the pipe takes for one on an accelerator."""
    log: list[str] = []
    streams = {"current": FakeStream(7, log)}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams["current"])
    flight = Flight(layers())
    monkeypatch.setattr(flight.pipe, "_on_streams", True)
    yield flight, streams, log


def test_every_stream_waits_until_the_value_is_there(on_meta: Any) -> None:
    flight, streams, log = on_meta
    first: Any = streams["current"]
    weight: Any = flight.model[0].weight
    assert torch.add(weight, 0.0).eq(NEW).all() and log == []
    streams["current"] = FakeStream(8, log)
    for _ in range(2):
        torch.add(weight, 0.0)
    assert log == ["stream 8 waits for 7"] and isinstance(weight, Waiting)
    streams["current"] = first
    torch.add(flight.model[0].weight, 0.0)
    assert log == ["stream 8 waits for 7"]
    first.is_complete = True
    torch.add(flight.model[0].weight, 0.0)
    assert type(weight) is nn.Parameter


@pytest.mark.parametrize("use", [copy.deepcopy, nn.Parameter, repr, "{}".format])
def test_what_depends_on_the_class_waits_on_the_host_for_a_stream(on_meta: Any, use: Callable[[Any], Any]) -> None:
    flight, _, log = on_meta
    weight = flight.model[0].weight
    found, expected = use(weight), use(nn.Parameter(torch.full_like(weight, NEW)))
    assert log == ["host"] and type(weight) is nn.Parameter
    assert type(found) is type(expected) and repr(found) == repr(expected)
    flight.pipe.close()
    assert flight.awaited == [0], "what nobody awaited goes on waiting"


# -- code that Python does not see -----------------------------------------------------------------------------------


def test_scripted_modules_wait_for_everything_below() -> None:
    scripted = torch.jit.script(layers())
    flight = Flight(nn.Sequential(nn.Linear(3, 3), scripted))
    expected = torch.full((1, 3), NEW + 3 * NEW * torch.tensor(NEW).tanh().item())
    assert torch.allclose(scripted(torch.zeros(1, 3)), expected, atol=1e-6)
    assert flight.awaited == [2, 3, 4, 5]
    flight.launch()
    flight.pipe.finish()
    flight.pipe.close()


@pytest.mark.parametrize("on_streams", [False, True])
@pytest.mark.parametrize("how", ["in place", "wrapped", "its forward", "after it was hooked", "in a graph of others"])
def test_compiled_modules_wait_before_their_guards_look(
    monkeypatch: pytest.MonkeyPatch, how: str, on_streams: bool
) -> None:
    """One graph, made once, whatever is in flight."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = nn.Sequential(nn.Linear(3, 3), Layers())
    if how == "in place":
        model[1].compile(backend="eager", fullgraph=True)
    elif how == "wrapped":
        model[1] = torch.compile(model[1], backend="eager", fullgraph=True)
    elif how == "its forward":
        model[1].forward = torch.compile(model[1].forward, backend="eager", fullgraph=True)
    flight = Flight(model)
    flight.pipe.finish()
    log: list[str] = []
    if on_streams:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream(7, log))
        monkeypatch.setattr(flight.pipe, "_on_streams", True)
    if how == "after it was hooked":
        model[1].compile(backend="eager", fullgraph=True)
    if how == "in a graph of others":
        outer = torch.compile(lambda values: model[1](values), backend="eager")
    flight.pipe.begin_forward(training=True)  # finds what was compiled meanwhile
    flight.pipe.end_forward()
    for _ in range(4):
        flight.launch()
        if how == "in a graph of others":
            flight.pipe.finish(on_host=True)  # as DDP's own hook does when it runs inside of a graph
            output = outer(torch.zeros(1, 3))
        else:
            output = model[1](torch.zeros(1, 3))
            assert flight.awaited == [2, 3, 4, 5]
        assert torch.allclose(output, torch.full((1, 3), NEW + 3 * NEW * torch.tensor(NEW).tanh().item()), atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    assert bool(log) == on_streams


def test_compiled_code_that_nobody_knows_of_is_right_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    torch._dynamo.reset()
    flight = Flight(layers())
    total = torch.compile(lambda: flight.model[0].weight.sum() + flight.model[2].weight.sum(), backend="eager")
    for _ in range(4):
        assert float(total()) == 18 * NEW
        flight.pipe.finish()
        flight.launch()
    assert caplog.text.count("compiled code that is not a module of the model") == 1
