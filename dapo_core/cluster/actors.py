"""Fetches results of Ray actors, and names the actor that died if there are none."""

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

PING_SECONDS = 5.0  # of silence before every actor is pinged
SEARCH_SECONDS = 20.0  # to find the death behind a failed call: Ray takes 15 to declare a node dead
# Ray's errors for an actor whose process is gone or unreachable; training cannot continue after either.
DEATHS = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, LocalRayletDiedError)
# Words in Ray's messages, which have thousands of characters; the first match counts.
REASONS = (
    ("is unavailable", "it cannot be reached, so its process or its node is lost"),
    ("low on memory", "Ray ended it because its node ran low on memory"),
    ("Owner's node has crashed", "Ray itself ended on the trainer's node"),
    ("node has died", "its node is lost"),
    ("ray.kill", "it was ended through Ray"),
    ("SIGTERM", "it was ended by SIGTERM"),
    ("connection error", "it was killed, as the kernel does when memory runs out, or crashed"),
)
MAX_REASON_CHARACTERS = 200


@dataclass
class _Actor:
    name: str  # such as `policy rank 1 of 2`
    handle: Any
    ping: Any  # reference of an unanswered call of `place`, or None
    place: str | None = None  # where its process runs, once known


class Actors:
    """The actors of a training by name: fetches their results, and finds the one that died.

    A ping calls the actor's `place`. It queues behind the actor's other calls, so a busy or hanging actor does not
    answer it, while it fails at once on one whose process is gone.
    """

    def __init__(self) -> None:
        self._actors: list[_Actor] = []
        self._next_ping = 0.0

    def add(self, role: str, handles: Sequence[Any]) -> None:
        """Watch the actors of a role, which names them: `policy rank 0 of 2` and so on."""
        self._actors += [
            _Actor(f"{role} {number} of {len(handles)}", handle, handle.place.remote())
            for number, handle in enumerate(handles)
        ]

    def get(self, references: Any, max_seconds: float = math.inf) -> Any:
        """Results of the calls, or the first error.

        DapoErrors and OSErrors are raised as themselves, not as Ray's copies. Raises WorkerDied when any actor has
        died, even if its call is not among these, and Ray's GetTimeoutError after `max_seconds`.
        """
        deadline = time.monotonic() + max_seconds
        while True:
            seconds_left = max(deadline - time.monotonic(), 0.0)
            try:
                return ray.get(references, timeout=min(seconds_left, PING_SECONDS))
            except RayTaskError as error:  # possibly because another actor died
                if isinstance(error.cause, CheckpointError):  # shards are saved and loaded together
                    self._search()
                if isinstance(error.cause, DapoError | OSError):  # Ray's copy of an OSError has no errno
                    raise error.cause from error
                self._search()
                raise
            except ObjectLostError:  # with or without its node
                self._search()
                raise
            except DEATHS as error:
                self._search()
                raise WorkerDied(f"a policy rank or rollout worker died: {death_reason(error)}") from error
            except GetTimeoutError:
                if seconds_left <= PING_SECONDS:
                    raise
                self.check()

    def check(self) -> None:
        """Raise WorkerDied if an actor is known to be dead; pings at most every few seconds."""
        self._collect_pings()
        if time.monotonic() >= self._next_ping:
            self._next_ping = time.monotonic() + PING_SECONDS
            self._ping()

    def _search(self) -> None:
        """Raise WorkerDied if an actor is dead; waits until a ping fails or all are answered."""
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
        """Record the answers so far; raises WorkerDied for a dead actor."""
        waiting = [actor for actor in self._actors if actor.ping is not None]
        if not waiting:
            return
        done = set(ray.wait([actor.ping for actor in waiting], num_returns=len(waiting), timeout=0)[0])
        for actor in waiting:
            if actor.ping in done:
                try:
                    actor.place = ray.get(actor.ping)
                except DEATHS as error:
                    whom = actor.name if actor.place is None else f"{actor.name} ({actor.place})"
                    raise WorkerDied(f"{whom} died: {death_reason(error)}") from error
                actor.ping = None


def death_reason(error: RayError) -> str:
    """Why a process died, as a phrase."""
    text = str(error).strip()
    for word, phrase in REASONS:
        if word in text:
            return phrase
    return text.splitlines()[-1][:MAX_REASON_CHARACTERS] if text else type(error).__name__
