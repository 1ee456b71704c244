"""What is measured on: device, driver, versions."""

import platform

from common import open_stage

from pycoll.cli.common.machine import describe
from pycoll.cuda.device.library import library
from pycoll.cuda.probe import parts

IPC_EVENTS = 125  # cudaDevAttrIpcEventSupport, which CuPy has no name for


def main():
    writer, cupy = open_stage()
    info = library().device(0)
    driver, runtime = library().versions()
    writer.row(
        "device",
        device=info.name.decode(),
        multiprocessors=info.multiprocessors,
        memory_bytes=info.memory_bytes,
        l2_bytes=info.l2_bytes,
        driver=driver,
        runtime=runtime,
        cupy=cupy.__version__,
        python=platform.python_version(),
        **{k: v for k, v in describe().items() if k in ("pycoll", "commit", "cpu", "cores")},
    )
    runtime = cupy.cuda.runtime
    for name, number in (
        ("compute mode", runtime.cudaDevAttrComputeMode),
        ("IPC events", IPC_EVENTS),
    ):
        writer.row("attribute", None, attribute=name, value=runtime.deviceGetAttribute(number, 0))
    for part in parts():
        writer.row("part", part=part.name, found=part.found)


if __name__ == "__main__":
    main()
