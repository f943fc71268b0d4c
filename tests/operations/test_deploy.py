"""The templates under deploy/: what schedulers accept, what they start, what they do
after a loss.
"""

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxdist import launch
from jaxdist.config import EXIT_CONFIG, EXIT_NO_CHECKPOINT
from jaxdist.distributed.cluster import find_cluster
from jaxdist.operations.launch import run_progress
from jaxdist.planner.targets import parse
from support.paths import DATA, ROOT

DEPLOY = ROOT / "deploy"
SCHEMA = json.loads((DATA / "jobset-v1alpha2.json").read_text())
QUANTITY = r"\d+(\.\d+)?(m|k|Ki|Mi|Gi|Ti|M|G|T)?"
TYPES: dict[str, Any] = {"string": str, "integer": int, "boolean": bool}


def refused(value: Any, schema: dict, path: str = "") -> list[str]:
    """Returns what a strict API server would refuse, a line each."""
    schema = SCHEMA[schema["$ref"]] if "$ref" in schema else schema
    if "items" in schema:
        found = [] if isinstance(value, list) else [f"{path}: no list"]
        return found or [
            x
            for n, v in enumerate(value)
            for x in refused(v, schema["items"], f"{path}[{n}]")
        ]
    if "properties" in schema or "values" in schema:
        if not isinstance(value, dict):
            return [f"{path}: no object"]
        known, rest = schema.get("properties", {}), schema.get("values")
        found = [
            f"{path}.{name}: is missing"
            for name in schema.get("required", [])
            if name not in value
        ]
        found += [
            f"{path}.{name}: is unknown"
            for name in value
            if name not in known and rest is None
        ]
        parts = {name: known.get(name, rest) for name in value if name in known or rest}
        return found + [
            x
            for name, part in parts.items()
            for x in refused(value[name], part, f"{path}.{name}")
        ]
    if "enum" in schema:
        return (
            []
            if value in schema["enum"]
            else [f"{path}: {value!r} is none of {schema['enum']}"]
        )
    if schema["type"] == "quantity":
        return (
            []
            if re.fullmatch(QUANTITY, str(value))
            else [f"{path}: {value!r} is no quantity"]
        )
    if type(value) is not TYPES[schema["type"]]:
        return [f"{path}: {value!r} is no {schema['type']}"]
    wrong = "pattern" in schema and not re.fullmatch(schema["pattern"], value)
    return [f"{path}: {value!r} does not match"] if wrong else []


JOBSETS = ("jobset.yaml", "jobset_tpu.yaml")


def read_jobset(name: str = "jobset.yaml") -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.mark.parametrize("name", JOBSETS)
def test_the_jobset_is_what_the_api_accepts(name):
    assert refused(read_jobset(name), SCHEMA) == []


BREAKS = {
    "spec.failurePolicy.restartStrategy: 'Blocking'": lambda s: s[
        "failurePolicy"
    ].update(restartStrategy="Blocking"),
    "spec.failurePolicy.maxRestart: is unknown": lambda s: s["failurePolicy"].update(
        maxRestart=1
    ),
    "spec.failurePolicy.rules[0].name: 'permanent-fault'": lambda s: s["failurePolicy"][
        "rules"
    ][0].update(name="permanent-fault"),
    "spec.replicatedJobs[0].template: is missing": lambda s: s["replicatedJobs"][0].pop(
        "template"
    ),
    "spec.replicatedJobs[0].template.spec.parallelism: '4'": lambda s: s[
        "replicatedJobs"
    ][0]["template"]["spec"].update(parallelism="4"),
    "template.spec.template.spec.containers[0].env[0].value: 4": lambda s: s[
        "replicatedJobs"
    ][0]["template"]["spec"]["template"]["spec"]["containers"][0]["env"][0].update(
        value=4
    ),
}


@pytest.mark.parametrize("said", BREAKS)
def test_what_the_api_refuses_is_seen(said):
    jobset = copy.deepcopy(read_jobset())
    BREAKS[said](jobset["spec"])
    (found,) = refused(jobset, SCHEMA)
    assert said in found


