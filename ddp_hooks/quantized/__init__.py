"""All-reduce of gradients in fewer bits, with error feedback, and nothing else: DDP with a quarter of its bytes."""

from ddp_hooks.quantized.config import QuantizedConfig
from ddp_hooks.quantized.hook import quantized_hook
from ddp_hooks.quantized.state import QuantizedState, QuantizedStats

__all__ = ["QuantizedConfig", "QuantizedState", "QuantizedStats", "quantized_hook"]
