"""Harness of all benchmarks: one command line, workers that take turns, one table, one page."""

from recipes.benchmarks.harness.command import Benchmark, Run, add_timing, main_of
from recipes.benchmarks.harness.launch import run_job
from recipes.benchmarks.harness.records import append_record, read_records

__all__ = ["Benchmark", "Run", "add_timing", "append_record", "main_of", "read_records", "run_job"]
