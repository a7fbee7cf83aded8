"""Parameters and updates that arrive in the next forward: modules and readers wait for them."""

from ddp_hooks.overlap.deferred import DeferredUpdates, copied, take_back
from ddp_hooks.overlap.pipe import FeedPipe
from ddp_hooks.overlap.rounded import Rounded

__all__ = ["DeferredUpdates", "FeedPipe", "Rounded", "copied", "take_back"]
