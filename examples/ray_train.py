"""Ray Train starts an agent of jaxdist on each worker, and starts it again where one has failed.

python examples/ray_train.py --workers 2 -- --config quickstart --workdir /shared/run

Ray joins CPU workers to no group, and calls their function in a thread that no signal reaches. So the run
is a child process, which saves when it is asked to stop; all workers need the same folder.
"""

import argparse
import os
import socket
import subprocess
import sys

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, collective, get_context
from ray.train.v2.jax import JaxTrainer

PREEMPTED = 75  # all is saved; another start goes on


def address_here() -> str:
    """Returns host:port of this machine, at which the processes of a run may meet."""
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def train(settings: dict) -> None:
    """Runs one agent of the run until its processes have ended."""
    context = get_context()
    number, index = context.get_world_size(), context.get_world_rank()
    at = collective.broadcast_from_rank_zero(address_here())
    place = {
        "JAXDIST_AGENTS": str(number),
        "JAXDIST_AGENT": str(index),
        "JAXDIST_AGENTS_AT": at,
    }
    command = [
        sys.executable,
        "-m",
        "jaxdist.launch",
        "--",
        sys.executable,
        "-m",
        "jaxdist.train",
    ]
    code = subprocess.call(
        [*command, *settings["arguments"]],
        env=os.environ | place,
        cwd=settings["folder"],
    )
    if code not in (0, PREEMPTED):
        raise RuntimeError(
            f"jaxdist launch ended with {code}: see docs/reference/exit-codes-and-events.md"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--failures", type=int, default=3, help="starts again after a failure"
    )
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of a worker")
    parser.add_argument("arguments", nargs="+", help="flags of jaxdist train, after --")
    given = parser.parse_args()
    of_a_worker = {"CPU": 1, "GPU": given.gpus} if given.gpus else {"CPU": 1}
    trainer = JaxTrainer(
        train,
        train_loop_config={"arguments": given.arguments, "folder": os.getcwd()},
        scaling_config=ScalingConfig(
            num_workers=given.workers, resources_per_worker=of_a_worker
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=given.failures)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
