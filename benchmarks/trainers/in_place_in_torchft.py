"""A plugin of pytest: torchft's tests take pycoll's process group where they name that of gloo.

torchft makes gloo's groups in C++ itself, so what `in_place_of_gloo` changes is not asked.
"""

import os

import in_place_of_gloo
import torchft.process_group

if os.environ["BACKEND_NAME"] == "pycoll":
    from pycoll.torch.torchft import ProcessGroupPycoll

    class Counted(ProcessGroupPycoll):
        def _create_pg(self, store, rank, world_size):
            group = super()._create_pg(store, rank, world_size)
            in_place_of_gloo.count(group)
            return group

    torchft.process_group.ProcessGroupGloo = Counted
