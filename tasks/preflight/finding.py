"""Findings of the preflight checks, and the error that reports those that would end a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dapo_core.errors import ConfigError, DapoError
from eval import EvaluationError
from heartbeat import heartbeat

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """The result of one check; `advice` says what to do unless the status is ok."""

    check: str
    status: str
    found: str
    advice: str = ""
    where: str = ""  # the cluster's nodes, by name and address
    why: str = ""  # the consequence

    @property
    def message(self) -> str:
        """Where, what, and the consequence."""
        where, why = f"{self.where}: " if self.where else "", f"; {self.why}" if self.why else ""
        return f"{where}{self.found}{why}"


class PreflightError(ConfigError):
    """All findings that would end the run; raised before any stage."""


class Findings(list[Finding]):
    """Findings in the order of the checks."""

    @property
    def failed(self) -> list[Finding]:
        """Findings that would end the run."""
        return [finding for finding in self if finding.status == FAIL]

    def add(self, check: str, status: str, found: str, advice: str = "") -> None:
        """Append a finding."""
        self.append(Finding(check, status, found, advice))

    @contextmanager
    def catching(self, check: str) -> Iterator[None]:
        """Turn an error into a finding, so that the remaining checks still run."""
        try:
            with heartbeat(lambda: f"preflight: {check}"):
                yield
        except (DapoError, EvaluationError) as error:
            self.add(check, FAIL, str(error))  # the message includes the advice

    def require(self) -> None:
        """Raise PreflightError if any finding would end the run."""
        lines = describe(self.failed)
        if len(lines) == 1:
            raise PreflightError(lines[0])
        if lines:
            header = f"{len(lines)} findings would end this run:"
            raise PreflightError("\n- ".join([header, *lines]))


def describe(findings: Sequence[Finding]) -> list[str]:
    """Return one line per finding: the check, the result, what to do."""
    return [
        f"{finding.check}: {finding.message}" + (f"; {finding.advice}" if finding.advice else "")
        for finding in findings
    ]


def count_checks(findings: Sequence[Finding]) -> str:
    """Return the numbers of passed checks and of warnings, such as "6 checks passed, 1 warning"."""
    passed, warnings = (sum(one.status == status for one in findings) for status in (OK, WARN))
    counts = [f"{passed} check{'' if passed == 1 else 's'} passed"]
    if warnings:
        counts.append(f"{warnings} warning{'' if warnings == 1 else 's'}")
    return ", ".join(counts)
