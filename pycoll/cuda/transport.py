"""What all ways of running a call on a device have in common: plans bound to numbers."""

from __future__ import annotations

from pycoll.cuda.program import Extent
from pycoll.runtime.plans import LAYOUT_OWN, CallSpec, binding_numbers
from pycoll.schedule.plan import Plan


def extent_of(spec: CallSpec, plan: Plan, world_size: int) -> Extent:
    """Return the sizes with which a plan of messages runs a call."""
    numbers = binding_numbers(spec, world_size, plan.schedule.chunks, plan.scales_in_fold)
    return Extent(
        count=spec.count,
        chunk=numbers["chunk"],
        itemsize=spec.itemsize,
        own_in=numbers["layout_in"] == LAYOUT_OWN,
        own_out=numbers["layout_out"] == LAYOUT_OWN,
        scale_n=numbers["scale_n"],
        scale_at_exit=bool(numbers["scale_at_exit"]),
    )
