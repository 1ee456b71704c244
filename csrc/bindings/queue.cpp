// What has become of calls in the queue of an engine, for Python.
#include <exception>
#include <new>

#include "bindings/bindings.h"
#include "transports/messages/message_engine.h"

namespace py = pybind11;
namespace pycoll {
namespace {

// What a call in the queue has failed with: None or (kind, text). Unlike a wait for it, this raises
// nothing, so whatever is raised meanwhile is known to come from a signal handler.
template <typename AnyEngine>
py::object error_of(AnyEngine& engine, uint64_t ticket) {
  const std::exception_ptr failure = engine.error(ticket);
  if (failure == nullptr) return py::none();
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    return py::make_tuple(error.kind(), error.what());
  } catch (const std::bad_alloc& error) {
    return py::make_tuple("MemoryError", error.what());
  } catch (const std::exception& error) {
    return py::make_tuple("CollError", error.what());
  }
}

template <typename AnyEngine>
void bind_queue_of(py::module_& m) {
  using namespace pybind11::literals;
  m.def("error_of", &error_of<AnyEngine>, "engine"_a, "ticket"_a);
  m.def(
      "forget", [](AnyEngine& engine, uint64_t ticket) { engine.forget(ticket); }, "engine"_a,
      "ticket"_a);
}

}  // namespace

void bind_queue(py::module_& m) {
  bind_queue_of<Engine>(m);
  bind_queue_of<MessageEngine>(m);
}

}  // namespace pycoll
