"""NCCL's rules for messages, kept in memory: what the adapters are measured against.

Ranks run in threads over NumPy buffers. A group completes when every message of it has met its
other end, and a message whose other end never comes, or has another size, is an error. There is no
buffering: a send moves its bytes only when the receive is posted (rendezvous).
"""

import contextlib
import ctypes
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

import oracle
from pycoll.types import DType, ReduceOp

LIMIT_S = 10.0


class Unmatched(Exception):
    """A message has no other end, or its ends differ."""


@dataclass
class Post:
    """One end of a message."""

    pointer: int
    nbytes: int
    done: bool = False


class Network:
    """All messages of a world."""

    def __init__(self, n):
        self.turn = threading.Condition()
        self.ends = {way: defaultdict(deque) for way in ("send", "recv")}
        self.moved = []
        self.failed = ""
        self.running = n
        self.waiting = {}

    def exchange(self, rank, posts):
        """Post a group and wait for all of it."""
        with self.turn:
            for way, peer, post in posts:
                pair = (rank, peer) if way == "send" else (peer, rank)
                self.ends[way][pair].append(post)
                self.match(pair)
            self.waiting[rank] = [post for _, _, post in posts]
            self.turn.notify_all()
            self.look()
            while not all(post.done for post in self.waiting[rank]) and not self.failed:
                if not self.turn.wait(LIMIT_S):
                    self.fail(f"rank {rank}: nothing moved for {LIMIT_S} s")
            del self.waiting[rank]
            if self.failed:
                raise Unmatched(self.failed)

    def match(self, pair):
        """Move what has both its ends."""
        send, recv = self.ends["send"][pair], self.ends["recv"][pair]
        while send and recv and not self.failed:
            a, b = send.popleft(), recv.popleft()
            if a.nbytes != b.nbytes:
                self.fail(f"{pair}: {a.nbytes} bytes sent, {b.nbytes} received")
                return
            ctypes.memmove(b.pointer, a.pointer, a.nbytes)
            self.moved.append((*pair, a.nbytes))
            a.done = b.done = True

    def look(self):
        """Fail when every rank that is left waits for a message that nobody will post."""
        blocked = [r for r, posts in self.waiting.items() if not all(p.done for p in posts)]
        if blocked and len(blocked) == self.running:
            self.fail(f"ranks {sorted(blocked)} wait for messages without another end")

    def fail(self, text):
        self.failed = self.failed or text
        self.turn.notify_all()

    def leave(self):
        with self.turn:
            self.running -= 1
            self.look()

    def left_over(self):
        """Messages that nobody has taken."""
        return [p for ends in self.ends.values() for p, posts in ends.items() if posts]


@dataclass
class MemoryWire:
    """One rank's end; the same methods as the bindings of NCCL."""

    network: Network
    rank: int
    name: str = "memory"
    _posts: list = field(default_factory=list)

    @contextlib.contextmanager
    def group(self):
        yield
        posts, self._posts = self._posts, []
        self.network.exchange(self.rank, posts)

    def send(self, pointer, nbytes, peer, stream):
        assert peer != self.rank
        assert 0 < nbytes
        self._posts.append(("send", peer, Post(pointer, nbytes)))

    def recv(self, pointer, nbytes, peer, stream):
        self._posts.append(("recv", peer, Post(pointer, nbytes)))


class Binding(MemoryWire):
    """NCCL's rules in memory, in the place of a binding."""

    networks: ClassVar = {}
    lock = threading.Lock()

    def __init__(self, n, rank, key):
        with self.lock:
            network = self.networks.setdefault(key, Network(n))
        super().__init__(network, rank)
        self.calls, self.closed = [], False

    @staticmethod
    def unique_id():
        return np.random.default_rng().bytes(128)

    @staticmethod
    def version():
        return 23203

    def native(self, kind, pointers, count, code, more, stream):
        self.calls.append((kind.name, count, code, more))

    def error(self):
        return ""

    def close(self):
        self.closed = True


def at(pointer, count, dtype):
    """Return an array over memory at an address."""
    nbytes = count * np.dtype(dtype).itemsize
    raw = (ctypes.c_uint8 * nbytes).from_address(pointer)
    return np.frombuffer(raw, np.uint8).view(dtype)


class NumpyDevice:
    """Folds by the oracle of the tests, straight on memory."""

    def copy(self, dst, src, nbytes, stream):
        ctypes.memmove(dst, src, nbytes)

    def fold(self, dtype, op, srcs, dsts, count, tree, scale_n, stream):
        kind = oracle.dtype(DType(dtype).name.lower())
        parts = [at(src, count, kind).copy() for src in srcs]
        wide = np.float32 if DType(dtype).rounds_once else kind
        shape = oracle.tree if tree else oracle.serial
        with np.errstate(all="ignore"):
            name = ReduceOp(op).name.lower()
            total = shape([np.asarray(part, wide) for part in parts], oracle.UFUNCS[name])
            total = oracle.divide(total, scale_n) if scale_n else total
        for dst in dsts:
            at(dst, count, kind)[:] = np.asarray(total).astype(kind)
