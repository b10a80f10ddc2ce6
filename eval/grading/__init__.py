"""Response text to verdicts: find the answer, compare it with the gold answer under two rulers, judge."""

from eval.grading.verdict import GRADER, VERDICTS, Grade, Verdict, extract_answer, extract_boxed, grade

__all__ = ["GRADER", "VERDICTS", "Grade", "Verdict", "extract_answer", "extract_boxed", "grade"]
