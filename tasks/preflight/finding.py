"""What a check found, and the error of findings that would end a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dapo_core.errors import ConfigError, DapoError
from eval import EvaluationError

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """What one check found; `advice` says what to do when its status is not ok."""

    check: str
    status: str
    found: str
    advice: str = ""
    where: str = ""  # nodes of a cluster, by name and address
    why: str = ""  # what comes of it

    @property
    def said(self) -> str:
        """Where, what, and what comes of it."""
        return (f"{self.where}: " if self.where else "") + self.found + (f"; {self.why}" if self.why else "")


class PreflightError(ConfigError):
    """Findings that would end the run, all of them; raised before any stage."""


class Findings(list[Finding]):
    """Findings in the order of their checks."""

    @property
    def failed(self) -> list[Finding]:
        """Those that would end the run."""
        return [finding for finding in self if finding.status == FAIL]

    def add(self, check: str, status: str, found: str, advice: str = "") -> None:
        """Append a finding."""
        self.append(Finding(check, status, found, advice))

    @contextmanager
    def catching(self, check: str) -> Iterator[None]:
        """Turn an error that is raised inside into a finding: the next checks are made all the same."""
        try:
            yield
        except (DapoError, EvaluationError) as error:
            self.add(check, FAIL, str(error))  # which says what to do

    def require(self) -> None:
        """Raise PreflightError if any finding would end the run."""
        lines = describe(self.failed)
        if len(lines) == 1:
            raise PreflightError(lines[0])
        if lines:
            raise PreflightError("\n- ".join([f"{len(lines)} findings would end this run:", *lines]))


def describe(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding: the check, what it found, what to do."""
    return [
        f"{finding.check}: {finding.said}" + (f"; {finding.advice}" if finding.advice else "")
        for finding in findings
    ]
