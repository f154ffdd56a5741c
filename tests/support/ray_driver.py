"""Runs Ray Serve with little memory: `python -m tests.support.ray_driver FILE`.

It does what `serve run FILE` does.

The cluster belongs to this process, and ends with it.
"""

import sys

import ray
from ray.serve.scripts import cli

if __name__ == "__main__":
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        namespace="serve",
        configure_logging=False,
    )
    cli(["run", sys.argv[1]])
