// Messages in the background: the type `Message`, from which what isend and irecv return derives.
//
//   message._begin(postbox, session, ticket, memory, sends, limit_s)
//
// holds on to a message in the postbox, and to its array, until it has ended: it is in the set
// session.under_way. One that has not begun has been sent.
//
//   message.wait(timeout)    waits for it, by default as long as _begin has said
//   message._end()           lets go of it
//   message._take_back()     likewise, if no thread waits for it, and returns its array
//   message._close()         lets go of the postbox: a wait fails
//
// One thread at a time waits. If that fails, wait calls message._fail(error), a method in Python,
// before another thread may.
//
// The attributes are _session, _memory, _ticket, sends, _ended, _source, the rank from which it has
// come, and _error, what it has failed with, which only Python code sets.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "p2p/postbox.h"
#include "transports/messages/message_postbox.h"

namespace pycoll {

// One of them, or none where the communicator is closed.
struct Boxes {
  std::shared_ptr<Postbox> host{};
  std::shared_ptr<MessagePostbox> wire{};

  static Boxes of(pybind11::handle postbox);
};

void add_message_work(pybind11::module_& m);

// Whether it is a type that derives from `Message`.
bool is_message_work(PyObject* type);

// What _begin takes.
struct Beginning {
  Boxes boxes;
  pybind11::object session;
  uint64_t ticket;
  PyObject* memory;
  bool sends;
  double limit_s;
};

// A new object of such a type; without a ticket one that has been sent.
pybind11::object new_message_work(const pybind11::object& type, const Beginning& beginning);

}  // namespace pycoll
