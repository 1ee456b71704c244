#include "fastcall.h"

#include <pybind11/numpy.h>

#include <array>
#include <cstring>
#include <limits>
#include <optional>

#include "engine.h"
#include "gil.h"
#include "python_frame.h"
#include "two_level.h"

namespace py = pybind11;
namespace pycoll {
namespace {

constexpr int kMaxDims = 6;
constexpr size_t kSlots = 256;  // of each table, direct-mapped
constexpr uint64_t kShortBytes = 16 << 10;
enum Place : uint8_t { kAbsent, kPrivate, kSymmetric };

constexpr intptr_t kApart = std::numeric_limits<intptr_t>::min();

constexpr int kContiguous = 0x0001;  // NPY_ARRAY_C_CONTIGUOUS
constexpr int kWriteable = 0x0400;   // NPY_ARRAY_WRITEABLE

struct ArrayKey {
  PyObject* descr = nullptr;
  int32_t ndim = 0;
  Place place = kAbsent;
  std::array<Py_ssize_t, kMaxDims> dims{};
  bool operator==(const ArrayKey&) const = default;
};

// What must be the same for a remembered call to serve again. Objects are compared by identity.
struct Key {
  std::array<PyObject*, 5> objects{};  // kind, op, root, order, algorithm
  ArrayKey x, out;
  intptr_t shift = kApart;  // bytes from x to out where they overlap
  bool operator==(const Key&) const = default;
};

struct Entry {
  Key key;
  std::shared_ptr<const BoundCall> call;
  std::shared_ptr<const StagedCall> staged;  // instead of `call`
  py::object kept[7];                        // references to what the key points to
  bool allocates = false;
  bool symmetric_result = false;  // where it was allocated; see Communicator.symmetric
  py::object result_dtype;
  std::vector<Py_ssize_t> result_shape;
};

struct Site {
  py::object code;
  int lasti = -1;
  uint32_t id = 0;
};

struct State {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<MpiEngine> mpi;       // instead of `engine`
  std::shared_ptr<TwoLevelEngine> two;  // likewise
  std::shared_ptr<Heap> heap;
  py::object slow, site, fail, queued;  // weak references to bound methods: keep nothing alive
  std::array<Entry, kSlots> entries;
  std::array<Site, kSlots> sites;
};

struct Fastcall {
  PyObject_HEAD State* state;
};

struct Arrays {
  char *in = nullptr, *out = nullptr;
};

size_t slot_of(const Key& key) {
  uint64_t h = 0;
  const auto mix = [&h](uint64_t v) { h = (h ^ v) * 0x9E3779B97F4A7C15u; };
  for (const PyObject* object : key.objects) mix(reinterpret_cast<uintptr_t>(object));
  mix(reinterpret_cast<uintptr_t>(key.x.descr));
  for (int i = 0; i < key.x.ndim; ++i) mix(static_cast<uint64_t>(key.x.dims[i]));
  mix(static_cast<uint64_t>(key.x.place) << 4 | static_cast<uint64_t>(key.out.place));
  mix(static_cast<uint64_t>(key.shift));
  return h >> 56;
}

// Describes one array argument; false if only the slow path can serve it.
bool describe_array(const Heap* heap, PyObject* object, bool written, ArrayKey& key, char*& data,
                    uint64_t& nbytes) {
  if (object == Py_None) return true;
  const auto& api = py::detail::npy_api::get();  // no static: it imports, and may pass the GIL on
  if (Py_TYPE(object) != api.PyArray_Type_) return false;
  const auto* array = py::detail::array_proxy(object);
  const int wanted = kContiguous | (written ? kWriteable : 0);
  if ((array->flags & wanted) != wanted || array->nd > kMaxDims) return false;
  key.descr = array->descr;
  key.ndim = array->nd;
  nbytes = static_cast<uint64_t>(py::reinterpret_borrow<py::dtype>(array->descr).itemsize());
  for (int i = 0; i < array->nd; ++i) {
    key.dims[i] = array->dimensions[i];
    nbytes *= static_cast<uint64_t>(array->dimensions[i]);
  }
  data = array->data;
  const bool symmetric = heap != nullptr && heap->contains(data, nbytes);
  key.place = symmetric ? kSymmetric : kPrivate;
  return symmetric || heap == nullptr || !heap->is_aliased(data, nbytes);
}

bool make_key(const State& state, PyObject* const* args, Key& key, Arrays& arrays) {
  key.objects = {args[kKind], args[kOp], args[kRoot], args[kOrder], args[kAlgorithm]};
  uint64_t in_bytes = 0, out_bytes = 0;
  if (!describe_array(state.heap.get(), args[kX], false, key.x, arrays.in, in_bytes) ||
      !describe_array(state.heap.get(), args[kOut], true, key.out, arrays.out, out_bytes)) {
    return false;
  }
  const bool apart = arrays.in == nullptr || arrays.out == nullptr ||
                     arrays.in + in_bytes <= arrays.out || arrays.out + out_bytes <= arrays.in;
  if (!apart) key.shift = arrays.out - arrays.in;
  return true;
}

// The id of the line that called the communicator's method: the innermost Python frame.
uint32_t call_site(State& state) {
  const auto [code, lasti] = innermost_place();
  if (!code) return 0;
  const size_t hash = reinterpret_cast<uintptr_t>(code.ptr()) / 64 + static_cast<size_t>(lasti);
  Site& site = state.sites[hash % kSlots];
  if (site.code.ptr() != code.ptr() || site.lasti != lasti) {
    site.id = state.site()().cast<uint32_t>();
    site.code = code;
    site.lasti = lasti;
  }
  return site.id;
}

// Raises the exception for an engine error; a pending one, of an interrupt, stays. Where MPI may
// still look at the arrays, they are never let go.
void fail(State& state, const std::string& kind, const std::string& text, PyObject* x,
          const py::object& result) {
  const bool lasting =
      state.two != nullptr ? kind != "PeerRejected" : state.mpi != nullptr && state.mpi->failed();
  if (lasting) {
    Py_INCREF(x);
    result.inc_ref();
  }
  if (PyErr_Occurred() == nullptr) {
    state.fail()(kind, text);
  } else if (state.two != nullptr) {  // the other level must hear of it
    const py::error_scope kept;
    try {
      state.fail()(kind, text);
    } catch (py::error_already_set&) {  // the interrupt is what the user gets
    }
  }
}

bool is_symmetric(const State& state, const py::array& array) {
  return state.heap != nullptr && state.heap->contains(array.data(), array.nbytes());
}

// What the call returns, and where its data are.
struct Result {
  py::object object;
  char* data = nullptr;
};

// Returns `out`, or a new array; nothing if there is no memory for it, or if it lies elsewhere than
// the one of the call that is remembered, which is then not the one to run.
std::optional<Result> result_of(const State& state, const Entry& entry, const Arrays& arrays,
                                PyObject* out) {
  if (!entry.allocates) return Result{py::reinterpret_borrow<py::object>(out), arrays.out};
  try {
    py::array fresh(py::reinterpret_borrow<py::dtype>(entry.result_dtype), entry.result_shape);
    if (entry.key.x.place == kSymmetric && is_symmetric(state, fresh) != entry.symmetric_result) {
      return {};
    }
    auto* data = static_cast<char*>(fresh.mutable_data());
    return Result{std::move(fresh), data};
  } catch (const py::error_already_set&) {  // no memory: the slow path lets the peers know
    return {};
  }
}

// Puts the call in the engine's queue; Python makes a `Work` of its ticket.
PyObject* submit(State& state, const Entry& entry, const Arrays& arrays, uint32_t site, PyObject* x,
                 Result& made) {
  const auto& [result, target] = made;
  const std::shared_ptr<const BoundCall> call = entry.call;
  const std::shared_ptr<Engine> engine = state.engine;  // another thread may close it meanwhile
  const std::shared_ptr<MpiEngine> mpi = state.mpi;
  uint64_t ticket = 0;
  try {
    const Unlocked unlocked;
    ticket = engine != nullptr ? engine->submit(call, arrays.in, target, site)
                               : mpi->submit(call, arrays.in, target, site);
  } catch (const Error& error) {
    fail(state, error.kind(), error.what(), x, result);
    return nullptr;
  }
  return state.queued()(ticket, py::handle(x), result).release().ptr();
}

// Whether an engine does all of it at once, and soon.
bool is_short(const State& state, const BoundCall* call) {
  return state.engine != nullptr && call->in_bytes + call->out_bytes <= kShortBytes &&
         state.engine->prompt();
}

// Works without Python's lock; returns the error that ends it, if any.
template <typename Unlock, typename Work>
std::optional<Error> error_of(const Work& work) {
  const Unlock unlock;
  try {
    work();
  } catch (const Error& error) {
    return error;
  }
  return {};
}

PyObject* run(State& state, const Entry& entry, const Arrays& arrays, uint32_t site, PyObject* x,
              Result& made) {
  const std::shared_ptr<const BoundCall> call = entry.call;
  const std::shared_ptr<const StagedCall> staged = entry.staged;
  const std::shared_ptr<TwoLevelEngine> two = state.two;
  const std::shared_ptr<Engine> engine = state.engine;  // another thread may close it meanwhile
  const std::shared_ptr<MpiEngine> mpi = state.mpi;
  auto& [result, target] = made;
  const py::object keep = py::reinterpret_borrow<py::object>(x);
  const auto work = [&] {
    if (two != nullptr) {
      two->run(*staged, arrays.in, target, site);
    } else if (engine != nullptr) {
      engine->run(*call, arrays.in, target, site);
    } else {
      mpi->run(*call, arrays.in, target, site);
    }
  };
  const std::optional<Error> error =
      is_short(state, call.get()) ? error_of<UnlockedInWaits>(work) : error_of<Unlocked>(work);
  if (!error.has_value()) return result.release().ptr();
  fail(state, error->kind(), error->what(), x, result);
  return nullptr;
}

PyObject* fast_or_slow(State& state, PyObject* const* args) {
  Key key;
  Arrays arrays;
  const bool now = args[kAsync] == Py_False;
  const bool plain = args[kTimeout] == Py_None && args[kStream] == Py_None &&
                     (now || (args[kAsync] == Py_True && state.two == nullptr));
  // A new place in the program is asked for by Python code, and whatever runs in between, such as a
  // signal handler, may use or close this communicator. So nothing is looked at before that.
  const uint32_t site = plain ? call_site(state) : 0;
  if (plain && make_key(state, args, key, arrays)) {
    const Entry& entry = state.entries[slot_of(key)];
    const bool known = entry.call != nullptr || entry.staged != nullptr;
    if (known && entry.key == key && (state.two == nullptr || state.two->idle())) {
      auto result = result_of(state, entry, arrays, args[kOut]);
      if (result) return (now ? run : submit)(state, entry, arrays, site, args[kX], *result);
    }
  }
  const py::object slow = state.slow();
  return PyObject_Vectorcall(slow.ptr(), args, kArgs, nullptr);
}

PyObject* remember(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 9) throw py::type_error("remember takes 9 arguments");
    State& state = *reinterpret_cast<Fastcall*>(self)->state;
    PyObject* all[kArgs] = {args[1], args[2], args[3], args[4], args[5], args[6], args[7]};
    Key key;
    Arrays arrays;
    if (!make_key(state, all, key, arrays)) Py_RETURN_NONE;
    Entry entry;
    entry.key = key;
    if (state.two != nullptr) {
      entry.staged = py::cast<std::shared_ptr<StagedCall>>(py::handle(args[0]));
    } else {
      entry.call = py::cast<std::shared_ptr<BoundCall>>(py::handle(args[0]));
    }
    for (size_t i = 0; i < key.objects.size(); ++i) {
      entry.kept[i] = py::reinterpret_borrow<py::object>(key.objects[i]);
    }
    entry.kept[5] = py::reinterpret_borrow<py::object>(key.x.descr);
    entry.kept[6] = py::reinterpret_borrow<py::object>(key.out.descr);
    const py::handle fresh = args[8];
    if (!fresh.is_none()) {
      const auto array = py::cast<py::array>(fresh);
      entry.allocates = true;
      entry.symmetric_result = is_symmetric(state, array);
      entry.result_dtype = array.dtype();
      entry.result_shape.assign(array.shape(), array.shape() + array.ndim());
    }
    const bool closed = state.engine == nullptr && state.mpi == nullptr && state.two == nullptr;
    if (!closed) state.entries[slot_of(key)] = std::move(entry);  // by another thread, meanwhile
    Py_RETURN_NONE;
  });
}

