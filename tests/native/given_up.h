// For tests of failures: what a transport may still write to or read is never let go, which is no
// leak. See MpiTask and MpiLink.
#pragma once

extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() {
  return "leak:MpiTask::~MpiTask\n"
         "leak:MpiLink::parcel\nleak:MpiLink::poll\n"
         "leak:MpiMail::fetch\n"
         "leak:SocketApi::isend\nleak:SocketApi::irecv\n";
}
