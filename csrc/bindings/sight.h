// Boards as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

#include "memory/board.h"

namespace pycoll {

// The connections that a board shows, a dict for each peer; those of which nothing is known are
// left out. control.cpp.
pybind11::dict links_of(const Board& board);

}  // namespace pycoll
