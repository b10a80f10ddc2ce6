"""Fetches results from Ray actors and identifies actors that died."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from dapo_core.errors import CheckpointError, DapoError, WorkerDied

PING_SECONDS = 5.0  # of silence before all actors are pinged
# to find the dead actor behind a failed call: Ray takes 15 to declare a node dead
SEARCH_SECONDS = 20.0
# Ray's errors for an actor whose process is dead or unreachable
DEATHS = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, LocalRayletDiedError)
# Phrases in Ray's messages, which have thousands of characters; the first match counts.
REASONS = (
    ("is unavailable", "it cannot be reached, so its process or node is lost"),
    ("low on memory", "Ray killed it because its node ran low on memory"),
    ("Owner's node has crashed", "Ray itself ended on the trainer's node"),
    ("node has died", "its node is lost"),
    ("ray.kill", "it was killed through Ray"),
    ("SIGTERM", "it was ended by SIGTERM"),
    (
        "connection error",
        "it was killed, for example by the kernel when memory ran out, or it crashed",
    ),
)
MAX_REASON_CHARACTERS = 200


@dataclass
class _Actor:
    name: str  # such as `policy rank 1 of 2`
    handle: Any
    ping: Any  # reference of a pending call of `place`, or None
    place: str | None = None  # pid and node of its process, once known


class Actors:
    """The named actors of a training: fetches their results and finds the one that died.

    A ping calls the actor's `place`. It queues behind the actor's other calls, so a busy or hanging
    actor does not answer, but it fails immediately if the process is dead.
    """

    def __init__(self) -> None:
        self._actors: list[_Actor] = []
        self._next_ping = 0.0

    def add(self, role: str, handles: Sequence[Any]) -> None:
        """Watch the actors of a role, named `policy rank 0 of 2` and so on."""
        self._actors += [
            _Actor(f"{role} {number} of {len(handles)}", handle, handle.place.remote())
            for number, handle in enumerate(handles)
        ]

    def get(self, references: Any, max_seconds: float = math.inf) -> Any:
        """Return the results of the calls, or raise the first error.

        DapoErrors and OSErrors are raised unwrapped. Raises WorkerDied if any actor has died, even
        one that none of these calls went to, and Ray's GetTimeoutError after `max_seconds`.
        """
        deadline = time.monotonic() + max_seconds
        while True:
            seconds_left = max(deadline - time.monotonic(), 0.0)
            try:
                return ray.get(references, timeout=min(seconds_left, PING_SECONDS))
            except RayTaskError as error:  # possibly because another actor died
                if isinstance(error.cause, CheckpointError):  # all ranks save and load together
                    self._search()
                if isinstance(error.cause, DapoError | OSError):  # Ray's wrapper loses errno
                    raise error.cause from error
                self._search()
                raise
            except ObjectLostError:  # may or may not mean a lost node
                self._search()
                raise
            except DEATHS as error:
                self._search()
                reason = death_reason(error)
                raise WorkerDied(f"a policy rank or rollout worker died: {reason}") from error
            except GetTimeoutError:
                if seconds_left <= PING_SECONDS:
                    raise
                self.check()

    def put(self, value: Any) -> Any:
        """Put a value into Ray's object store, for calls that take it as an argument."""
        return ray.put(value)

    def wait(self, references: Sequence[Any], max_seconds: float) -> list[Any]:
        """Return one reference whose result is there; [] if none is within `max_seconds`."""
        return ray.wait(list(references), num_returns=1, timeout=max_seconds)[0]

    def check(self) -> None:
        """Raise WorkerDied if an actor is known to be dead; pings at most every PING_SECONDS."""
        self._collect_pings()
        if time.monotonic() >= self._next_ping:
            self._next_ping = time.monotonic() + PING_SECONDS
            self._ping()

    def _search(self) -> None:
        """Ping all actors until one fails or all answer; raises WorkerDied for a dead one."""
        self._collect_pings()
        self._ping()
        with suppress(GetTimeoutError, *DEATHS):
            ray.get([actor.ping for actor in self._actors], timeout=SEARCH_SECONDS)
        self._collect_pings()

    def _ping(self) -> None:
        for actor in self._actors:
            if actor.ping is None:
                actor.ping = actor.handle.place.remote()

    def _collect_pings(self) -> None:
        """Record answered pings; raises WorkerDied for a dead actor."""
        waiting = [actor for actor in self._actors if actor.ping is not None]
        for actor in waiting:
            try:
                actor.place = ray.get(actor.ping, timeout=0)
                actor.ping = None
            except GetTimeoutError:
                continue
            except DEATHS as error:
                label = actor.name if actor.place is None else f"{actor.name} ({actor.place})"
                raise WorkerDied(f"{label} died: {death_reason(error)}") from error


def death_reason(error: RayError) -> str:
    """Return why a process died, as a phrase."""
    text = str(error).strip()
    for phrase, reason in REASONS:
        if phrase in text:
            return reason
    return text.splitlines()[-1][:MAX_REASON_CHARACTERS] if text else type(error).__name__
