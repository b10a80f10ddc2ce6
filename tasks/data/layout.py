"""The files of a prepare-data artifact."""

TRAIN_FILE = "train.parquet"
EVAL_FILE = "eval.parquet"
BENCHMARKS = "benchmarks"


def benchmark_file(name: str) -> str:
    """The file of a benchmark of evaluate.benchmarks."""
    return f"{BENCHMARKS}/{name}.parquet"
