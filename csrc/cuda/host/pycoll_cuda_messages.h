// C interface of libpycoll_cuda.so, continued: messages between two ranks of a peer group.
#pragma once

#include "cuda/host/pycoll_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

// One side of a message. Sender and receiver have to give the same number, size and way.
typedef struct {
  uint64_t number;  // of its first part, among those from the sender to the receiver
  uint64_t nbytes;
  void* array;      // what is sent, or where it goes; device memory
  uint64_t offset;  // receiver, of a message that is not slotted: where it lies in the peer's heap
  int32_t peer;
  int32_t slotted;  // through slots at the receiver, which the sender fills; otherwise the receiver
                    // reads it in the sender's heap
  int32_t posts;    // sender: it is sent by this launch
  int32_t awaits;   // sender: the launch ends when the receiver has it
} PycollCudaMessage;

// How many parts a message has; the number of the next one to the same rank is so much higher.
PYCOLL_CUDA_API uint64_t pycoll_cuda_message_parts(int world_size, uint64_t nbytes, int slotted);

// Launches one side of a message. A sender waits only for room, until the 64th part before, from it
// to the same receiver, is taken; and, if it is to, for the receiver. Launches need no order among
// each other, and none with calls of the group; what is sent has to be there for the stream. They
// cannot be captured, since numbers do not change from one run to the next. nblocks, nthreads,
// timeout_ns and errors: as for pycoll_cuda_launch. A rank that gives up names what it waited for
// by `instruction` of its record: 0xFFFFFFFC room, 0xFFFFFFFD a message, 0xFFFFFFFE its receiver.
PYCOLL_CUDA_API int pycoll_cuda_send(PycollCudaGroup* group, const PycollCudaMessage* message,
                                     int nblocks, int nthreads, uint64_t timeout_ns, void* stream);
PYCOLL_CUDA_API int pycoll_cuda_receive(PycollCudaGroup* group, const PycollCudaMessage* message,
                                        int nblocks, int nthreads, uint64_t timeout_ns,
                                        void* stream);

// 1 in *taken if the receiver has a message of this rank. Copies counts from the device.
PYCOLL_CUDA_API int pycoll_cuda_message_taken(PycollCudaGroup* group, const PycollCudaMessage* send,
                                              int* taken);

#ifdef __cplusplus
}
#endif
