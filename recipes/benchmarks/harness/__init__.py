"""Harness of all benchmarks: one command line, workers that take turns, one table, one page."""

from recipes.benchmarks.harness.command import Benchmark, Run, add_timing, main_of
from recipes.benchmarks.harness.launch import run_job

__all__ = ["Benchmark", "Run", "add_timing", "main_of", "run_job"]
