"""Who makes up the next communicator: both sides of the meetings, without processes."""

import threading
import time

import pytest

from pycoll.cli.job.meetings import Meetings, Place, pair
from pycoll.errors import CollTimeout, PeerLeft, PeerLost, TransportError
from pycoll.runtime.startup.meeting import Link

PID = 1 << 22  # of no process


class Part:
    """Stands for a session: what a process has made of an offer."""

    def __init__(self, launch):
        self.rank, self.world_size = launch.rank, launch.world_size
        self.link, self.epoch, self.open = None, None, True

    def close(self):
        self.open = False


class Job:
    """Processes that are threads, and a launcher that is asked by hand."""

    def __init__(self, least, places):
        self.meetings, self.links, self.lines = Meetings(least), {}, {}
        self.results, self.threads = {}, []
        for place in places:
            self.start(place)

    def start(self, place):
        self.lines[place], theirs = pair()
        self.meetings.add(place, PID + place, self.lines[place])
        if place in self.links:
            self.links[place].close()
        self.links[place] = Link(theirs)

    def come(self, place, join=Part, limit_s=10.0):
        """Let a process call `meet`."""

        def body():
            try:
                self.results[place] = self.links[place].meet(join, limit_s)
            except BaseException as error:
                self.results[place] = error

        self.results.pop(place, None)
        self.threads.append(threading.Thread(target=body, daemon=True))
        self.threads[-1].start()

    def turn(self, until, limit_s=10.0):
        """Let the launcher work until a condition holds."""
        give_up = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < give_up, "waited too long"
            for place, line in list(self.lines.items()):
                if not self.meetings.hear(place, line):
                    self.die(place)
            self.meetings.consider()
            self.meetings.settle()
            time.sleep(0.001)

    def die(self, place):
        self.meetings.remove(place, "was killed by SIGKILL")
        del self.lines[place]

    def have(self, *places):
        return lambda: all(place in self.results for place in places)

    def ranks(self, *places):
        return [(self.results[p].rank, self.results[p].world_size) for p in places]

    def close(self):
        self.meetings.close()
        for thread in self.threads:
            thread.join(10)
            assert not thread.is_alive()
        for link in self.links.values():
            link.close()


@pytest.fixture
def job():
    made = []

    def make(*args):
        made.append(Job(*args))
        return made[-1]

    yield make
    for each in made:
        each.close()


def met(job, *places):
    for place in places:
        job.come(place)
    job.turn(job.have(*places))


def test_the_first_communicator_waits_for_all(job):
    job = job(1, range(3))
    for place in (2, 0):
        job.come(place)
    time.sleep(0.1)
    job.turn(lambda: job.meetings.places[0].serial == job.meetings.places[2].serial == 1)
    assert not job.results
    job.come(1)
    job.turn(job.have(0, 1, 2))
    assert job.ranks(0, 1, 2) == [(0, 3), (1, 3), (2, 3)]
    assert {part.epoch for part in job.results.values()} == {0}


def test_those_who_are_left_go_on_without_waiting_for_a_newcomer(job):
    job = job(1, range(3))
    met(job, 0, 1, 2)
    job.die(1)
    job.start(1)  # it has not come yet
    met(job, 0, 2)
    assert job.ranks(0, 2) == [(0, 2), (1, 2)]
    job.come(1)
    job.turn(lambda: job.links[0].listen() == 1)
    met(job, 0, 2)
    assert job.ranks(0, 1, 2) == [(0, 3), (1, 3), (2, 3)]
    assert job.results[1].epoch == 2
    job.turn(lambda: job.links[0].listen() == 0)


def test_too_few_ranks_wait_for_a_newcomer(job):
    job = job(3, range(3))
    met(job, 0, 1, 2)
    job.die(1)
    for place in (0, 2):
        job.come(place)
    job.turn(lambda: all(p.serial == 2 for p in job.meetings.places.values()))
    assert not job.have(0)()
    job.start(1)
    job.come(1)
    job.turn(job.have(0, 1, 2))
    assert job.ranks(0, 1, 2) == [(0, 3), (1, 3), (2, 3)]


