"""Reduction: the backward, from ready gradients over reduce-scatters to gradients of shards."""
