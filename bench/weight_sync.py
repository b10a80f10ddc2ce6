"""Measures a weight sync on this machine's CPU, from a policy rank to an engine in another process.

Reports seconds and memory by model size for both transports, beside two plain copies of the same
bytes, bare gloo broadcasts that neither copy out nor check anything, and a file written and read.
Weights are float32 with the shapes of a small Qwen3; the engine copies each tensor into its own, as
the Hugging Face engine does. Seconds are the minimum over all rounds, which filters out other work
on the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dapo_core.machine.device import device_for
from dapo_core.weights.inbox import Delivery, Inbox, open_inbox
from dapo_core.weights.links import Link, join_group, new_slots
from dapo_core.weights.outbox import Outbox
from dapo_core.weights.plan import WeightPlan, bucket_numel
from dapo_core.weights.proof import Loaded, merge_checksums, require_arrived
from dapo_core.weights.source import WeightSource

HIDDEN, FEED_FORWARD, VOCABULARY = 1024, 3072, 32_000
ATTENTION = [(2 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * HIDDEN)]
LAYER = [
    *ATTENTION,
    (FEED_FORWARD, HIDDEN),
    (FEED_FORWARD, HIDDEN),
    (HIDDEN, FEED_FORWARD),
    (HIDDEN,),
]
SAMPLE_SECONDS = 0.002  # between memory samples
BUCKET_MEGABYTES = 128
WAYS = ("shared", "gloo", "bare", "copies", "file")


@dataclass
class Peer:
    """The engine process and its connections."""

    process: Any
    pipe: Connection
    outboxes: dict[str, Outbox]
    bare: Any  # process group for plain broadcasts


def main() -> None:
    """Print a line per size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", nargs="+", type=int, default=[250, 500, 1000], help="sizes of the weights"
    )
    parser.add_argument(
        "--rounds", type=int, default=15, help="syncs per transport (default: %(default)s)"
    )
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    print(
        f"float32, buckets of {BUCKET_MEGABYTES} MiB, minimum of {arguments.rounds} syncs; "
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}\n"
        "weights MiB | seconds: shared memory  gloo  bare gloo  two copies  file "
        "| relative to two copies: shared memory  gloo  bare gloo  file"
        " | extra MiB: shared memory  gloo"
    )
    for megabytes in arguments.megabytes:
        with _connected(megabytes) as (source, peer):
            print(_line(source.plan, *measure(source, peer, arguments.rounds)), flush=True)


def measure(
    source: WeightSource, peer: Peer, rounds: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns minimum seconds and maximum extra MiB per way; the ways alternate after a warm-up."""
    tensors = source.plan.tensors.values()
    weights = {planned.name: torch.randn(planned.shape) for planned in tensors}
    with tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Callable[[], None]] = {
            **{name: partial(_sync, source, peer, name) for name in peer.outboxes},
            "bare": partial(_broadcast_alone, source.plan, peer),
            "copies": partial(
                _copy_twice,
                weights,
                {name: torch.zeros_like(tensor) for name, tensor in weights.items()},
            ),
            "file": partial(_through_a_file, weights, Path(folder) / "weights.safetensors"),
        }
        seconds: dict[str, float] = {}
        extra: dict[str, float] = {}
        for number in range(rounds + 1):
            for name in WAYS:
                with _peak_megabytes(peer) as peak:
                    began = time.perf_counter()
                    runs[name]()
                    spent = time.perf_counter() - began
                if number:
                    seconds[name] = min(seconds.get(name, spent), spent)
                    extra[name] = max(extra.get(name, 0.0), peak[0])
    return seconds, extra


def _line(plan: WeightPlan, seconds: dict[str, float], extra: dict[str, float]) -> str:
    size = sum(planned.numel for planned in plan.tensors.values()) * plan.dtype.itemsize / 2**20
    times = "  ".join(f"{seconds[name]:.3f}" for name in WAYS)
    ratios = "  ".join(
        f"{seconds[name] / seconds['copies']:.2f}" for name in WAYS if name != "copies"
    )
    return f"{size:.0f} | {times} | {ratios} | {extra['shared']:.0f}  {extra['gloo']:.0f}"


@contextmanager
def _connected(megabytes: int) -> Iterator[tuple[WeightSource, Peer]]:
    """A policy rank's weights, and an engine process connected by both transports."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1
        )
        source = _source(megabytes)
        plan, device = source.plan, device_for("cpu")
        shared, broadcast = Outbox(plan, device, 1), Outbox(plan, device, 0)
        links = {
            "shared": Link(True, shared.address, 0, 1),
            "gloo": Link(False, f"file://{folder}/engine", 1, 2),
        }
        context = multiprocessing.get_context("spawn")
        pipe, engine_pipe = context.Pipe()
        process = context.Process(target=_engine, args=(engine_pipe, plan, links), daemon=True)
        process.start()
        broadcast.join(links["gloo"].address, 2, "gloo")
        bare = join_group(_bare_address(links), 0, 2, "gloo")
        assert pipe.recv() == "ready"
        yield source, Peer(process, pipe, {"shared": shared, "gloo": broadcast}, bare)
        pipe.send(None)
        process.join()
        torch.distributed.destroy_process_group()


