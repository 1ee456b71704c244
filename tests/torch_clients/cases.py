"""All cases by name."""

from torch_clients import checkpoints, data_parallel, pipelines, sharding

CASES = {
    **data_parallel.CASES,
    **sharding.CASES,
    **pipelines.CASES,
    **checkpoints.CASES,
}
