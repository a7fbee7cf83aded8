"""Another name of :mod:`ddp_hooks.comm.torch_compat`."""

from ddp_hooks.comm.torch_compat import *  # noqa: F403
