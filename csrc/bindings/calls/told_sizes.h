// What ranks tell each other of the sizes of a v-variant, and calls that are bound to it.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "bindings/calls/sized_calls.h"

namespace pycoll {

// The sizes of all ranks: before those of each, the type and the width of its rows.
struct SizesTable {
  const uint64_t* words;
  size_t ranks, columns;

  SizesTable(const pybind11::object& bytes, size_t ranks)
      : words(reinterpret_cast<const uint64_t*>(PyBytes_AS_STRING(bytes.ptr()))),
        ranks(ranks),
        columns(size_t(PyBytes_GET_SIZE(bytes.ptr())) / sizeof(uint64_t) / ranks) {}

  uint64_t size(size_t rank, size_t i) const { return words[rank * columns + 2 + i]; }
  // Whether all have rows of one type and one width.
  bool agree() const {
    for (size_t r = 1; r < ranks; ++r) {
      if (!std::equal(words, words + 2, words + r * columns)) return false;
    }
    return true;
  }
  // Of a block: of `from`, or from there to another rank.
  uint64_t rows(ToldSizes told, size_t from, size_t to) const {
    return told == ToldSizes::kOfEach ? size(from, 0) : size(from, to);
  }
};

// Whether calls with other sizes can be bound like this one.
bool may_vary(const FastcallState& state, const SizedCall& call);

// What this rank tells; null where Python code is to say what is wrong with it.
pybind11::object row_of(const SizedCall& like, const SizedKey& key);

// The call that moves blocks of these sizes, as `_bound` of v_variants.py binds it. Throws Error.
std::shared_ptr<const BoundCall> bound_to(const Engine& engine, const SizedCall& like,
                                          const SizesTable& sizes);

}  // namespace pycoll
