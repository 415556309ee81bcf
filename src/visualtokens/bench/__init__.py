"""Benchmarks: speed, peak memory and multiply-adds of models, side by side."""

from visualtokens.bench.comparison import Candidate, Comparison, ComparisonRow, Mode, compare
from visualtokens.bench.macs import count_macs, count_parameters, macs_by_module
from visualtokens.bench.memory import machine, peak_memory
from visualtokens.bench.timing import Spread, Timings, Turn, interleave, matmul_canary

__all__ = [
    "Candidate",
    "Comparison",
    "ComparisonRow",
    "Mode",
    "Spread",
    "Timings",
    "Turn",
    "compare",
    "count_macs",
    "count_parameters",
    "interleave",
    "machine",
    "macs_by_module",
    "matmul_canary",
    "peak_memory",
]
