/* A ring of fragments with a doorbell on either side: Mailboxes::push and take of
 * csrc/p2p/mailbox.cpp. The sender sleeps while the ring is full, the receiver while it is empty.
 *
 * mutant 1: the receiver does not ring when it has taken a fragment
 * mutant 2: the sender takes the ring for one fragment longer than it is
 * mutant 3: the count is stored before the fragment
 * mutant 4: the bell rings before the count is stored
 */
#include "mutants.inc"
#define ROOM 2
#define MESSAGES 5

byte fragment[ROOM] = 0, sent = 0, taken = 0;
byte bell[2] = 0, sleepers[2] = 0;
bool asleep[2] = false;

inline ring(who) {
  bell[who]++;
  if :: sleepers[who] > 0 -> asleep[who] = false :: else fi
}
inline wait_for(me, condition) {
  sleepers[me]++;
  do
  :: seen = bell[me];
     if :: condition -> break :: else fi;
     atomic { if :: bell[me] == seen -> asleep[me] = true :: else fi };
     !asleep[me]
  od;
  sleepers[me]--
}

proctype sender() {
  byte i, seen, room;
  room = (mutant == 2 -> ROOM + 1 : ROOM);
  for (i : 1 .. MESSAGES) {
    wait_for(0, sent - taken < room);
    if :: mutant == 3 -> sent++; fragment[(i - 1) % ROOM] = i
       :: mutant == 4 -> fragment[(i - 1) % ROOM] = i; ring(1); sent++
       :: else -> fragment[(i - 1) % ROOM] = i; sent++ fi;
    if :: mutant != 4 -> ring(1) :: else fi
  }
}

proctype receiver() {
  byte i, seen;
  for (i : 1 .. MESSAGES) {
    wait_for(1, sent != taken);
    assert(fragment[(i - 1) % ROOM] == i);
    taken++;
    if :: mutant != 1 -> ring(0) :: else fi
  }
}

init { atomic { choose_mutant(); run sender(); run receiver() } }
