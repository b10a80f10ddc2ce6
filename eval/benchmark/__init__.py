"""Evaluation sets behind one interface: load the problems, put them as prompts, grade the responses."""

from eval.benchmark.items import EvaluationSet, Item, Problem, Ruler
from eval.benchmark.known import BENCHMARKS, Benchmark, find_benchmark, load_set

__all__ = ["BENCHMARKS", "Benchmark", "EvaluationSet", "Item", "Problem", "Ruler", "find_benchmark", "load_set"]
