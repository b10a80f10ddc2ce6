"""Response text to verdicts: find the answer, compare it with the gold answer under two rulers, judge."""

from eval.grading.aisbench import extract_aisbench, is_equal_aisbench
from eval.grading.extraction import extract_answer, extract_boxed
from eval.grading.judge import Judge
from eval.grading.verdict import GRADER, VERDICTS, Grade, Verdict, grade

__all__ = [
    "GRADER",
    "VERDICTS",
    "Grade",
    "Judge",
    "Verdict",
    "extract_aisbench",
    "extract_answer",
    "extract_boxed",
    "grade",
    "is_equal_aisbench",
]
