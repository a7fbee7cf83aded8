"""Hooks in other training loops: :mod:`.transformers`, :mod:`.accelerate`, :mod:`.lightning`.

Each of these modules imports its framework; this package imports none.
"""

from ddp_hooks.integrations.settings import Tables

__all__ = ["Tables"]
