"""Control thread of a coordinator: requests of this rank, connections to other ranks, and messages on lanes."""
