"""A second opinion on programs: they are executed with numbers, in random order, without buffers.

It shares nothing with the proof: a chunk is the function ``y = a x + b`` of one number, with `a`
and `b` of the version that its stage takes; a stage is a list and a memory that forgets what is
freed.
"""

import random
from collections import defaultdict

from pycoll.parallel.pipeline.program import Use


class Wrong(Exception):
    """The program does not compute what one process computes."""


def _a(chunk, version):
    return 1.0 + 0.125 * chunk + 0.5**8 * version


def expected(micros, depth, owner, version_of):
    """Return by chunk the gradients of `a` in the order in which one process adds them."""
    found = defaultdict(list)
    for i in range(micros):
        x, inputs = 1.0 + i / 16, []
        for c in range(depth):
            inputs.append(x)
            x = _a(c, version_of(owner(c), i, c)) * x + c
        dx = x
        for c in reversed(range(depth)):
            found[c].append((i, dx * inputs[c]))
            dx *= _a(c, version_of(owner(c), i, c))
    return dict(found)


class Stage:
    def __init__(self, number, ops, schedule, p, m):
        self.number, self.ops, self.at = number, ops, 0
        self.schedule, self.p, self.m = schedule, p, m
        self.values, self.saved, self.version = {}, {}, 0
        self.gradients, self.versions, self.reduced = defaultdict(list), {}, defaultdict(list)
        self.peak = 0

    def head(self):
        return self.ops[self.at] if self.at < len(self.ops) else None

    def run(self, op, depth, version_of):
        i, c = op.micro, op.chunk
        try:
            if op.kind == "F":
                if (i, c) in self.versions:
                    raise Wrong("twice")
                x = 1.0 + i / 16 if c == 0 else self.values.pop(("x", i, c - 1))
                self.versions[i, c] = version_of(self.number, i, c, self.version)
                self.saved[i, c] = x
                self.peak = max(self.peak, len(self.saved))
                y = _a(c, self.versions[i, c]) * x + c
                self.values["x", i, c] = y
            elif op.kind == "B":
                dy = (
                    self.values.pop(("x", i, c))
                    if c == depth - 1
                    else self.values.pop(("dx", i, c + 1))
                )
                self.values["dy", i, c] = dy
                self.values["dx", i, c] = dy * _a(c, self.versions[i, c])
                _ = self.saved[i, c]
            elif op.kind == "W":
                dy = self.values.pop(("dy", i, c))
                self.gradients[c].append((i, dy * self.saved[i, c]))
            elif op.kind == "FREE":
                del self.saved[i, c]
            elif op.kind == "REDUCE":
                self.reduced[i].append((c, len(self.gradients[c])))
            elif op.kind == "STEP":
                per = self.schedule.per_step(self.m)
                chunks = self.schedule.chunks
                if sorted(n for _, n in self.reduced[i]) != [per * (i + 1)] * chunks:
                    raise Wrong("a step without all gradients")
                if i != self.version:
                    raise Wrong("steps out of order")
                self.version += 1
            else:
                raise Wrong(f"{op} is no operation")
        except KeyError as missing:
            raise Wrong(f"stage {self.number}: {op} lacks {missing}") from None
        self.at += 1


class World:
    """All stages of a program, and the versions of the parameters that they have taken."""

    def __init__(self, program):
        self.program, schedule = program, program.schedule
        self.stages = [
            Stage(s, ops, schedule, program.p, program.m) for s, ops in enumerate(program.stages)
        ]
        self.used = {}

    def version_of(self, stage, i, c, newest):
        rule, program = self.program.schedule.weights, self.program
        version = newest if rule is None else rule(Use(i, stage, newest, program.p, program.m))
        if not 0 <= version <= newest:
            raise Wrong("a version that is not there")
        self.used[i, c] = version
        return version

    def receiver(self, stage, op):
        """Return the stage that takes what is sent, if it waits for just that."""
        target = op.chunk + (1 if op.what == "x" else -1)
        if not op.what or not 0 <= target < self.program.depth:
            return None
        peer = self.stages[self.program.owner(target)]
        waits = peer is not stage and peer.head() == op._replace(kind="RECV")
        return peer if waits else None

    def ready(self):
        """Return the stages that can go on, each with the peer of a transfer."""
        found = []
        for stage in self.stages:
            op = stage.head()
            if op is None or op.kind == "RECV":
                continue
            peer = self.receiver(stage, op) if op.kind == "SEND" else None
            if op.kind != "SEND" or peer is not None:
                found.append((stage, peer))
        return found

    def step(self, stage, peer):
        op = stage.head()
        if peer is None:
            stage.run(op, self.program.depth, self.version_of)
            return
        key = op.what, op.micro, op.chunk
        if key not in stage.values:
            raise Wrong(f"{op} has nothing to send")
        peer.values[key] = stage.values.pop(key)
        stage.at += 1
        peer.at += 1

    def check(self):
        program, schedule = self.program, self.program.schedule
        wanted = expected(
            program.micros, program.depth, program.owner, lambda _, i, c: self.used.get((i, c), 0)
        )
        if {c: terms for s in self.stages for c, terms in s.gradients.items()} != wanted:
            raise Wrong("other gradients, or added in another order")
        for stage in self.stages:
            if stage.saved:
                raise Wrong("an activation is left over")
            if stage.peak > schedule.chunks * schedule.live(stage.number, program.p, program.m):
                raise Wrong("too many live activations")
            if stage.version != program.micros // schedule.per_step(program.m):
                raise Wrong("a step is missing")


def replay(program, seed=0):
    """Execute a program.

    Raises:
        Wrong: If it cannot go on, uses what is not there, or has other gradients than one process.
    """
    rng, world = random.Random(seed), World(program)
    while any(stage.head() for stage in world.stages):
        ready = world.ready()
        if not ready:
            raise Wrong("nobody can go on")
        world.step(*rng.choice(ready))
    world.check()
