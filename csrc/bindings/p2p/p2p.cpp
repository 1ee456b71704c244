// Tagged messages between two ranks, on one host or not. Conversions only; contracts are in the
// headers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/owned_class.h"
#include "bindings/p2p/message_bytes.h"
#include "bindings/p2p/message_calls.h"
#include "bindings/p2p/plain_message.h"

namespace py = pybind11;
namespace pycoll {
namespace {

// None if none has come in time, else the bytes and the rank that sent them.
template <typename Box>
py::object bytes_and_sender(Box& box, uint32_t type, int32_t src, int64_t tag, double timeout_s) {
  const auto found = take_bytes(box, type, src, tag, timeout_s);
  return found ? py::object(py::make_tuple(found->first, found->second)) : py::none();
}

// Of a message that a probe has found: its bytes, or None.
template <typename Box>
py::object found_bytes(Box& box, uint32_t src, uint32_t tag, uint64_t nbytes, uint32_t type,
                       double timeout_s) {
  auto data = take_found(box, {src, tag, type, nbytes}, type, timeout_s);
  return data ? py::object(std::move(*data)) : py::none();
}

// Receives the message of so many bytes that a probe has found: its sender, or nothing.
template <typename Box>
std::optional<uint32_t> recv_found(Box& box, uintptr_t data, uint64_t nbytes, uint32_t type,
                                   uint32_t src, uint32_t tag, uint64_t found, double timeout_s) {
  return box.take_found({src, tag, type, found}, pointer(data), nbytes, type, timeout_s);
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
      .def("take_bytes", &bytes_and_sender<Postbox>)
      .def("take_found", &found_bytes<Postbox>)
      .def("recv_found", &recv_found<Postbox>, Release())
      .def("small", &Postbox::small)
      .def("leave_behind", &Postbox::leave_behind, Release());
  add_postbox_methods<Postbox>(postbox);
  OwnedClass<MessagePostbox> message_postbox(m, "MessagePostbox");
  message_postbox.def(made<MessagePostbox, std::shared_ptr<MessageEngine>>(), "engine"_a)
      .def("take_bytes", &bytes_and_sender<MessagePostbox>)
      .def("take_found", &found_bytes<MessagePostbox>)
      .def("recv_found", &recv_found<MessagePostbox>, Release())
      .def_property_readonly("failed", &MessagePostbox::failed)
      .def_property_readonly("given_up", &MessagePostbox::given_up);
  add_send_recv<MessagePostbox, double>(message_postbox);
  add_postbox_methods<MessagePostbox>(message_postbox);
}

}  // namespace pycoll
