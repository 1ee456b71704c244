// The part of pycoll._C for messages between two ranks.
#include <pybind11/pybind11.h>

#include "base/gil.h"
#include "p2p/mailbox.h"
#include "p2p/postbox.h"

namespace py = pybind11;
namespace pycoll {

void bind_mail(py::module_& m) {
  using namespace pybind11::literals;
  using Release = py::call_guard<Unlocked>;
  py::enum_<Offers>(m, "Offers")
      .value("NEVER", Offers::kNever)
      .value("WANTED", Offers::kWanted)
      .value("ALWAYS", Offers::kAlways);
  py::class_<Mailboxes>(m, "Mailboxes")
      .def(py::init<std::shared_ptr<Engine>, Offers>(), "engine"_a, "offers"_a = Offers::kNever)
      .def(
          "send",
          [](Mailboxes& box, uintptr_t data, uint64_t nbytes, uint32_t type, uint32_t dst,
             uint32_t tag, double timeout_s) {
            box.send(reinterpret_cast<void*>(data), nbytes, type, dst, tag, timeout_s);
          },
          Release())
      .def(
          "recv",
          [](Mailboxes& box, uintptr_t data, uint64_t nbytes, uint32_t type, int32_t src,
             uint32_t tag, double timeout_s) {
            return box.recv(reinterpret_cast<void*>(data), nbytes, type, src, tag, timeout_s);
          },
          Release());
  py::class_<Postbox>(m, "Postbox")
      .def(py::init<std::shared_ptr<Engine>, Offers>(), "engine"_a, "offers"_a = Offers::kNever)
      .def(
          "send",
          [](Postbox& box, uintptr_t data, uint64_t nbytes, uint32_t type, uint32_t dst,
             uint32_t tag) {
            return box.send(reinterpret_cast<void*>(data), nbytes, type, dst, tag);
          },
          "data"_a, "nbytes"_a, "type"_a, "dst"_a, "tag"_a, Release())
      .def(
          "recv",
          [](Postbox& box, uintptr_t data, uint64_t nbytes, uint32_t type, int32_t src,
             uint32_t tag) {
            return box.recv(reinterpret_cast<void*>(data), nbytes, type, src, tag);
          },
          "data"_a, "nbytes"_a, "type"_a, "src"_a, "tag"_a, Release())
      .def("done", &Postbox::done, "ticket"_a, Release())
      .def("wait", &Postbox::wait, "ticket"_a, "timeout_s"_a, Release())
      .def("close", &Postbox::close, Release());
}

}  // namespace pycoll
