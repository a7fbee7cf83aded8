"""Parameters that wait by themselves until their new value has arrived.

While a gather or an update is under way the class of a parameter is a subclass of its own class. Its
``__torch_function__`` waits for that parameter, puts the class back, and runs the operation. So every read and every
write from Python waits, wherever it happens: functional uses, ``.data``, ``deepcopy``, averages, printing. Identity,
``isinstance`` and metadata stay as they are.

These do not wait: C++ code that holds a pointer, other processes, code that switches ``__torch_function__`` off,
functions that never ask it (``torch.overrides.get_ignored_functions()``: ``torch.tensor(p)``,
``torch.as_tensor(p, ...)``), and views made before the step.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_hooks.comm.torch_compat.overrides import before_transforms, without_overrides

_PROPERTIES = (
    "shape", "dtype", "device", "layout", "grad", "requires_grad", "is_leaf", "grad_fn", "ndim", "nbytes",
    "itemsize", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "retains_grad",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous", "storage_offset",
    "is_floating_point", "is_complex", "get_device", "requires_grad_", "register_hook", "__len__",
    "register_post_accumulate_grad_hook",
)  # fmt: skip
_class: Any = Tensor  # attributes of the class are descriptors
METADATA: frozenset[Any] = frozenset(
    [getattr(_class, name).__get__ for name in _PROPERTIES]
    + [_class.grad.__set__, _class.grad.__delete__, _class.requires_grad.__set__]
    + [getattr(_class, name) for name in _METHODS]
    + [torch.numel, torch.is_floating_point, torch.is_complex]
)
"""Functions that read or change no element of a parameter, so that they need not wait."""


_PLAIN = (Tensor, nn.Parameter)
_PRINTING = (Tensor.__repr__, Tensor.__format__)  # their text names the class


class Waiting:
    """Base class of parameters in flight."""

    __slots__ = ()
    own_class: type[nn.Parameter]
    wait_for: Callable[[Tensor, bool, bool], bool]  # waits for one; see FeedPipe
    wait_in: Callable[[Iterable[Any], bool, bool], bool]
    casts: Callable[..., bool] | None  # see Rounded.function_casts

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a parameter that waits for nothing, for ``type(parameter)(...)``."""
        return cls.own_class(*args, **kwargs)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA and cls.own_class is nn.Parameter:
            with without_overrides():
                return func(*args, **kwargs)
        # nn.Parameter(tensor) compares classes before and after detach().
        is_construction = func is Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__
        # Another class has to see the call, too. Functions in Python also tell of plain tensors.
        has_others = not all(kind in _PLAIN or issubclass(kind, Waiting) for kind in types)
        on_host = is_construction or has_others or func in _PRINTING  # until the parameter has its own class
        casts = cls.casts is not None and not on_host and cls.casts(func, args, kwargs)
        arrived = cls.wait_in(args, on_host, casts)
        if kwargs:
            arrived &= cls.wait_in(tuple(kwargs.values()), on_host, casts)
        if is_construction:
            return cls.own_class(args[0], args[0].requires_grad)
        if arrived:
            return func(*args, **kwargs)
        with without_overrides():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_in([self], on_host=True)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_in([self], on_host=True)
        return self.__reduce_ex__(protocol)


def waiting_class(
    own_class: type[nn.Parameter],
    wait_for: Callable[[Tensor, bool, bool], bool],
    casts: Callable[..., bool] | None = None,
) -> type[nn.Parameter]:
    """Return a subclass of ``own_class`` whose instances wait by ``wait_for``.

    ``casts``: tells of a function and its arguments whether it reads parameters only through autocast's casts.
    """
    before_transforms(_wait_in)
    # A graph must contain no wait. Not a decorator: that would import the compiler with this module.
    outside: Any = torch.compiler.disable(reason="a parameter is still on its way")
    members = {"own_class": own_class, "wait_for": staticmethod(wait_for), "wait_in": staticmethod(outside(_wait_in))}
    members["casts"] = staticmethod(outside(casts)) if casts is not None else None
    return type(own_class.__name__, (Waiting, own_class), members)


def _wait_in(values: Iterable[Any], on_host: bool, casts: bool = False) -> bool:
    """Wait for every waiting parameter in ``values``; return True if all have their own class again.

    With ``casts`` parameters are read only through autocast's casts, and may stay rounded.
    """
    arrived = True
    for value in values:
        if isinstance(value, Waiting):
            arrived &= value.wait_for(value, on_host, casts)  # type: ignore[arg-type]
        elif isinstance(value, list | tuple):
            arrived &= _wait_in(value, on_host, casts)
    return arrived
