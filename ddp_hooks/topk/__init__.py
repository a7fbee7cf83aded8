"""Sparse all-reduce with error feedback: SparDL and the algorithms that it is measured against."""
