"""Exchanges of sharded tables: ids, vectors, gradient rows and whole tables."""
