"""Benchmarks: emulated compute on an emulated network, next to the bounds that no schedule can pass."""
