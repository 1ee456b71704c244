#include "bindings/calls/sized_calls.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "bindings/calls/fast_path.h"
#include "bindings/calls/registered_calls.h"
#include "bindings/calls/told_sizes.h"

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr size_t kMostKept = 64;

constexpr int kOwn = kSizes + 1;  // where arguments begin that are not of the call

py::bytes new_bytes(Py_ssize_t count) {
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, count);
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(made);
}

PyObject* not_served() { return Py_NewRef(Py_NotImplemented); }

bool add_size(PyObject* number, std::vector<int64_t>& found) {
  if (!PyLong_CheckExact(number)) return false;
  int overflow = 0;
  found.push_back(PyLong_AsLongLongAndOverflow(number, &overflow));
  return overflow == 0;
}

// The numbers of a list or tuple of ints, or of an array of int64.
bool read_sizes(PyObject* given, std::vector<int64_t>& found) {
  if (PyList_CheckExact(given) || PyTuple_CheckExact(given)) {
    PyObject* const* items = PySequence_Fast_ITEMS(given);
    return std::all_of(items, items + PySequence_Fast_GET_SIZE(given),
                       [&](PyObject* item) { return add_size(item, found); });
  }
  if (Py_TYPE(given) != py::detail::npy_api::get().PyArray_Type_) return false;
  const auto array = py::reinterpret_borrow<py::array>(given);
  if (array.ndim() != 1 || !array.dtype().equal(py::dtype::of<int64_t>())) return false;
  for (py::ssize_t i = 0; i < array.size(); ++i) {
    found.push_back(*static_cast<const int64_t*>(array.data(i)));
  }
  return true;
}

struct SizedArrays {
  ArrayMemory x, out;
};

// Describes a call; false if only Python code can serve it.
bool describe(const FastcallState& state, PyObject* const* args, SizedKey& key,
              SizedArrays& arrays) {
  auto& [in, out] = arrays;
  key.objects = {args[kKind], args[kOp], args[kRoot], args[kOrder]};
  if (args[kX] == Py_None || !describe_array(state.heap.get(), args[kX], false, key.x, in) ||
      !describe_array(state.heap.get(), args[kOut], true, key.out, out)) {
    return false;
  }
  const bool apart =
      out.data == nullptr || in.data + in.nbytes <= out.data || out.data + out.nbytes <= in.data;
  return apart && !in.scattered && key.x.ndim > 0 && read_sizes(args[kSizes], key.sizes);
}

// Null without a Python error if there is no memory for it.
py::object result_of(const SizedCall& like, PyObject* x, PyObject* out, ArrayMemory& memory) {
  if (!like.fresh) return py::reinterpret_borrow<py::object>(out);
  try {
    py::object made = new_array(*like.fresh, x);
    ArrayKey key;
    const bool known = describe_array(nullptr, made.ptr(), true, key, memory);
    return known ? made : py::object();
  } catch (py::error_already_set& error) {  // the caller lets peers hear of an interrupt
    if (!error.matches(PyExc_Exception)) throw;
    return {};
  }
}

uint32_t site_of(PyObject* number) {
  return static_cast<uint32_t>(PyLong_AsUnsignedLongMask(number));
}

}  // namespace

py::object tell(FastcallState& state, const RunnableCall& call, const py::object& data,
                Py_ssize_t nbytes, uint32_t site, double limit_s) {
  const py::bytes result = refusing(state, [&] { return new_bytes(nbytes); });
  CallArrays arrays{{PyBytes_AS_STRING(data.ptr()), uint64_t(PyBytes_GET_SIZE(data.ptr()))},
                    {PyBytes_AS_STRING(result.ptr()), uint64_t(nbytes)},
                    data,
                    result};
  return py::reinterpret_steal<py::object>(run(state, call, arrays, site, limit_s));
}

PyObject* run_on_bytes(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 5 || !PyBytes_CheckExact(args[1])) {
      throw py::type_error("on_bytes takes call, data, nbytes, site and timeout_s");
    }
    FastcallState& state = state_of(fastcall);
    const Py_ssize_t nbytes = PyLong_AsSsize_t(args[2]);
    const double limit_s = PyFloat_AsDouble(args[4]);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (!can_run(state)) return not_served();
    const RunnableCall call = runnable(state, args[0]);
    const auto data = py::reinterpret_borrow<py::object>(args[1]);
    return tell(state, call, data, nbytes, site_of(args[3]), limit_s).release().ptr();
  });
}

