"""Executors of algorithms: lanes of threads (gloo) and of streams (NCCL), and the in-process fabric."""