@pytest.mark.parametrize("name", JOBSETS)
def test_the_jobset_starts_an_agent_that_finds_its_place(name):
    jobset = read_jobset(name)
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["parallelism"] == job["completions"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["restartPolicy"] == "Never"
    options, _ = launch._options(container["command"][3:] + container["args"])
    assert options.processes == 1
    assert options.grace_s < pod["terminationGracePeriodSeconds"]
    assert run_progress.run_folder(options.command) == Path("/runs/quickstart")
    labels = {
        "jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"],
        "jobset.sigs.k8s.io/replicatedjob-name": workers["name"],
        "jobset.sigs.k8s.io/restart-attempt": "0",
    }
    environ = {"JOB_COMPLETION_INDEX": "2"}  # Kubernetes sets it in Indexed jobs
    if "tpu" in name:  # GKE sets these in pods of a headless service that ask for TPUs
        hosts = ",".join(f"jaxdist-workers-0-{n}.jaxdist" for n in range(4))
        environ |= {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": hosts}
    for variable in container["env"]:
        field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        environ[variable["name"]] = variable.get("value") or labels[field.split("'")[1]]
    found = find_cluster(environ)
    assert (found.number, found.index) == (job["parallelism"], 2)
    assert found.host == "jaxdist-workers-0-0.jaxdist"
    environ["JOBSET_RESTART_ATTEMPT"] = "1"
    assert find_cluster(environ).port != found.port, "a new start has a port of its own"


def answer(jobset: dict[str, Any], code: int) -> str:
    """Returns what JobSet does after a pod's exit code, by its two failure policies."""
    (workers,) = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert job["backoffLimit"] == 0, "a pod alone never starts again"
    reason = "BackoffLimitExceeded"
    for rule in job["podFailurePolicy"]["rules"]:
        codes = rule["onExitCodes"]
        assert (rule["action"], codes["operator"]) == ("FailJob", "In")
        assert codes["containerName"] == container["name"]
        if code in codes["values"]:
            reason = "PodFailurePolicy"
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] >= 10
    for rule in policy["rules"]:
        if reason in rule["onJobFailureReasons"]:
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize("name", JOBSETS)
@pytest.mark.parametrize("code", [1, 70, 75, 76, 77, 78, 137])
def test_the_jobset_starts_again_what_a_new_start_may_cure(name, code):
    ends = code in (EXIT_NO_CHECKPOINT, EXIT_CONFIG)
    assert answer(read_jobset(name), code) == (
        "FailJobSet" if ends else "RestartJobSet"
    )


def test_the_tpu_jobset_has_a_pod_for_each_host_of_one_slice():
    jobset = read_jobset("jobset_tpu.yaml")
    (workers,) = jobset["spec"]["replicatedJobs"]
    assert workers["replicas"] == 1, "agents of several slices do not find each other"
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    place = "cloud.google.com/gke-tpu-"
    family = pod["nodeSelector"][place + "accelerator"].split("-")[1]
    slice_of = parse(f"{family}:{pod['nodeSelector'][place + 'topology']}")
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert chips == slice_of.chip.chips_per_host
    assert chips * job["parallelism"] == slice_of.num_chips
    assert job["parallelism"] == slice_of.hosts
    text = (DEPLOY / "jobset_tpu.yaml").read_text()
    assert f"plan --on {slice_of.text}` is this slice" in text
    # the headless service that gives pods their names has the agents' host in it
    network = jobset["spec"]["network"]
    assert network == {
        "enableDNSHostnames": True,
        "subdomain": jobset["metadata"]["name"],
    }
    keys = jobset["metadata"]["annotations"]
    assert keys["alpha.jobset.sigs.k8s.io/exclusive-topology"].endswith("gke-nodepool")


