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

  SizesTable(const pybind11::object& bytes, Py_ssize_t row)
      : words(reinterpret_cast<const uint64_t*>(PyBytes_AS_STRING(bytes.ptr()))),
        ranks(size_t(PyBytes_GET_SIZE(bytes.ptr()) / row)),
        columns(size_t(row) / sizeof(uint64_t)) {}

  uint64_t size(size_t rank, size_t i) const { return words[rank * columns + 2 + i]; }
  // Whether all have rows of one type and one width.
  bool agree() const {
    for (size_t r = 1; r < ranks; ++r) {
      if (!std::equal(words, words + 2, words + r * columns)) return false;
    }
    return true;
  }
  // Of the block from a rank to another, or of the one that it has for all or for the root.
  uint64_t rows(size_t from, size_t to) const { return size(from, columns == 3 ? 0 : to); }
};

// Whether calls with other sizes can be bound like this one.
bool may_vary(const FastcallState& state, const SizedCall& call);

// What this rank tells; null where Python code is to say what is wrong with it.
pybind11::object row_of(const SizedCall& like, const SizedKey& key);

// The call that moves blocks of these sizes, as `_bound` of v_variants.py binds it. Throws Error.
std::shared_ptr<const BoundCall> bound_to(const Engine& engine, const SizedCall& like,
                                          const SizesTable& sizes);

// A result, which it takes, and the rows that came from each rank; null if there is no result.
PyObject* with_counts(PyObject* result, const SizedCall& like, const pybind11::object& table);

}  // namespace pycoll
