// For tests of failures: what a transport may still write to or read is never let go, which is no
// leak. See PayloadTask and MessageLink.
#pragma once

extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:PayloadTask::PayloadTask\n"
         "leak:MessageLink::free_buffer\nleak:MessageLink::receive_eager\n"
         "leak:MessagePostbox::receive_payload\n"
         "leak:SocketApi::isend\nleak:SocketApi::irecv\n";
}
