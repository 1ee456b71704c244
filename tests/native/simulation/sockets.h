// TCP connections of the simulated machine: streams of bytes that arrive late and in parts, and
// end.
#pragma once

#include <utility>

#include "machine.h"

namespace simulation {

// A connection of two processes: the descriptor of each.
std::pair<int, int> make_connection(uint32_t a, uint32_t b);
// From then on: it is cut, and both ends hear; or nothing passes any more, and nobody hears.
void cut(int fd, uint64_t at_ns);
void mute(int fd, uint64_t at_ns);
uint64_t delay_ns();  // of a message, drawn

}  // namespace simulation
