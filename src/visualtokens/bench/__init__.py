"""Measuring: speed, memory, multiply-adds, side by side."""

from visualtokens.bench.candidates import Candidate, Mode
from visualtokens.bench.comparison import Comparison, ComparisonRow, compare
from visualtokens.bench.hardware import machine
from visualtokens.bench.macs import count_macs, count_parameters, macs_by_module
from visualtokens.bench.memory import peak_memory
from visualtokens.bench.stats import Spread
from visualtokens.bench.timing import Timings, Turn, interleave, matmul_canary

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
