// What ranks show of themselves, as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

#include "memory/board.h"
#include "memory/sight.h"

namespace pycoll {

// What a rank shows, by the names of RankSight. control.cpp.
pybind11::dict rank_dict(const RankSight& sight, uint32_t rank);

// The connections that a board shows, a dict for each peer; those of which nothing is known are
// left out. control.cpp.
pybind11::dict links_of(const Board& board);

}  // namespace pycoll
