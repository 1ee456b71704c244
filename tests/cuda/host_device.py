"""A device library in memory: what Python hands over is unpacked and run on the host, by the book.

It stands in for libpycoll_cuda.so and CuPy where there is no device, to try the Python side: which
plans, numbers and pointers reach the library, what comes back, and when errors are raised. It is
no model of a GPU: launches run at once, and kernels are the oracle's folds. Ranks of a group of
processes are threads here.
"""

import ctypes
import itertools
import threading
import types

import numpy as np

from cuda.memory_wire import NumpyDevice
from pycoll.cuda import library as real
from pycoll.cuda.program import DeviceFold
from pycoll.errors import ArgumentError, ScheduleError
from pycoll.schedule.plan import FOLD_COMPLETE, FOLD_TREE, INSTR, OPERAND, Opcode
from pycoll.types import DType

LIMIT_S = 10.0


class Rank:
    """One rank's plan with numbers, unpacked from the structure that the library gets."""

    def __init__(self, spec):
        for name, _ in real.Spec._fields_:
            setattr(self, name, getattr(spec, name))
        self.code = np.frombuffer(self._bytes(spec.code, spec.ninstructions, INSTR), INSTR)
        self.operands = np.frombuffer(self._bytes(spec.operands, spec.noperands, OPERAND), OPERAND)

    @staticmethod
    def _bytes(pointer, count, dtype):
        return ctypes.string_at(pointer, count * dtype.itemsize) if count else b""

    def place(self, operand, k, world):
        """Return address and elements of a chunk."""
        rank, buffer, chunk = (int(v) for v in operand)
        if buffer == 2:
            return world.cells[rank] + (chunk + k) * self.chunk * self.itemsize, self.chunk
        base = (world.ins if buffer == 0 else world.outs)[rank]
        chunk = (chunk + k) % self.chunks
        offset = chunk * self.chunk
        length = max(0, min(self.chunk, self.count - offset))
        if (self.layout_in if buffer == 0 else self.layout_out) == 1:
            offset -= rank * (self.chunks // world.n) * self.chunk
        assert base or not length, "a null array is used"
        return base + offset * self.itemsize, length

    def fold(self, instr, world):
        """Run one fold."""
        device, first, nsrc = NumpyDevice(), int(instr["arg"]), int(instr["nsrc"])
        operands = self.operands[first : first + nsrc + int(instr["ndst"])]
        complete = bool(instr["flags"] & FOLD_COMPLETE) and not self.scale_at_exit
        scale_n = self.scale_n if complete else 0
        for k in range(int(instr["count"])):
            places = [self.place(o, k, world) for o in operands]
            count, where = min(n for _, n in places), [p for p, _ in places]
            if not count:
                continue
            if nsrc == 1 and not scale_n:
                for target in where[1:]:
                    device.copy(target, where[0], count * self.itemsize, 0)
                continue
            step = DeviceFold((), (), count, bool(instr["flags"] & FOLD_TREE), scale_n)
            device.fold(self.dtype, self.op, step, where[:nsrc], where[nsrc:], 0)

    def scale_out(self, world):
        """Divide the output of an average."""
        share = self.chunks // world.n
        own = range(self.rank * share, (self.rank + 1) * share)
        for chunk in own if self.layout_out == 1 else range(self.chunks):
            where, count = self.place((self.rank, 1, chunk), 0, world)
            if count and world.outs[self.rank]:
                NumpyDevice().scale(self.dtype, where, count, self.scale_n, 0)


class World:
    """One run of a call by all ranks: their arrays, and the step that each has published."""

    def __init__(self, n, turn):
        self.n, self.turn = n, turn
        self.ins, self.outs, self.cells, self.steps = ([0] * n for _ in range(4))
        self.left = 0

    def run(self, rank, absent=()):
        """Walk one rank's plan, waiting for its peers; return whom it has given up on."""
        for instr in rank.code:
            if instr["op"] == Opcode.FOLD:
                rank.fold(instr, self)
            elif instr["op"] == Opcode.SIGNAL:
                with self.turn:
                    self.steps[rank.rank] = int(instr["arg"])
                    self.turn.notify_all()
            elif instr["op"] == Opcode.WAIT:
                peer, step = int(instr["peer"]), int(instr["arg"])
                with self.turn:
                    met = self.turn.wait_for(
                        lambda p=peer, s=step: self.steps[p] >= s or p in absent, LIMIT_S
                    )
                if not met or peer in absent:
                    return peer, step
        if rank.scale_at_exit:
            rank.scale_out(self)
        with self.turn:
            self.steps[rank.rank] = 0xFFFE
            self.turn.notify_all()
        return None


class HostLibrary:
    """The functions of `pycoll.cuda.library.Library`, in memory."""

    path = types.SimpleNamespace(name="host")

    def __init__(self):
        self._numbers = itertools.count(1)
        self.turn = threading.Condition()
        self.memory, self.groups, self.made, self.launches = {}, {}, {}, []
        self.worlds = {}

    def versions(self):
        return 13000, 13000

    def device_count(self):
        return 1

    def device(self, index):
        return real.DeviceInfo(name=b"host", runnable=1, uuid=(ctypes.c_uint8 * 16)(1))

    def copy(self, dst, src, nbytes, stream):
        ctypes.memmove(dst, src, nbytes)

    def pointer(self, name, *args):
        return getattr(self, name)(*args)

    def call(self, name, *args):
        getattr(self, name)(*args)

    def preload(self, device):
        pass

    def malloc(self, device, nbytes):
        data = np.zeros(nbytes, np.uint8)
        self.memory[data.ctypes.data] = data
        return data.ctypes.data

    def free(self, pointer):
        del self.memory[pointer]

    def group_virtual(self, device, n, max_blocks):
        return self._group(n, range(n), 0)

    def group_peer(self, device, rank, n, max_blocks, key):
        return self._group(n, [rank], key)

    def _group(self, n, ranks, key):
        number = next(self._numbers)
        self.groups[number] = {"n": n, "ranks": ranks, "key": key, "cells": None, "heaps": None}
        self.groups[number] |= {"control": self.malloc(0, 64), "error": None, "calls": 0}
        return number

    def group_control(self, group):
        return self.groups[group]["control"]

    def group_connect(self, group, controls, heaps, heap_bytes, cells, cell_bytes):
        facts = self.groups[group]
        facts["cells"] = [int(c) for c in cells]
        facts["heaps"] = [(int(h), int(h) + heap_bytes) for h in heaps] if heaps else None
        facts["cell_bytes"] = cell_bytes

    def ipc_export(self, pointer, ipc):
        ipc._obj.offset = pointer

    def call_create(self, group, specs, count):
        facts = self.groups[group]
        ranks = [Rank(spec) for spec in specs]
        assert [r.rank for r in ranks] == list(facts["ranks"])
        if any(r.slots for r in ranks) and not facts["cells"]:
            raise ScheduleError("a plan needs cells")
        number = next(self._numbers)
        self.made[number] = group, ranks
        return number

    def call_destroy(self, call):
        del self.made[call]

    def launch(self, call, ins, outs, blocks, threads, method, timeout_ns, absent, stream):
        group, ranks = self.made[call]
        facts = self.groups[group]
        away = {r for r in range(facts["n"]) if absent >> r & 1}
        world = self._world(facts)
        for rank, x, out in zip(ranks, ins, outs, strict=True):
            r = rank.rank
            world.ins[r], world.outs[r] = int(x or 0), int(out or 0)
            for pointer in (x, out) if rank.direct and facts["heaps"] else ():
                low, high = facts["heaps"][r]
                if pointer and not low <= pointer < high:
                    raise ArgumentError("an array of a direct call lies outside of the heap")
        world.cells = facts["cells"] or [0] * facts["n"]
        self._meet(world, len(ranks))
        self.launches.append((stream, [r.rank for r in ranks], timeout_ns))
        given_up = []

        def walk(rank):
            found = world.run(rank, away)
            if found:
                given_up.append((rank.rank, *found))
                with self.turn:
                    away.add(rank.rank)
                    self.turn.notify_all()

        threads = [threading.Thread(target=walk, args=(r,)) for r in ranks if r.rank not in away]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if given_up:
            who, peer, step = given_up[0]
            facts["error"] = real.KernelError(
                kind=real.TIMEOUT, rank=who, peer=peer, expected=1 << 16 | step, waited_ns=10**9
            )

    def _world(self, facts):
        """Return the run that this launch belongs to: the k-th of every rank is one run."""
        key = facts["key"], facts["n"], facts["calls"]
        if len(facts["ranks"]) == facts["n"]:
            return World(facts["n"], self.turn)
        facts["calls"] += 1
        with self.turn:
            return self.worlds.setdefault(key, World(facts["n"], self.turn))

    def _meet(self, world, count):
        """Wait until the arrays of all ranks are known."""
        with self.turn:
            world.left += count
            self.turn.notify_all()
            assert self.turn.wait_for(lambda: world.left == world.n, LIMIT_S)

    def fold(self, dtype, op, tree, scale_n, srcs, nsrc, dsts, ndst, count, stream):
        step = DeviceFold((), (), count, bool(tree), scale_n)
        sources, targets = [int(p) for p in srcs[:nsrc]], [int(p) for p in dsts[:ndst]]
        NumpyDevice().fold(DType(dtype), op, step, sources, targets, stream)

    def group_failed(self, group, failed):
        failed._obj.value = int(self.groups[group]["error"] is not None)

    def group_error(self, group, rank, error):
        found = self.groups[group]["error"]
        if found is not None and found.rank == rank:
            ctypes.pointer(error._obj)[0] = found

    def group_abort(self, group):
        facts = self.groups[group]
        facts["error"] = facts["error"] or real.KernelError(kind=real.ABORTED)

    def group_reset(self, group):
        self.groups[group]["error"] = None

    def group_destroy(self, group):
        assert not any(g == group for g, _ in self.made.values()), "calls are left"
        del self.groups[group]
