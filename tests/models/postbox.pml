/* The thread of a postbox and a thread that posts and waits for a while: Postbox::post, wait, serve
 * of csrc/p2p/postbox.cpp. Whoever waits moves all messages; while nobody does, the thread does. It
 * sleeps while there is nothing to do, and no message may stay behind meanwhile.
 *
 * mutant 1: who stops waiting does not wake the thread
 * mutant 2: who posts does not wake the thread
 * mutant 3: the thread goes to sleep by what it saw before it let the lock go
 */
#include "mutants.inc"
#define MESSAGES 3

byte open = 0, waiters = 0, moved = 0;
bool busy = false, closing = false;
bool lock = false, noticed = false;

inline enter() { atomic { !lock -> lock = true } }
inline leave() { lock = false }
inline wake_thread() {
  if :: waiters > 0 || open == 0 || busy -> skip :: else -> busy = true; noticed = true fi
}

proctype poster() {
  byte i;
  for (i : 1 .. MESSAGES) {
    enter(); open++; if :: mutant != 2 -> wake_thread() :: else fi; leave();
    if
    :: true -> skip  /* it leaves it to the thread */
    :: true ->
      enter(); waiters++; leave();
      do
      :: enter(); if :: open > 0 -> open--; moved++ :: else fi; leave()
      :: break  /* done, or its time is over */
      od;
      enter(); waiters--; if :: mutant != 1 -> wake_thread() :: else fi; leave()
    fi
  }
  (moved == MESSAGES);
  enter(); closing = true; noticed = true; leave()
}

proctype thread_() {
  bool idle_;
  enter();
  do
  :: closing -> break
  :: !closing && busy ->
    leave();
    do  /* wait_until: it moves what there is to move, and looks again */
    :: enter();
       if :: waiters == 0 && open > 0 -> open--; moved++ :: else fi;
       idle_ = (closing || waiters > 0 || open == 0);
       if :: mutant == 3 -> leave(); enter(); busy = !idle_ :: else -> busy = !idle_ fi;
       leave();
       if :: idle_ -> break :: else fi
    od;
    enter()
  :: else -> atomic { leave(); noticed = false }; (noticed); enter()
  od;
  leave()
}

init { atomic { choose_mutant(); run poster(); run thread_() } }
