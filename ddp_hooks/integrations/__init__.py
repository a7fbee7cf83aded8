"""Hooks in the training loops of others: :mod:`.transformers`, :mod:`.accelerate`, :mod:`.lightning`.

Each imports its framework when it is imported itself; nothing else does.
"""

from ddp_hooks.integrations.settings import Tables

__all__ = ["Tables"]