def test_nobody_alive_is_left_out(job):
    job = job(1, range(3))
    met(job, 0, 1, 2)
    job.come(0, limit_s=0.3)
    job.come(2)
    job.turn(job.have(0))
    assert isinstance(job.results[0], CollTimeout)
    assert f"place 1 (process {PID + 1}) neither called it nor ended" in str(job.results[0])
    job.come(0)
    job.come(1)
    job.turn(job.have(0, 1, 2))
    assert job.ranks(0, 1, 2) == [(0, 3), (1, 3), (2, 3)]


def test_of_many_that_are_late_a_message_names_as_many_as_it_has_room_for(job):
    job = job(1, [0])
    met(job, 0)
    for place in range(1, 4000):
        job.meetings.places[place] = Place(PID + place, job.lines[0], member=True)
    job.come(0, limit_s=0.3)
    job.turn(job.have(0))
    assert isinstance(job.results[0], CollTimeout), job.results[0]
    assert f"place 16 (process {PID + 16}), 3983 more neither called it" in str(job.results[0])


def test_before_the_first_communicator_all_are_waited_for(job):
    job = job(1, range(3))
    job.come(0, limit_s=0.3)
    job.come(2)
    job.turn(job.have(0))
    assert str(job.results[0]).startswith(f"pycoll.init: place 1 (process {PID + 1}) neither")


@pytest.mark.parametrize("when", ["before it joins", "after it has joined", "in its own join"])
def test_a_death_while_they_meet_leads_to_another_offer(job, when):
    job, may_go, made = job(1, range(3)), threading.Event(), []

    def join(launch):
        part = Part(launch)
        made.append(part)
        may_go.wait(10)
        return part

    def dying(launch):
        if when == "in its own join":
            job.die(2)
            raise TransportError("no memory")
        return join(launch) if when == "before it joins" else Part(launch)

    met(job, 0, 1, 2)
    for place in (0, 1):
        job.come(place, join)
    job.come(2, dying)
    job.turn(lambda: len(made) >= (3 if when == "before it joins" else 2))
    if when == "after it has joined":
        job.turn(lambda: job.meetings.places[2].joined)
    if 2 in job.lines:
        job.die(2)
    may_go.set()
    job.turn(job.have(0, 1))
    assert job.ranks(0, 1) == [(0, 2), (1, 2)]
    job.turn(lambda: not any(part.open for part in made if part.world_size == 3))
    assert job.results[0].open
    assert job.results[1].open


def test_who_fails_because_of_another_gets_another_offer(job):
    job, tries = job(1, range(2)), []

    def join(launch):
        tries.append(launch.rank)
        if len(tries) == 1:
            raise PeerLeft("the other one")
        return Part(launch)

    job.come(0, join)
    job.come(1)
    job.turn(job.have(0, 1))
    assert tries == [0, 0]
    assert job.ranks(0, 1) == [(0, 2), (1, 2)]


def test_who_leaves_is_not_waited_for(job):
    job = job(1, range(2))
    met(job, 0, 1)
    job.links[1].let_go(job.results[0])  # not its own
    assert job.links[1].listen() == 0
    job.links[1].let_go(job.results[1])
    job.come(0)
    job.turn(job.have(0))
    assert job.ranks(0) == [(0, 1)]


def test_the_end_of_a_job_is_an_error_for_those_who_wait(job):
    job = job(2, range(2))
    met(job, 0, 1)
    job.die(1)
    job.come(0)
    job.turn(lambda: job.meetings.places[0].serial == 2)
    job.meetings.end("no more are started")
    job.turn(job.have(0))
    assert isinstance(job.results[0], PeerLost)
    assert str(job.results[0]) == "no more are started"


def test_the_end_of_the_launcher_is_an_error(job):
    job = job(1, range(2))
    job.come(0)
    job.lines.pop(0).close()
    job.threads[0].join(10)
    assert isinstance(job.results[0], TransportError)
