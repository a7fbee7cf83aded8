"""Layout: atoms, fusion groups, ranges that ranks own, and the memory of parameters."""