def _source(megabytes: int) -> WeightSource:
    """A sharded module with this many megabytes of weights, at least one layer."""
    layer_bytes = 4 * sum(torch.Size(shape).numel() for shape in LAYER)
    num_layers = max((megabytes * 2**20 - 4 * VOCABULARY * HIDDEN) // layer_bytes, 1)
    shapes = [(VOCABULARY, HIDDEN), *LAYER * num_layers]
    module = nn.Module()
    for number, shape in enumerate(shapes):
        module.register_parameter(f"weight_{number}", nn.Parameter(torch.randn(shape)))
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    names = {name for name, _ in module.named_parameters()}
    return WeightSource(module, names, torch.float32, BUCKET_MEGABYTES * 2**20, torch.device("cpu"))


def _engine(pipe: Connection, plan: WeightPlan, links: dict[str, Link]) -> None:
    """The engine process: runs a sync for each transport name received, and replies with what it
    loaded.
    """
    torch.set_num_threads(1)
    inboxes: dict[str, Inbox] = {
        name: open_inbox(link, plan, device_for("cpu")) for name, link in links.items()
    }
    bare = join_group(_bare_address(links), 1, 2, "gloo")
    loaded = {name: torch.zeros(planned.shape) for name, planned in plan.tensors.items()}
    pipe.send("ready")
    while (way := pipe.recv()) is not None:
        if way == "bare":
            _broadcast_buckets(plan, bare)
            continue
        pipe.send(_load(Delivery(inboxes[way], copies=False), loaded))
    os._exit(0)  # gloo's threads do not outlive the interpreter


def _load(delivery: Delivery, loaded: dict[str, torch.Tensor]) -> Loaded:
    for name, tensor in delivery:
        loaded[name].copy_(tensor)
    return Loaded(0, delivery.checksums)


def _sync(source: WeightSource, peer: Peer, way: str) -> None:
    peer.pipe.send(way)
    sent = merge_checksums([source.send(peer.outboxes[way])])
    require_arrived(source.plan, sent, {"engine": peer.pipe.recv()}, 0)


def _bare_address(links: dict[str, Link]) -> str:
    return f"{links['gloo'].address}-bare"


def _broadcast_alone(plan: WeightPlan, peer: Peer) -> None:
    peer.pipe.send("bare")
    _broadcast_buckets(plan, peer.bare)


def _broadcast_buckets(plan: WeightPlan, group: Any) -> None:
    """Broadcast buffers of the buckets' sizes one after another: gloo's own share of a sync."""
    buffer = new_slots(plan, torch.device("cpu"))[0]
    for bucket in plan.buckets:
        group.broadcast(
            [buffer[: bucket_numel(bucket)]], torch.distributed.BroadcastOptions()
        ).wait()
    group.barrier().wait()


def _copy_twice(weights: dict[str, torch.Tensor], targets: dict[str, torch.Tensor]) -> None:
    """Copy into new memory, like a slot, and from there into existing tensors."""
    for name, tensor in weights.items():
        targets[name].copy_(tensor.clone())


def _through_a_file(weights: dict[str, torch.Tensor], path: Path) -> None:
    """Write without syncing, and read back from the page cache."""
    save_file(weights, path)
    for name, tensor in load_file(path).items():
        weights[name].copy_(tensor)


@contextmanager
def _peak_megabytes(peer: Peer) -> Iterator[list[float]]:
    """Yields a list that holds the growth of peak memory of both processes and the shared slots, in
    MiB.
    """
    before, peak, is_over = _bytes(peer), [0.0], threading.Event()

    def sample() -> None:
        while not is_over.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], (_bytes(peer) - before) / 2**20)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def _bytes(peer: Peer) -> int:
    """Anonymous memory of both processes, and the pages of the shared slots."""
    anonymous = 0
    for pid in (os.getpid(), peer.process.pid):
        match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        anonymous += 1024 * int(match[1]) if match else 0
    return anonymous + sum(
        512 * os.stat(outbox.address).st_blocks for outbox in peer.outboxes.values()
    )


if __name__ == "__main__":
    main()
