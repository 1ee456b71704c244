/* A fragment that says where the data lie: Mailboxes::withdraw and read_offer of
 * csrc/p2p/mailbox.cpp. A sender that gives up may change its memory at once; what the receiver read
 * after that counts for nothing.
 *
 * mutant 1: the sender withdraws without looking whether it was answered
 * mutant 2: the receiver answers without looking whether it was withdrawn
 * mutant 3: the receiver answers before it reads
 */
#include "mutants.inc"
mtype = { offered, read_, withdrawn };

mtype state = offered;
byte data = 1;
bool delivered = false, took_back = false;

proctype sender() {
  if
  :: state != offered -> skip  /* answered in time */
  :: true ->
    atomic { if :: state == offered || mutant == 1 -> state = withdrawn; took_back = true :: else fi };
    data = 2  /* the memory is the caller's again */
  fi
}

proctype receiver() {
  byte got;
  bool lasts;
  if :: mutant != 3 -> got = data :: else fi;
  atomic { lasts = (state == offered || mutant == 2); if :: lasts -> state = read_ :: else fi };
  if :: mutant == 3 -> got = data :: else fi;
  if :: lasts -> delivered = true; assert(got == 1) :: else fi
}

/* A message is delivered, or taken back. */
init {
  atomic { choose_mutant(); run sender(); run receiver() };
  (_nr_pr == 1);
  assert(!(delivered && took_back))
}