PyObject* remember_sized(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != kOwn + 7) throw py::type_error("remember_sized takes 14 arguments");
    FastcallState& state = state_of(fastcall);
    auto entry = std::make_shared<SizedCall>();
    SizedArrays arrays;
    if (!can_run(state) || !describe(state, args, entry->key, arrays)) Py_RETURN_NONE;
    PyObject* const* own = args + kOwn;
    entry->tell = runnable(state, own[0]);
    entry->row = py::reinterpret_borrow<py::bytes>(own[1]);
    entry->table = py::reinterpret_borrow<py::bytes>(own[2]);
    entry->move = runnable(state, own[3]);
    PyObject* fresh_type = nullptr;
    if (args[kOut] == Py_None && own[4] != Py_None) {
      ArrayMemory memory;
      if (!describe_array(nullptr, own[4], true, entry->fresh.emplace(), memory)) Py_RETURN_NONE;
      fresh_type = entry->fresh->type;
    }
    if (may_vary(state, *entry)) entry->told = ToldSizes(py::handle(own[5]).cast<int>());
    entry->rank = py::handle(own[6]).cast<size_t>();
    const auto& [kind, op, root, order] = entry->key.objects;
    int i = 0;
    for (PyObject* object :
         {kind, op, root, order, entry->key.x.type, entry->key.out.type, fresh_type}) {
      entry->kept[i++] = py::reinterpret_borrow<py::object>(object);
    }
    auto& kept = state.sized;
    std::erase_if(kept, [&](const auto& other) { return other->key == entry->key; });
    if (kept.size() >= kMostKept) kept.erase(kept.begin());
    kept.push_back(std::move(entry));
    Py_RETURN_NONE;
  });
}

