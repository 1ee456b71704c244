/* Iterations, flags of both parities, staging buffers and the gate: section 2 of
 * docs/architecture.md, Engine::gate and await_entry_of_all. Rank 0 is a root: its plan waits for
 * nobody. Calls have one or two segments, so iterations; only the last waits for the entry of all.
 *
 * mutant 1: no gate
 * mutant 2: one staging buffer for both parities
 * mutant 3: the gate looks at the iteration before the previous one
 * mutant 4: nobody waits until all have entered
 * mutant 5: the flag is stored before the staging buffer
 */
#include "mutants.inc"
#define N 3
#define CALLS 3
#define PARITY(e) (mutant == 2 -> 0 : (e) % 2)

byte line[6] = 0;     /* of rank r and parity p, at r * 2 + p: the newest iteration entered */
byte buffer[2] = 0;   /* of the root */
byte entered[3] = 0;  /* the newest call of each rank */

inline await(q, e) { line[(q) * 2 + (e) % 2] >= (e) }
inline gate(e) {
  if
  :: mutant == 1 || e < 2 -> skip
  :: mutant == 3 && e < 3 -> skip
  :: else ->
    for (q : 0 .. N - 1) { if :: mutant == 3 -> await(q, e - 2) :: else -> await(q, e - 1) fi }
  fi
}

proctype rank(byte me) {
  byte e = 1, call, segment, last, q;
  for (call : 1 .. CALLS) {
    entered[me] = call;
    last = call % 2;
    for (segment : 0 .. last) {
      gate(e);
      if
      :: me == 0 ->
        if :: mutant == 5 -> line[e % 2] = e; buffer[PARITY(e)] = e
           :: else -> buffer[PARITY(e)] = e; line[e % 2] = e fi
      :: else ->
        line[me * 2 + e % 2] = e;
        await(0, e);
        assert(buffer[PARITY(e)] == e)
      fi;
      if :: segment == last && mutant != 4 -> for (q : 0 .. N - 1) { await(q, e) } :: else fi;
      e++
    }
    for (q : 0 .. N - 1) { assert(entered[q] >= call) }
  }
}

init { atomic { choose_mutant(); run rank(0); run rank(1); run rank(2) } }
