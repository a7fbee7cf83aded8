"""Collectives as generators: they know ranks and tensors, never process groups."""
