"""`hccn_tool`: the network port of each NPU, over which HCCL reaches other nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tasks.preflight.vendor_tools.states import LinkState, call

PLACES = ("/usr/local/Ascend/driver/tools",)
QUERIES = {
    "link": re.compile(r"^\s*link status\s*:\s*(\S+)", re.IGNORECASE | re.MULTILINE),
    "net_health": re.compile(r"net health status\s*:\s*(\S.*?)\s*$", re.IGNORECASE | re.MULTILINE),
    "tls": re.compile(r"tls switch\s*\[\s*([01])\s*\]", re.IGNORECASE),
    "ip": re.compile(r"ipaddr\s*:\s*([0-9A-Fa-f.:]+)", re.IGNORECASE),
}
AT_ONCE = 8


def links(numbers: Sequence[str]) -> tuple[list[LinkState], str]:
    """The port of each device, and why none could be read: "" when the tool answers."""
    reason = call("hccn_tool", ["-i", numbers[0], "-link", "-g"], PLACES)[1] if numbers else "no NPU to ask about"
    if reason and ("not installed" in reason or "not answer" in reason or not numbers):
        return [], reason
    asked = [(number, query) for number in numbers for query in QUERIES]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(lambda each: call("hccn_tool", ["-i", each[0], f"-{each[1]}", "-g"], PLACES)[0], asked)
    texts = dict(zip(asked, answers, strict=True))
    return [parse(number, {query: texts[number, query] for query in QUERIES}) for number in numbers], ""


def parse(number: str, texts: dict[str, str]) -> LinkState:
    """The port of one device, from the text of each query."""
    link, health, tls, address = (
        match[1] if (match := QUERIES[query].search(texts.get(query, ""))) else None for query in QUERIES
    )
    return LinkState(f"NPU {number}", link.upper() if link else None, health, tls, address)