@pytest.mark.parametrize("name", ["slurm.sh", "tpu_vm.sh"])
def test_the_scripts_are_whole(name):
    checked = subprocess.run(
        ["bash", "-n", DEPLOY / name], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    assert os.access(DEPLOY / name, os.X_OK)


FAKES = {
    "srun": 'echo "srun $*" >> said; sleep 100 & echo $! > pid; wait $!; exit $(cat code)',
    "scancel": 'echo "scancel $*" >> said; kill $(cat pid)',
    "scontrol": 'echo "scontrol $*" >> said',
}


@pytest.mark.parametrize(
    ("code", "requeued"), [(75, True), (70, True), (137, True), (0, False), (78, False)]
)
def test_the_slurm_script_requeues_what_a_new_start_may_cure(tmp_path, code, requeued):
    for name, text in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "code").write_text(str(code))
    environ = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
    }
    job = subprocess.Popen(
        [DEPLOY / "slurm.sh", "--config", "x"], cwd=tmp_path, env=environ
    )
    until = time.monotonic() + 20
    while not (tmp_path / "pid").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    job.send_signal(signal.SIGUSR1)  # as --signal=B:USR1 does before the time is up
    assert job.wait(20) == (0 if requeued else code)
    said = (tmp_path / "said").read_text()
    assert "jaxdist.launch --processes 1 -- python -m jaxdist.train --config x" in said
    assert "scancel --signal=TERM 7.0" in said
    assert ("scontrol requeue 7" in said) == requeued


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI's mpirun")
def test_agents_under_a_real_mpirun():
    agents = [
        "mpirun",
        "--allow-run-as-root",
        "--oversubscribe",
        "-n",
        "2",
        sys.executable,
        "-m",
        "jaxdist.launch",
    ]

    def run(text: str) -> subprocess.CompletedProcess:
        command = [*agents, "--processes", "2", "--", "/bin/sh", "-c", text]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    done = run(
        "echo $JAXDIST_PROCESS_ID of $JAXDIST_NUM_PROCESSES at $JAXDIST_COORDINATOR"
    )
    assert done.returncode == 0, done.stderr
    lines = [line.rpartition(":") for line in sorted(done.stdout.splitlines())]
    assert [line[0] for line in lines] == [
        f"[{n}] {n} of 4 at 127.0.0.1" for n in range(4)
    ]
    assert len({port for *_, port in lines}) == 1
    assert run("[ $JAXDIST_PROCESS_ID = 3 ] && exit 5; sleep 30").returncode == 70


TPU_FAKES = {
    "gcloud": 'bash -c "${@: -1}"',
    "curl": """case "$*" in
*agent-worker-number) echo 1 ;;
*worker-network-endpoints) echo "a:8470:10.0.0.7,b:8470:10.0.0.8" ;;
esac""",
    "python3": 'echo "$JAXDIST_AGENT $JAXDIST_AGENTS $JAXDIST_AGENTS_AT $*" >> said\n'
    "[ $(wc -l < said) = 3 ] && exit 75; exit $(cat code)",
    "sleep": "",
}


@pytest.mark.parametrize(
    ("code", "starts"), [(70, 3), (137, 3), (143, 3), (0, 1), (1, 1), (78, 1)]
)
def test_the_tpu_script_tells_each_agent_its_place_and_starts_again_after_a_loss(
    tmp_path, code, starts
):
    (tmp_path / "code").write_text(str(code))
    for name, text in TPU_FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [DEPLOY / "tpu_vm.sh", "slice", "zone", "--config", "a b"]
    assert subprocess.run(command, cwd=tmp_path, env=environ).returncode == (
        75 if starts == 3 else code
    )
    said = (tmp_path / "said").read_text().splitlines()
    place = "1 2 10.0.0.7:61440 "
    assert (
        said
        == [place + "-m jaxdist.launch -- python3 -m jaxdist.train --config a b"]
        * starts
    )
    given = dict(
        zip(
            ("JAXDIST_AGENT", "JAXDIST_AGENTS", "JAXDIST_AGENTS_AT"),
            place.split(),
            strict=True,
        )
    )
    assert find_cluster(given).host == "10.0.0.7"
