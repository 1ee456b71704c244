/* One report of a failure: Faults::set and take_over of csrc/engine/fault.cpp. Whoever sets the
 * abort word writes it, and may die before it has; then one of those that wait does. No wait ends by
 * itself here, so a report that nobody writes is an invalid end state.
 *
 * mutant 1: nobody takes over
 * mutant 2: who takes over does not look whether another one has
 * mutant 3: who takes over looks at the first writer only, not at the one that took over from it
 * mutant 4: the report is said to be ready before it is written
 */
#include "mutants.inc"
#define N 3
#define DEATHS 2

byte word = 0, taken_over = 0, deaths = 0, writing = 0, written = 0;  /* rank + 1, or 0 */
bool ready = false, dead[N] = false;

inline maybe_die() {
  if
  :: true -> skip
  :: atomic { deaths < DEATHS && me != 2 -> deaths++; dead[me] = true;
       if :: writing == me + 1 -> writing = 0 :: else fi; goto end }
  fi
}
inline write_report() {
  atomic { assert(writing == 0); writing = me + 1 };
  maybe_die();
  if :: mutant == 4 -> ready = true; written = me + 1 :: else -> written = me + 1; maybe_die(); ready = true fi;
  atomic { writing = 0 }
}

proctype rank(byte me) {
  byte first, writer;
  maybe_die();
  atomic { first = word; if :: word == 0 -> word = me + 1 :: else fi };
  if :: first == 0 -> write_report() :: else fi;
  do
  :: ready -> break
  :: !ready && mutant != 1 ->
    first = taken_over;
    writer = (first == 0 || mutant == 3 -> word : first);
    if
    :: writer != me + 1 && dead[writer - 1] ->
      atomic { if :: taken_over == first || mutant == 2 -> taken_over = me + 1; first = 0
                  :: else -> first = 255 fi };
      if :: first == 0 -> write_report() :: else fi
    :: else -> (ready || (word != 0 && dead[word - 1]) || (taken_over != 0 && dead[taken_over - 1]))
    fi
  od;
  assert(written != 0);
end: skip
}

init { atomic { choose_mutant(); run rank(0); run rank(1); run rank(2) } }
