/* A rank that sleeps on a flag, and one that stores it: wait_until, ring and publish of
 * csrc/base/wait.h and csrc/engine/engine.cpp. No slice of sleep ends by itself here, so a wake-up
 * that is lost is an invalid end state.
 *
 * mutant 1: the sleepers are looked at before the flag is visible (no sequential consistency)
 * mutant 2: the value to sleep on is read after the flag was found not ready
 * mutant 3: the sleeper is not counted
 */
#include "mutants.inc"
#define FLAGS 2

byte flag = 0, sleepers = 0;
bool asleep[2] = false;

proctype waiter(byte me) {
  byte wanted = 1, seen;
  do
  :: wanted > FLAGS -> break
  :: else ->
    if :: flag >= wanted -> wanted++; goto next :: else fi;
    if :: mutant != 3 -> sleepers++ :: else fi;
    do
    :: seen = flag;
       if :: flag >= wanted -> break :: else fi;
       if :: mutant == 2 -> seen = flag :: else fi;
       /* the kernel compares and goes to sleep in one step */
       atomic { if :: flag == seen -> asleep[me] = true :: else fi };
       !asleep[me]
    od;
    if :: mutant != 3 -> sleepers-- :: else fi;
    wanted++;
next: skip
  od
}

proctype owner() {
  byte now_, found;
  for (now_ : 1 .. FLAGS) {
    if :: mutant == 1 -> found = sleepers; flag = now_
       :: else -> flag = now_; found = sleepers fi;
    if :: found > 0 -> d_step { asleep[0] = false; asleep[1] = false } :: else fi
  }
}

init { atomic { choose_mutant(); run waiter(0); run waiter(1); run owner() } }
