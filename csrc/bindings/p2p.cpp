// The part of pycoll._C for messages between two ranks.
#include <pybind11/pybind11.h>

#include "base/gil.h"
#include "p2p/mailbox.h"
#include "p2p/message_postbox.h"
#include "p2p/postbox.h"

namespace py = pybind11;
namespace pycoll {
namespace {

using namespace pybind11::literals;
using Release = py::call_guard<Unlocked>;

template <typename Box>
void bind_mailbox(py::class_<Box>& type) {
  type.def(
          "send",
          [](Box& box, uintptr_t data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag,
             double timeout_s) {
            box.send(reinterpret_cast<void*>(data), nbytes, type, dst, tag, timeout_s);
          },
          Release())
      .def(
          "recv",
          [](Box& box, uintptr_t data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag,
             double timeout_s) {
            return box.recv(reinterpret_cast<void*>(data), nbytes, type, src, tag, timeout_s);
          },
          Release());
}

template <typename Box>
void bind_postbox(py::class_<Box>& type) {
  type.def(
          "send",
          [](Box& box, uintptr_t data, uint64_t nbytes, uint32_t type, uint32_t dst, uint32_t tag) {
            return box.send(reinterpret_cast<void*>(data), nbytes, type, dst, tag);
          },
          "data"_a, "nbytes"_a, "type"_a, "dst"_a, "tag"_a, Release())
      .def(
          "recv",
          [](Box& box, uintptr_t data, uint64_t nbytes, uint32_t type, int32_t src, uint32_t tag) {
            return box.recv(reinterpret_cast<void*>(data), nbytes, type, src, tag);
          },
          "data"_a, "nbytes"_a, "type"_a, "src"_a, "tag"_a, Release())
      .def("done", &Box::done, "ticket"_a, Release())
      .def("wait", &Box::wait, "ticket"_a, "timeout_s"_a, Release())
      .def("close", &Box::close, Release());
}

}  // namespace

void bind_mail(py::module_& m) {
  py::enum_<Offers>(m, "Offers")
      .value("NEVER", Offers::kNever)
      .value("WANTED", Offers::kWanted)
      .value("ALWAYS", Offers::kAlways);
  py::class_<Mailboxes> mailboxes(m, "Mailboxes");
  mailboxes.def(py::init<std::shared_ptr<Engine>, Offers>(), "engine"_a,
                "offers"_a = Offers::kNever);
  bind_mailbox(mailboxes);
  py::class_<Postbox> postbox(m, "Postbox");
  postbox.def(py::init<std::shared_ptr<Engine>, Offers>(), "engine"_a, "offers"_a = Offers::kNever);
  bind_postbox(postbox);
  py::class_<MessageMailbox> mailbox(m, "MessageMailbox");
  mailbox.def(py::init<std::shared_ptr<MessageEngine>>(), "engine"_a)
      .def_property_readonly("given_up", &MessageMailbox::given_up);
  bind_mailbox(mailbox);
  py::class_<MessagePostbox> message_postbox(m, "MessagePostbox");
  message_postbox.def(py::init<std::shared_ptr<MessageEngine>>(), "engine"_a);
  bind_postbox(message_postbox);
}

}  // namespace pycoll