PyObject* forget(PyObject* self, PyObject*) {
  State& state = *reinterpret_cast<Fastcall*>(self)->state;
  for (Entry& entry : state.entries) entry = Entry();
  state.engine.reset();
  state.mpi.reset();
  state.two.reset();
  state.heap.reset();
  Py_RETURN_NONE;
}

PyObject* create(PyTypeObject* type, PyObject* args, PyObject*) {
  return guarded([&]() -> PyObject* {
    const auto given = py::reinterpret_borrow<py::tuple>(args);
    if (given.size() != 6) {
      throw py::type_error("Fastcall takes engine, heap, slow, site, fail, queued");
    }
    auto state = std::make_unique<State>();
    if (py::isinstance<TwoLevelEngine>(given[0])) {
      state->two = given[0].cast<std::shared_ptr<TwoLevelEngine>>();
    } else if (py::isinstance<MpiEngine>(given[0])) {
      state->mpi = given[0].cast<std::shared_ptr<MpiEngine>>();
    } else {
      state->engine = given[0].cast<std::shared_ptr<Engine>>();
    }
    state->heap = given[1].cast<std::shared_ptr<Heap>>();
    state->slow = given[2];
    state->site = given[3];
    state->fail = given[4];
    state->queued = given[5];
    auto* self = reinterpret_cast<Fastcall*>(type->tp_alloc(type, 0));
    if (self == nullptr) throw py::error_already_set();
    self->state = state.release();
    return reinterpret_cast<PyObject*>(self);
  });
}

