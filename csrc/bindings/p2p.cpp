// The part of pycoll._C for messages between two ranks of a host.
#include "bindings/bindings.h"
#include "p2p/mailbox.h"
#include "p2p/postbox.h"
#include "transports/messages/message_postbox.h"

namespace py = pybind11;
namespace pycoll {

void bind_p2p(py::module_& m) {
  using namespace pybind11::literals;
  py::enum_<Offers>(m, "Offers")
      .value("NEVER", Offers::kNever)
      .value("WANTED", Offers::kWanted)
      .value("ALWAYS", Offers::kAlways);
  const auto constructor = py::init<std::shared_ptr<Engine>, Offers>();
  py::class_<Mailboxes, std::shared_ptr<Mailboxes>> mailboxes(m, "Mailboxes");
  mailboxes.def(constructor, "engine"_a, "offers"_a = Offers::kNever);
  add_send_recv<Mailboxes, double>(mailboxes);
  py::class_<Postbox> postbox(m, "Postbox");
  postbox.def(constructor, "engine"_a, "offers"_a = Offers::kNever)
      .def(py::init<std::shared_ptr<Engine>, std::shared_ptr<Mailboxes>>());
  add_postbox_methods<Postbox>(postbox);
  py::class_<MessageMailbox, std::shared_ptr<MessageMailbox>> message_mailbox(m, "MessageMailbox");
  message_mailbox.def(py::init<std::shared_ptr<MessageEngine>>(), "engine"_a)
      .def_property_readonly("given_up", &MessageMailbox::given_up);
  add_send_recv<MessageMailbox, double>(message_mailbox);
  py::class_<MessagePostbox> message_postbox(m, "MessagePostbox");
  message_postbox.def(py::init<std::shared_ptr<MessageEngine>>(), "engine"_a)
      .def(py::init<std::shared_ptr<MessageEngine>, std::shared_ptr<MessageMailbox>>());
  add_postbox_methods<MessagePostbox>(message_postbox);
}

}  // namespace pycoll
