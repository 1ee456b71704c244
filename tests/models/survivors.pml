/* Which ranks are left: Survivors::decide and agree of csrc/engine/survivors.cpp. Any rank but one
 * may die at any step, also while it decides; the kernel then gives its lock to another.
 *
 * mutant 1: ranks decide without the lock
 * mutant 2: who has the lock does not look again whether the round has been decided
 * mutant 3: the round is said to be decided before the ranks are counted
 * mutant 4: a rank that has not come is taken for gone
 */
#include "mutants.inc"
#define N 3
#define DEATHS 2
#define FREE 9

byte came[N] = 0, counted[N] = 0, decided = 0, lock = FREE, deaths = 0;
bool dead[N] = false;
byte view[N] = 0;  /* what each rank has agreed to, as bits */

#define SETTLED (gone(0) && gone(1) && gone(2))
#define gone(r) (came[r] == 1 || dead[r] || mutant == 4)

inline maybe_die() {
  if
  :: true -> skip
  :: atomic { deaths < DEATHS && me != 2 -> deaths++; dead[me] = true;
       if :: lock == me -> lock = FREE :: else fi; goto end }
  fi
}

proctype rank(byte me) {
  byte r, seen = 0;
  maybe_die();
  came[me] = 1;
  do
  :: decided == 1 -> break
  :: decided == 0 && SETTLED ->
    if :: mutant == 1 -> skip
       :: else -> atomic { lock == FREE || decided == 1; if :: lock == FREE -> lock = me :: else -> break fi }
    fi;
    if
    :: decided == 1 && mutant != 2 -> skip
    :: else ->
      if :: mutant == 3 -> decided = 1 :: else fi;
      for (r : 0 .. N - 1) {
        maybe_die();
        atomic { counted[r] = (came[r] == 1 && !dead[r] -> 1 : 0) }
      }
      maybe_die();
      decided = 1
    fi;
    atomic { if :: lock == me -> lock = FREE :: else fi };
    break
  od;
  for (r : 0 .. N - 1) { atomic { if :: counted[r] == 1 -> seen = seen | (1 << r) :: else fi } }
  view[me] = seen;
  assert(seen & (1 << me));
  assert(view[0] == 0 || view[0] == seen);
  assert(view[1] == 0 || view[1] == seen);
  assert(view[2] == 0 || view[2] == seen);
end: skip
}

init { atomic { choose_mutant(); run rank(0); run rank(1); run rank(2) } }