// An algorithm of the user that is kept here may refer to the communicator, and so to this object.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const State* state = reinterpret_cast<Fastcall*>(self)->state;
  if (state == nullptr) return 0;
  for (const Entry& entry : state->entries) {
    for (const py::object& object : entry.kept) Py_VISIT(object.ptr());
  }
  return 0;
}

int clear(PyObject* self) {
  State* state = reinterpret_cast<Fastcall*>(self)->state;
  if (state == nullptr) return 0;
  for (Entry& entry : state->entries) entry = Entry();
  return 0;
}

void destroy(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<Fastcall*>(self)->state;
  type->tp_free(self);
  Py_DECREF(type);
}

}  // namespace

PyObject* call_fast_or_slow(PyObject* fastcall, PyObject* const* args) {
  if (Py_TYPE(fastcall)->tp_dealloc != destroy) throw py::type_error("not a Fastcall");
  return fast_or_slow(*reinterpret_cast<Fastcall*>(fastcall)->state, args);
}

void add_fastcall(py::module_& m) {
  static PyMethodDef methods[] = {
      {"remember", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(remember)),
       METH_FASTCALL, "Serve calls like this one on the hot path."},
      {"forget", forget, METH_NOARGS, "Let go of the engine; every call takes the slow path."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_methods, methods},
                                {0, nullptr}};
  static PyType_Spec spec = {"pycoll._C.Fastcall", sizeof(Fastcall), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  m.attr("Fastcall") = type;
}

}  // namespace pycoll
