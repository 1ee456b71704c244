"""Parameter servers for PyTorch modules: `pycoll.parallel.ParameterServer`, filled by autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from pycoll.comm import Communicator
from pycoll.errors import ArgumentError
from pycoll.parallel.engine.options import Options
from pycoll.parallel.server import parameter_server
from pycoll.parallel.server.parts import Parts
from pycoll.parallel.server.placing import Form
from pycoll.torch.data_parallel import DataParallel, LossFn
from pycoll.torch.modules.module_parameters import chain_of, precision_of


class _ModuleParts(Parts):
    """What one rank has of a module."""

    def understand(
        self, model: Any, loss: Any, servers: int, settings: dict[str, Any]
    ) -> tuple[Form, Options]:
        """Return the form of parameters, and the options."""
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"the module is a {type(model).__name__}")
        if not callable(loss):
            raise ArgumentError(f"loss={loss!r}; expected a function of output and targets")
        self._module = model
        precision = precision_of(model)
        form, options = super().understand(chain_of(model), None, servers, settings)
        return form, replace(options, precision=precision)

    def make_engine(self, loss: Any, options: Options) -> DataParallel:
        """Make what runs the module on a worker."""
        return DataParallel(self._module, loss, self._mesh, options)


class ParameterServer(parameter_server.ParameterServer):
    """Trains a PyTorch module on CPUs with parameter servers.

    On workers the module's parameters become views of what is pulled: those of the last step, or
    those after it once `pull` was called. On servers the module gives the first values.
    """

    def __init__(
        self, comm: Communicator, module: torch.nn.Module, loss: LossFn, **arguments: Any
    ) -> None:
        """Divide ranks and parameters; a collective.

        Args:
            comm: The ranks; stays the caller's.
            module: Its trainable parameters are all float32, or all float64.
            loss: Returns the sum of the losses of a micro-batch, and the number of samples.
            arguments: As for `pycoll.parallel.ParameterServer`; the precision follows from the
                parameters.
        """
        super().__init__(comm, module, loss, **arguments)

    def _prepare(
        self, comm: Communicator, model: Any, loss: Any, plan: dict[str, Any], settings: Any
    ) -> Parts:
        return _ModuleParts(comm, model, loss, plan, settings)
