"""Reduction of gradients: groups of parameters, one backward, and arrival in the next forward."""
