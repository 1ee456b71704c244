// Tagged messages between two ranks, on one host or not. Conversions only; contracts are in the
// headers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/calls/arguments.h"
#include "bindings/owned_class.h"
#include "p2p/mailbox.h"
#include "p2p/postbox.h"
#include "transports/messages/message_engine.h"
#include "transports/messages/message_postbox.h"

namespace py = pybind11;
namespace pycoll {
namespace {

struct PlainArray {
  char* data;
  uint64_t nbytes;
  uint32_t type;
};

// A NumPy array in one stretch of memory, whose type has a number; nothing for anything else.
std::optional<PlainArray> plain_array(const py::handle& x, const py::dict& types, bool written) {
  const auto memory = stretch(x, written);
  if (!memory) return std::nullopt;
  PyObject* const type = reinterpret_cast<PyObject*>(py::detail::array_proxy(x.ptr())->descr);
  PyObject* const number = PyDict_GetItemWithError(types.ptr(), type);
  if (number == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (number == nullptr) return std::nullopt;
  return PlainArray{reinterpret_cast<char*>(memory->first), memory->second,
                    static_cast<uint32_t>(PyLong_AsUnsignedLong(number))};
}

// A Python int from `lowest` to below `end`; nothing for anything else, also for a bool.
std::optional<int64_t> plain_number(const py::handle& x, int64_t lowest, int64_t end) {
  if (!PyLong_CheckExact(x.ptr())) return std::nullopt;
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(x.ptr(), &overflow);
  if (overflow != 0 || number < lowest || number >= end) return std::nullopt;
  return number;
}

constexpr int64_t kTags = int64_t{1} << 31;
// pycoll.ANY, as a source or a tag. No number that an MPI has for its own: -1 and -2 are "any rank"
// and "no rank", or the other way round.
constexpr int64_t kAny = -(1 << 20);

// A rank to receive from, -1 for any; nothing for anything else.
std::optional<int64_t> plain_source(const py::handle& x, uint32_t ranks) {
  const auto rank = plain_number(x, kAny, ranks);
  if (rank == kAny) return -1;
  return rank && *rank >= 0 ? rank : std::nullopt;
}

// A message as it usually is: a plain array of a known type, and numbers in range.
struct PlainMessage {
  PlainArray array;
  int32_t peer;
  uint32_t tag;
};

std::optional<PlainMessage> plain_message(const py::handle& x, const py::dict& types, bool incoming,
                                          const py::handle& peer, uint32_t ranks,
                                          const py::handle& tag) {
  const auto rank = incoming ? plain_source(peer, ranks) : plain_number(peer, 0, ranks);
  const auto label = plain_number(tag, 0, kTags);
  const auto array = rank && label ? plain_array(x, types, incoming) : std::nullopt;
  if (!array) return std::nullopt;
  return PlainMessage{*array, static_cast<int32_t>(*rank), static_cast<uint32_t>(*label)};
}

constexpr double kPatienceS = 1e-4;  // for room, before a small message waits for it elsewhere

// Adds put(x, types, dst, tag, timeout_s), which returns true if it has sent the message, and false
// if it is a small one for which there is no room, and
// take(x, types, src, tag, timeout_s), which returns its sender: of what is usual. Of anything else
// they do nothing.
template <typename Box, typename Class>
void add_plain_messages(Class& cls) {
  using namespace pybind11::literals;
  cls.def(
         "put",
         [](Box& box, const py::handle& x, const py::dict& types, const py::handle& dst,
            const py::handle& tag, double timeout_s) -> std::optional<bool> {
           const auto m = plain_message(x, types, false, dst, box.world_size(), tag);
           if (!m) return std::nullopt;
           const auto& [array, peer, label] = *m;
           const Unlocked unlocked;
           if constexpr (std::is_same_v<Box, Mailboxes>) {
             return box.send(array.data, array.nbytes, array.type, uint32_t(peer), label, timeout_s,
                             kPatienceS);
           } else {
             box.send(array.data, array.nbytes, array.type, uint32_t(peer), label, timeout_s);
             return true;
           }
         },
         "x"_a, "types"_a, "dst"_a, "tag"_a, "timeout_s"_a)
      .def(
          "take",
          [](Box& box, const py::handle& x, const py::dict& types, const py::handle& src,
             const py::handle& tag, double timeout_s) -> std::optional<uint32_t> {
            const auto m = plain_message(x, types, true, src, box.world_size(), tag);
            if (!m) return std::nullopt;
            const Unlocked unlocked;
            return box.recv(m->array.data, m->array.nbytes, m->array.type, m->peer, m->tag,
                            timeout_s);
          },
          "x"_a, "types"_a, "src"_a, "tag"_a, "timeout_s"_a);
}

}  // namespace

void bind_p2p(py::module_& m) {
  using namespace pybind11::literals;
  m.attr("ANY") = kAny;
  py::enum_<Offers>(m, "Offers")
      .value("NEVER", Offers::kNever)
      .value("WANTED", Offers::kWanted)
      .value("ALWAYS", Offers::kAlways);
  OwnedClass<Mailboxes> mailboxes(m, "Mailboxes");
  mailboxes.def(made<Mailboxes, std::shared_ptr<Engine>, Offers>(), "engine"_a,
                "offers"_a = Offers::kNever);
  add_send_recv<Mailboxes, double>(mailboxes);
  add_plain_messages<Mailboxes>(mailboxes);
  using Exchanged = std::tuple<uint32_t, Postbox::Ticket, Postbox::Ticket>;
  OwnedClass<Postbox> postbox(m, "Postbox");
  postbox
      .def(made<Postbox, std::shared_ptr<Engine>, Offers>(), "engine"_a,
           "offers"_a = Offers::kNever)
      .def(made<Postbox, std::shared_ptr<Engine>, std::shared_ptr<Mailboxes>>())
      .def(  // what is usual: a plain array of a known type, numbers in range; else returns None
          "post",
          [](Postbox& box, const py::handle& x, const py::dict& types, const py::handle& dst,
             const py::handle& tag) -> std::optional<Postbox::Ticket> {
            const auto m = plain_message(x, types, false, dst, box.world_size(), tag);
            if (!m) return std::nullopt;
            const Unlocked unlocked;
            return box.send(m->array.data, m->array.nbytes, m->array.type, uint32_t(m->peer),
                            m->tag);
          },
          "x"_a, "types"_a, "dst"_a, "tag"_a)
      .def(  // both ways at once: the sender of what has come; or the tickets of what comes and
             // goes
          "exchange",
          [](Postbox& box, const py::handle& x, const py::handle& out, const py::dict& types,
             const py::handle& dst, const py::handle& src, const py::handle& tag,
             const py::handle& recv_tag, double timeout_s) -> std::optional<Exchanged> {
            const auto going = plain_message(x, types, false, dst, box.world_size(), tag);
            const auto coming = plain_message(out, types, true, src, box.world_size(), recv_tag);
            if (!going || !coming || going->array.data == coming->array.data) return std::nullopt;
            const Unlocked unlocked;
            const auto& [to, from] = std::pair(going->array, coming->array);
            const auto first =
                box.recv(from.data, from.nbytes, from.type, coming->peer, coming->tag);
            try {
              const auto second =
                  box.send(to.data, to.nbytes, to.type, uint32_t(going->peer), going->tag);
              if (second != 0) return Exchanged(0, first, second);
              return Exchanged(box.wait(first, timeout_s), 0, 0);
            } catch (...) {
              box.forget(first);
              throw;
            }
          },
          "x"_a, "out"_a, "types"_a, "dst"_a, "src"_a, "tag"_a, "recv_tag"_a, "timeout_s"_a)
      .def("small", &Postbox::small)
      .def("leave_behind", &Postbox::leave_behind, Release())
      .def(
          "expect",
          [](Postbox& box, const py::handle& x, const py::dict& types, const py::handle& src,
             const py::handle& tag) -> std::optional<Postbox::Ticket> {
            const auto m = plain_message(x, types, true, src, box.world_size(), tag);
            if (!m) return std::nullopt;
            const Unlocked unlocked;
            return box.recv(m->array.data, m->array.nbytes, m->array.type, m->peer, m->tag);
          },
          "x"_a, "types"_a, "src"_a, "tag"_a)
      .def(
          "take",
          [](Postbox& box, const py::handle& x, const py::dict& types, const py::handle& src,
             const py::handle& tag, double timeout_s) -> std::optional<uint32_t> {
            const auto m = plain_message(x, types, true, src, box.world_size(), tag);
            if (!m) return std::nullopt;
            const Unlocked unlocked;
            return box.take(m->array.data, m->array.nbytes, m->array.type, m->peer, m->tag,
                            timeout_s);
          },
          "x"_a, "types"_a, "src"_a, "tag"_a, "timeout_s"_a);
  add_postbox_methods<Postbox>(postbox);
  OwnedClass<MessagePostbox> message_postbox(m, "MessagePostbox");
  message_postbox.def(made<MessagePostbox, std::shared_ptr<MessageEngine>>(), "engine"_a)
      .def_property_readonly("given_up", &MessagePostbox::given_up);
  add_send_recv<MessagePostbox, double>(message_postbox);
  add_plain_messages<MessagePostbox>(message_postbox);
  add_postbox_methods<MessagePostbox>(message_postbox);
}

}  // namespace pycoll
