// An MPI of the simulated machine: its library is not ours, so what it promises is simulated, with
// what differs between libraries drawn from the seed.
#pragma once

#include "transports/messages/transport.h"

namespace simulation {

// What is under way between all ranks of a run.
struct Mails;
std::shared_ptr<Mails> make_mails();

// The transport of one rank: rank r is process r. Small messages are copied when they are sent,
// others stay where they are until their receiver takes them, inside its calls. A death is noticed
// a while later, by who tests a message to or from the dead, or probes for one.
std::shared_ptr<pycoll::Transport> join_mpi(std::shared_ptr<Mails> mails, uint32_t rank);

}  // namespace simulation