namespace {

// Moves blocks of sizes that ranks have told: the result, or the table where Python code is to go
// on with it. Null with a Python error set if it has failed.
PyObject* move_sized(FastcallState& state, const SizedCall& like, const py::object& table,
                     const ArrayMemory& in, const py::object& x, uint32_t site, double limit_s) {
  const std::shared_ptr<const Engine> engine = state.engine;
  if (engine == nullptr || like.told == ToldSizes::kOther) return Py_NewRef(table.ptr());
  const SizesTable sizes(table, PyBytes_GET_SIZE(like.row.ptr()));
  if (!sizes.agree()) return Py_NewRef(table.ptr());
  RunnableCall move;
  py::object result = py::none();
  ArrayMemory out;
  try {
    move.call = bound_to(*engine, like, sizes);
    if (like.fresh) {
      ArrayKey fresh = *like.fresh, made;
      fresh.dims[0] = 0;
      for (size_t from = 0; from < sizes.ranks; ++from) {
        fresh.dims[0] += Py_ssize_t(sizes.rows(from, like.rank));
      }
      result = new_array(fresh, x.ptr());
      const bool known = describe_array(nullptr, result.ptr(), true, made, out);
      if (!known && fresh.dims[0] > 0) return Py_NewRef(table.ptr());  // one of no bytes is none
    }
  } catch (const Error&) {  // Python code fails in the same way, and lets peers hear of it
    return Py_NewRef(table.ptr());
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return Py_NewRef(table.ptr());
  }
  if (!can_run(state)) return Py_NewRef(table.ptr());
  CallArrays arrays{in, out, x, result};
  return run(state, move, arrays, site, limit_s);
}

// The latest call like this one, but for its sizes; or null.
std::shared_ptr<const SizedCall> find_with_sizes(const FastcallState& state, const SizedKey& key) {
  const auto of_rows = [](ArrayKey x) {
    x.dims[0] = 0;
    return x;
  };
  if (!(key.out == ArrayKey{})) return nullptr;
  const auto found = std::find_if(state.sized.rbegin(), state.sized.rend(), [&](const auto& entry) {
    return entry->told != ToldSizes::kOther && entry->key.objects == key.objects &&
           entry->key.sizes.size() == key.sizes.size() && of_rows(entry->key.x) == of_rows(key.x);
  });
  return found == state.sized.rend() ? nullptr : *found;
}

// Runs a call like an earlier one: its result, or the bytes of what ranks have said if that is new,
// or NotImplemented. Null with a Python error set if it has failed.
PyObject* run_like_before(FastcallState& state, PyObject* const* args, uint32_t site,
                          double limit_s, bool counted) {
  SizedKey key;
  SizedArrays arrays;
  if (!can_run(state) || !describe(state, args, key, arrays)) return not_served();
  const HoldOf in(state.heap.get(), arrays.x.data, arrays.x.nbytes);
  const HoldOf out(state.heap.get(), arrays.out.data, arrays.out.nbytes);
  const auto found = std::find_if(state.sized.begin(), state.sized.end(),
                                  [&](const auto& entry) { return entry->key == key; });
  const bool known = found != state.sized.end();
  // Another thread may drop it meanwhile.
  const std::shared_ptr<const SizedCall> like = known ? *found : find_with_sizes(state, key);
  if (like == nullptr) return not_served();
  const auto x = py::reinterpret_borrow<py::object>(args[kX]);
  const py::object result = known ? result_of(*like, x.ptr(), args[kOut], arrays.out) : py::none();
  const py::object row = refusing(state, [&] { return known ? like->row : row_of(*like, key); });
  if (!result || !row || !can_run(state)) return not_served();  // that may have run Python code
  const Py_ssize_t nbytes = PyBytes_GET_SIZE(like->table.ptr());
  const py::object table = tell(state, like->tell, row, nbytes, site, limit_s);
  if (!table) return nullptr;
  const bool as_before =
      known && std::memcmp(PyBytes_AS_STRING(table.ptr()), PyBytes_AS_STRING(like->table.ptr()),
                           size_t(nbytes)) == 0;
  PyObject* moved = nullptr;
  if (!as_before) {
    moved = move_sized(state, *like, table, arrays.x, x, site, limit_s);
  } else if (can_run(state)) {
    CallArrays given{arrays.x, arrays.out, x, result};
    moved = run(state, like->move, given, site, limit_s);
  } else {  // Python code raises what it does where another thread has closed the communicator
    moved = Py_NewRef(table.ptr());
  }
  return counted && moved != table.ptr() ? with_counts(moved, *like, table) : moved;
}

SaidSizes said_of(PyObject* const* args, py::object table) {
  SaidSizes said{PyThread_get_thread_ident(), {}, std::move(table)};
  std::copy_n(args, said.call.size(), said.call.begin());
  return said;
}

}  // namespace

PyObject* run_sized(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != kOwn + 3) throw py::type_error("run_sized takes 10 arguments");
    FastcallState& state = state_of(fastcall);
    SaidSizes said = std::exchange(state.said, {});
    const SaidSizes now = said_of(args, {});
    if (said.table && said.thread == now.thread && said.call == now.call) {
      return said.table.release().ptr();
    }
    const double limit_s = PyFloat_AsDouble(args[kOwn + 1]);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const bool counted = args[kOwn + 2] == Py_True;
    return run_like_before(state, args, site_of(args[kOwn]), limit_s, counted);
  });
}

PyObject* call_sized(PyObject* fastcall, PyObject* const* args) {
  FastcallState& state = state_of(fastcall);
  state.said = {};
  const std::optional<double> limit_s = limit_of(args[kSizedTimeout]);
  const bool counted = args[kReturnCounts] == Py_True;
  const bool usual = limit_s && (counted || args[kReturnCounts] == Py_False);
  if (!usual || state.sized.empty()) return not_served();
  py::object result;
  try {
    const uint32_t site = call_site(state);
    result =
        py::reinterpret_steal<py::object>(run_like_before(state, args, site, *limit_s, counted));
    if (!result) throw py::error_already_set();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) tell_of_interrupt(state, error);
    throw;
  }
  if (!PyBytes_CheckExact(result.ptr())) return result.release().ptr();
  state.said = said_of(args, std::move(result));
  return not_served();
}

}  // namespace pycoll
