"""All cases by name."""

from torch_clients import checkpoints, data_parallel, pipelines, sharding, trainers

CASES = {
    **data_parallel.CASES,
    **sharding.CASES,
    **pipelines.CASES,
    **checkpoints.CASES,
    **trainers.CASES,
}
