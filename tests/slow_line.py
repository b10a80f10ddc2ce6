"""A slow line between two devices of a network namespace: it delays frames and drops some.

`python -m tests.slow_line ONE OTHER` creates the devices, which may change namespaces once it
prints "ready". Each line on standard input is the one-way delay in seconds and the share of frames
to drop; EOF ends it.
"""

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF = 0x400454CA
TAP_WITHOUT_HEADER = 0x0002 | 0x1000
MAX_FRAME_BYTES = 1 << 16


def make_device(name: str) -> int:
    """Create a TAP device; its file yields the frames sent to it, and takes frames for it to
    receive.
    """
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITHOUT_HEADER))
    return device


def join(one: int, other: int) -> None:
    """Pass frames between two devices until standard input ends."""
    opposite = {one: other, other: one}
    waiting: deque[tuple[float, int, bytes]] = deque()  # arrival time, target, frame
    chance = random.Random(0)
    delay, loss = 0.0, 0.0
    while True:
        seconds = max(waiting[0][0] - time.monotonic(), 0.0) if waiting else None
        for ready in select.select([0, *opposite], [], [], seconds)[0]:
            if ready in opposite:
                frame = os.read(ready, MAX_FRAME_BYTES)
                if chance.random() >= loss:
                    waiting.append((time.monotonic() + delay, opposite[ready], frame))
            elif line := sys.stdin.readline():
                delay, loss = map(float, line.split())
            else:
                return
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, frame = waiting.popleft()
            with contextlib.suppress(OSError):  # the device is down
                os.write(device, frame)


if __name__ == "__main__":
    ends = [make_device(name) for name in sys.argv[1:]]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    join(*ends)
