"""The files of a prepare-data artifact."""

TRAIN_FILE = "train.parquet"
EVAL_FILE = "eval.parquet"
BENCHMARKS = "benchmarks"
IMAGES = "images"  # pictures by the sha256 of their content


def benchmark_file(name: str) -> str:
    """The file of a benchmark of evaluate.benchmarks."""
    return f"{BENCHMARKS}/{name}.parquet"
