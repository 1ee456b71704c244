"""Kill a forked process at a chosen system call, by ptrace: what a power cut leaves behind."""

import contextlib
import ctypes
import os
import platform
import signal
import traceback

_TRACEME, _SYSCALL, _SETOPTIONS, _GET_INFO = 0, 24, 0x4200, 0x420E
_TRACESYSGOOD, _TRACECLONE, _EXITKILL = 1, 1 << 3, 1 << 20
_SYSTEM_CALL = signal.SIGTRAP | 0x80
_WALL = 0x40000000  # also threads
_MEMORY = {"x86_64": {9, 10, 11, 12, 13, 14, 24, 25, 28, 56, 202, 203, 204, 273, 334, 435}}
"""Calls that see memory and threads only, such as mmap and futex: nothing on a disk changes."""


def _ptrace(request, pid, where=None, data=None):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(request, pid, where, data) < 0:
        raise OSError(ctypes.get_errno(), f"ptrace({request}) of {pid}")


def _enters(thread):
    """Tell whether a thread that has stopped at a system call is about to make one that counts."""
    info = ctypes.create_string_buffer(96)
    _ptrace(_GET_INFO, thread, len(info), ctypes.cast(info, ctypes.c_void_p))
    number = int.from_bytes(info.raw[24:32], "little")
    return info.raw[0] == 1 and number not in _MEMORY.get(platform.machine(), ())


def killed_at(number, fn):
    """Fork a process that calls `fn` and is killed before a system call.

    Args:
        number: Which one, counted from 0 over all threads, once `fn` has called its argument.
            Calls that cannot change a file do not count, where they are known.
        fn: A function of a function without arguments, which begins the count.

    Returns:
        Whether the process was killed; False if `fn` had ended by then.
    """
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            try:
                fn(_begin)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
        os._exit(1)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    _ptrace(_SETOPTIONS, pid, data=_TRACESYSGOOD | _TRACECLONE | _EXITKILL)
    _ptrace(_SYSCALL, pid)
    while True:
        thread, status = os.waitpid(-1, _WALL)
        if not os.WIFSTOPPED(status):
            if thread == pid:
                assert status == 0
                return False
            continue
        with contextlib.suppress(ProcessLookupError):  # a thread that ends with its process
            if os.WSTOPSIG(status) == _SYSTEM_CALL and _enters(thread):
                if number == 0:
                    os.kill(pid, signal.SIGKILL)
                    while os.waitpid(-1, _WALL)[0] != pid:
                        pass
                    return True
                number -= 1
            _ptrace(_SYSCALL, thread)


def _begin():
    _ptrace(_TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
