"""The files of a prepare-data artifact."""

TRAIN_FILE = "train.parquet"
EVAL_FILE = "eval.parquet"
