// Tagged messages between two ranks, on one host or not. Conversions only; contracts are in the
// headers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <type_traits>

#include "bindings/bindings.h"
#include "bindings/calls/message_calls.h"
#include "bindings/owned_class.h"

namespace py = pybind11;
namespace pycoll {
namespace {

// Receives the next message, of whatever size, which must be of this type. None if none has come in
// time, else its bytes and the rank that sent them.
template <typename Box>
py::object take_bytes(Box& box, uint32_t type, int32_t src, int64_t tag, double timeout_s) {
  while (true) {
    const auto found = [&] {
      const Unlocked unlocked;
      return box.probe(src, tag, timeout_s);
    }();
    if (!found) return py::none();
    PyObject* const made = PyBytes_FromStringAndSize(nullptr, Py_ssize_t(found->nbytes));
    if (made == nullptr) throw py::error_already_set();
    const auto data = py::reinterpret_steal<py::bytes>(made);
    const auto sender = static_cast<int32_t>(found->src);
    const auto take = [&, into = PyBytes_AS_STRING(made)] {
      const Unlocked unlocked;
      if constexpr (std::is_same_v<Box, Postbox>) {
        box.take(into, found->nbytes, type, sender, found->tag, timeout_s);
      } else {
        box.recv(into, found->nbytes, type, sender, found->tag, timeout_s);
      }
    };
    try {
      take();
      return py::make_tuple(data, sender);
    } catch (const Error& error) {
      // Where the type is right another thread has taken that message, and the next is of another
      // size: it is kept.
      if (found->type != type || std::strcmp(error.kind(), "MismatchError") != 0) throw;
    }
  }
}

}  // namespace

void bind_p2p(py::module_& m) {
  using namespace pybind11::literals;
  m.attr("ANY") = kAny;
  py::enum_<Offers>(m, "Offers")
      .value("NEVER", Offers::kNever)
      .value("WANTED", Offers::kWanted)
      .value("ALWAYS", Offers::kAlways);
  OwnedClass<Postbox> postbox(m, "Postbox");
  postbox
      .def(made<Postbox, std::shared_ptr<Engine>, Offers>(), "engine"_a,
           "offers"_a = Offers::kNever)
      .def(  // as of MessagePostbox
          "recv",
          [](Postbox& box, uintptr_t data, uint64_t nbytes, uint32_t type, int32_t src,
             uint32_t tag, double timeout_s) {
            return box.take(pointer(data), nbytes, type, src, tag, timeout_s);
          },
          Release())
      .def("take_bytes", &take_bytes<Postbox>)
      .def("small", &Postbox::small)
      .def("leave_behind", &Postbox::leave_behind, Release());
  add_postbox_methods<Postbox>(postbox);
  OwnedClass<MessagePostbox> message_postbox(m, "MessagePostbox");
  message_postbox.def(made<MessagePostbox, std::shared_ptr<MessageEngine>>(), "engine"_a)
      .def("take_bytes", &take_bytes<MessagePostbox>)
      .def_property_readonly("failed", &MessagePostbox::failed)
      .def_property_readonly("given_up", &MessagePostbox::given_up);
  add_send_recv<MessagePostbox, double>(message_postbox);
  add_postbox_methods<MessagePostbox>(message_postbox);
}

}  // namespace pycoll
