// Messages of plain NumPy arrays, tensors and objects, from a method of the communicator to the
// postbox without Python code.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "bindings/p2p/message_work.h"

namespace pycoll {

// What a communicator's messages need.
struct MessagePath {
  Boxes boxes{};       // none: the communicator is closed
  double limit_s = 0;  // of calls that name none
  // Number of each dtype that arrays have had, and of each ArrayKey::element that tensors have had.
  pybind11::dict types;
  pybind11::object work;  // the class of what isend and irecv return
  // Of objects: pack(x, pickle) makes bytes, whose element type is `bytes`, and unpack(data,
  // pickle, sender) the object; `objects` are the receives that come first, if any.
  pybind11::object pack{}, unpack{}, objects{};
  uint32_t bytes = 0;
};

enum class MessageCall : uint8_t {
  kSend,
  kRecv,
  kIsend,
  kIrecv,
  kSendrecv,
  kSendObject,
  kRecvObject,
};

// The arguments of any message, in the order in which they are passed around.
enum MessageArg {
  kMessage,
  kData,
  kInto,
  kTo,
  kFrom,
  kTag,
  kTagInto,
  kWithin,
  kOnStream,
  kPickled,
};

// Runs a call. Null with a Python error set if it has failed; NotImplemented if
// only Python code can serve it. May throw pybind11 exceptions.
//
// What is left to do is done by the session: leave_behind(ticket, x, limit) waits
// for a message that is sent, finish_exchange(coming, going, x, limit) for two,
// message_failed(error, sent, receives) raises what a call raises that has failed, and
// nothing_came(call, src, limit) what one raises that has received nothing.
PyObject* call_message(PyObject* fastcall, MessageCall call, PyObject* const* args);

// fastcall.use_messages(postbox, types, work, limit_s, (pack, unpack, bytes, objects)): see
// MessagePath. Without a postbox, None, only Python code serves messages.
PyObject* use_messages(PyObject* fastcall, PyObject* const* args, Py_ssize_t nargs);

}  // namespace pycoll
