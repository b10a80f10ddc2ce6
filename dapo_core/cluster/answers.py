"""What Ray's actors answer, and which of them died when they do not."""

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

from dapo_core.errors import DapoError, WorkerDied

LOOK_SECONDS = 5.0  # of silence, after which everyone is asked for a sign of life
SEARCH_SECONDS = 20.0  # for the death that made a call fail elsewhere: Ray takes 15 to give up a node
# Ray's errors when an actor's process is gone, or out of reach, which is final for training as well.
DEATHS = (RayActorError, WorkerCrashedError, OutOfMemoryError, NodeDiedError, LocalRayletDiedError)
# Words in Ray's texts of some thousand characters; the first that is found counts.
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
class _Member:
    name: str  # such as `policy rank 1 of 2`
    actor: Any
    sign: Any  # reference of the sign of life it owes, or None
    place: str | None = None  # where its process runs, once it has said so

    @property
    def whereabouts(self) -> str:
        return self.name if self.place is None else f"{self.name} ({self.place})"


class Roster:
    """Every actor of a training run by name: fetches what they answer, and tells who died.

    A sign of life is a call of the actor's `place`, which says where its process runs. It waits behind the calls
    that the actor has, so one that is busy or hangs owes it, and one whose process is gone fails it at once.
    """

    def __init__(self) -> None:
        self._members: list[_Member] = []
        self._next_look = 0.0

    def add(self, role: str, actors: Sequence[Any]) -> None:
        """Take in the actors of a role; `policy rank` names them `policy rank 0 of 2` and so on."""
        self._members += [
            _Member(f"{role} {number} of {len(actors)}", actor, actor.place.remote())
            for number, actor in enumerate(actors)
        ]

    def get(self, references: Any, max_seconds: float = math.inf) -> Any:
        """Results of the calls; the first that fails ends this, whatever the others do.

        An error of ours or of the system arrives as itself, not as Ray's copy of it. Raises WorkerDied when a
        process is gone, be it one whose call failed because of that or one that nobody waits for here; and Ray's
        GetTimeoutError after `max_seconds`.
        """
        deadline = time.monotonic() + max_seconds
        while True:
            seconds_left = max(deadline - time.monotonic(), 0.0)
            try:
                return ray.get(references, timeout=min(seconds_left, LOOK_SECONDS))
            except RayTaskError as error:  # raised in a worker, also of what another one left to it
                if isinstance(error.cause, DapoError | OSError):  # Ray's copy of the latter has no errno
                    raise error.cause from error
                self._search()
                raise
            except ObjectLostError:  # with its node, or for a reason that is no death
                self._search()
                raise
            except DEATHS as error:
                self._search()
                raise WorkerDied(f"a policy rank or rollout worker died: {death_reason(error)}") from error
            except GetTimeoutError:
                if seconds_left <= LOOK_SECONDS:
                    raise
                self.look()

    def look(self) -> None:
        """Raise WorkerDied when an actor is known to be dead; asks every few seconds, however often called."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            self._take_signs()
            self._ask_for_signs()

    def _search(self) -> None:
        """Raise WorkerDied when an actor is dead, waiting until its call says so or all others have answered."""
        self._take_signs()
        self._ask_for_signs()
        with suppress(GetTimeoutError, *DEATHS):
            ray.get([member.sign for member in self._members], timeout=SEARCH_SECONDS)
        self._take_signs()

    def _ask_for_signs(self) -> None:
        for member in self._members:
            if member.sign is None:
                member.sign = member.actor.place.remote()

    def _take_signs(self) -> None:
        """Note who gave a sign of life since it was asked; raise WorkerDied for one who no longer can."""
        owed = [member for member in self._members if member.sign is not None]
        if not owed:
            return
        given = set(ray.wait([member.sign for member in owed], num_returns=len(owed), timeout=0)[0])
        for member in owed:
            if member.sign in given:
                try:
                    member.place = ray.get(member.sign)
                except DEATHS as error:
                    raise WorkerDied(f"{member.whereabouts} died: {death_reason(error)}") from error
                member.sign = None


def death_reason(error: RayError) -> str:
    """Why a process is gone, in a phrase."""
    text = str(error).strip()
    for word, phrase in REASONS:
        if word in text:
            return phrase
    return text.splitlines()[-1][:MAX_REASON_CHARACTERS] if text else type(error).__name__
