"""Measures what a link really carries: TCP goodput from one worker to another, and their round trip.

Also a program of its own, which runs inside the workers' namespaces:

    python selfcheck.py receive ADDRESS WARM_UP_S    # prints its port, then the goodput in bit/s
    python selfcheck.py send ADDRESS PORT            # prints the round trip in seconds
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

NUM_ROUND_TRIPS = 10
NUM_WINDOWS = 8
WINDOW_S = 0.05
TIMEOUT_S = 30.0  # a check that takes longer than this is stuck
CHUNK_BYTES = 1 << 18


@dataclass(frozen=True)
class LinkSpeed:
    """What was measured from one worker to another.

    Attributes:
        goodput_bit_s: bits of payload per second in one TCP stream, the median of several short windows (a
            busy processor stalls single ones).
        round_trip_s: median time for one byte there and back.
    """

    goodput_bit_s: float
    round_trip_s: float


def measure(sender: Sequence[str], receiver: Sequence[str], address: str, warm_up_s: float) -> LinkSpeed:
    """Sends for about half a second from one namespace to another.

    Args:
        sender, receiver: what to write before a command so that it runs there.
        address: the receiver's.
        warm_up_s: seconds at the start that do not count (saved-up tokens, TCP's slow start).
    """
    script = [sys.executable, "-I", "-S", __file__]
    receiving = subprocess.Popen(
        [*receiver, *script, "receive", address, str(warm_up_s)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert receiving.stdout is not None
        port = receiving.stdout.readline().strip()
        sent = subprocess.run(
            [*sender, *script, "send", address, port],
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        received, _ = receiving.communicate(timeout=TIMEOUT_S)
        speed = LinkSpeed(goodput_bit_s=float(received), round_trip_s=float(sent.stdout))
    except (subprocess.SubprocessError, ValueError) as error:
        raise RuntimeError(f"the link's self-check failed: {error}") from error
    finally:
        receiving.kill()
        receiving.wait()
    return speed


def _receive(address: str, warm_up_s: float) -> None:
    with socket.create_server((address, 0)) as server:
        server.settimeout(TIMEOUT_S)
        print(server.getsockname()[1], flush=True)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(TIMEOUT_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(NUM_ROUND_TRIPS):
            stream.sendall(stream.recv(1))
        buffer = bytearray(1 << 20)
        _receive_for(stream, buffer, warm_up_s)
        goodput_bit_s = statistics.median(_receive_for(stream, buffer, WINDOW_S) for _ in range(NUM_WINDOWS))
    print(goodput_bit_s)


def _receive_for(stream: socket.socket, buffer: bytearray, duration_s: float) -> float:
    """Receives for a while and returns how fast, in bit/s. What is received is overwritten again and again."""
    num_bytes = 0
    start = now = time.perf_counter()
    while now - start < duration_s:
        num_bytes += stream.recv_into(buffer)
        now = time.perf_counter()
    return num_bytes * 8 / (now - start)


def _send(address: str, port: int) -> None:
    with socket.create_connection((address, port), timeout=TIMEOUT_S) as stream:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        print(statistics.median(_round_trip(stream) for _ in range(NUM_ROUND_TRIPS)))
        data = bytes(CHUNK_BYTES)
        try:
            while True:
                stream.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the receiver has seen enough


def _round_trip(stream: socket.socket) -> float:
    start = time.perf_counter()
    stream.sendall(b"x")
    stream.recv(1)
    return time.perf_counter() - start


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(sys.argv[2], float(sys.argv[3]))
    else:
        _send(sys.argv[2], int(sys.argv[3]))
