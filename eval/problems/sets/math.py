"""MATH: competition mathematics with worked solutions."""

from eval.problems.problem_set import ProblemSet
from eval.problems.rows import SOLVED

SET = ProblemSet(
    name="math",
    about="7,500 training and 5,000 test problems with worked solutions (arXiv:2103.03874), levels 1 to 5",
    licence="MIT",
    schemas=(SOLVED,),
    train={"huggingface": "hf:DigitalLearningGmbH/MATH-lighteval@main/data/train-00000-of-00001.parquet"},
    test={
        "url": "https://raw.githubusercontent.com/microsoft/ToRA/213c1c995038c73fab10343814df7a42f990f026/"
        "src/data/math/test.jsonl#sha256=3371949f33dd702d04b43fddd7d53a028de0aaca0e76abb1b875a050297b3aa4",
        "huggingface": "hf:DigitalLearningGmbH/MATH-lighteval@main/data/test-00000-of-00001.parquet",
    },
    num_items=5000,
    scorer="math_verify",
)
