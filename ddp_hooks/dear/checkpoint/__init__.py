"""Checkpoint: the optimizer's state, full, sharded, and moved between layouts."""
