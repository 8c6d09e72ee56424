"""deploy/: manifests fit the schema of JobSet, scripts do what their comments say, and all flags and keys exist."""

import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from command_lines import check, commands

from bert_jax import command_line
from bert_jax.config.options import parse
from bert_jax.train import distributed

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
MANIFESTS = {path.name: yaml.safe_load(path.read_text()) for path in sorted(DEPLOY.glob("*.yaml"))}
SCRIPTS = sorted([*DEPLOY.glob("*.sh"), *DEPLOY.glob("*.sbatch")])

# Options of sbatch and the form of their values (https://slurm.schedmd.com/sbatch.html).
SBATCH = {
    "job-name": r"\w+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
    "signal": r"([RB]+:)?\w+(@\d+)?",
    "requeue": "",
    "open-mode": "append|truncate",
    "output": r"[\w%./-]+",
}


def pod(manifest: Any) -> Any:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


LINES = [line for path in SCRIPTS for line in commands(path.read_text())]
# For TPU VMs, the command is an argument of gcloud.
SCALING = (ROOT / "docs" / "scaling.md").read_text().replace("\\\n", " ")
LINES += re.findall(r"tpu_vm\.sh +env/bin/(bert-jax .*)", SCALING)
LINES += [shlex.join(["bert-jax", *pod(manifest)["containers"][0]["args"]]) for manifest in MANIFESTS.values()]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[:60])
def test_every_command_line_is_taken_by_its_own_parser(line, monkeypatch, tmp_path):
    check(line, monkeypatch, tmp_path)


def test_lines_are_found():
    assert len(LINES) == 5  # sbatch, Dataflow, TPU VMs, and two manifests


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_fits_the_schema_of_jobset(name):
    """tests/tools/make_jobset_schema.py makes it, and says what it leaves out."""
    schema = json.loads((ROOT / "tests" / "testdata" / "jobset_schema.json").read_text())
    jsonschema.validate(MANIFESTS[name], schema)
    assert (MANIFESTS[name]["apiVersion"], MANIFESTS[name]["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_slice_has_as_many_hosts_as_its_chips_need(name):
    job = MANIFESTS[name]["spec"]["replicatedJobs"][0]["template"]["spec"]
    sides = pod(MANIFESTS[name])["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    hosts = (
        int(sides[0]) * int(sides[1]) // pod(MANIFESTS[name])["containers"][0]["resources"]["limits"]["google.com/tpu"]
    )
    assert job["completions"] == job["parallelism"] == hosts
    if "64" in name:
        assert int(sides[0]) * int(sides[1]) == 64


def reaction(spec: Any, code: int, *, disrupted: bool = False) -> str:
    """What JobSet does when a pod ends with a code, by the order of rules in its API's documentation.

    The Job's messages are those of Kubernetes (kubernetes/kubernetes, pkg/controller/job/pod_failure_policy.go).
    """
    job = spec["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        conditions = [one["type"] for one in rule.get("onPodConditions", ()) if one["status"] == "True"]
        codes = rule.get("onExitCodes", {"operator": "In", "values": [], "containerName": "bert-jax"})
        assert (codes["operator"], codes["containerName"]) == ("In", pod({"spec": spec})["containers"][0]["name"])
        if disrupted and "DisruptionTarget" in conditions:
            cause = "Pod default/base-0 has condition DisruptionTarget"
        elif code in codes["values"]:
            cause = f"Container bert-jax for pod default/base-0 failed with exit code {code}"
        else:
            continue
        reason, message = "PodFailurePolicy", f"{cause} matching {rule['action']} rule at index {index}"
        assert rule["action"] == "FailJob"
        break
    for rule in spec["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return str(rule["action"])
    return "RestartJobSet"  # counts towards maxRestarts


@pytest.mark.parametrize("manifest", MANIFESTS.values(), ids=MANIFESTS)
@pytest.mark.parametrize(
    ("code", "disrupted", "action"),
    [
        (command_line.EXIT_USER_ERROR, False, "FailJobSet"),
        (command_line.EXIT_LOST, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (command_line.EXIT_STOPPED, False, "RestartJobSetAndIgnoreMaxRestarts"),
        (command_line.EXIT_STOPPED, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (128 + 9, True, "RestartJobSetAndIgnoreMaxRestarts"),
        (1, False, "RestartJobSet"),
        (128 + 9, False, "RestartJobSet"),  # out of memory
    ],
)
def test_a_mistake_fails_a_jobset_and_preemptions_restart_it_without_limit(manifest, code, disrupted, action):
    assert reaction(manifest["spec"], code, disrupted=disrupted) == action


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_have_the_syntax_of_bash(path):
    subprocess.run(["bash", "-n", path], check=True)


def test_directives_of_sbatch_exist_and_have_values_of_their_form():
    lines = re.findall(r"^#SBATCH (.*)$", (DEPLOY / "slurm.sbatch").read_text(), re.MULTILINE)
    assert len(lines) >= 9
    for line in lines:
        name, _, value = line.removeprefix("--").partition("=")
        assert re.fullmatch(SBATCH[name], value), line


def fake(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("code", [0, 1, 2, 75, 137, 143])
def test_slurm_starts_a_job_again_that_lost_a_process_or_was_stopped(code, tmp_path):
    fake(tmp_path, "srun", f'echo "$SRUN_CPUS_PER_TASK" > {tmp_path}/cpus; exit {code}')
    fake(tmp_path, "scontrol", f'echo "$@" > {tmp_path}/requeued')
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "12", "SLURM_CPUS_PER_TASK": "8"}
    command = ["bash", DEPLOY / "slurm.sbatch"]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ended.returncode == code
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == ("requeue 12\n" if code >= 75 else "")
    # Since Slurm 22.05, srun does not take --cpus-per-task from sbatch.
    assert (tmp_path / "cpus").read_text() == "8\n"


LOOP = ["bash", str(DEPLOY / "tpu_vm.sh")]


@pytest.mark.parametrize(
    ("codes", "starts"),
    [
        ("0", 1),
        ("2 0", 1),
        ("75 143 137 0", 4),
        ("75 " * 9 + "2 0", 10),
        ("1 1 1 0", 3),  # two failures are allowed
        ("1 75 1 75 0", 5),
    ],
)
def test_a_tpu_vm_starts_a_command_again_after_lost_processes_and_few_failures(codes, starts, tmp_path):
    fake(tmp_path, "command", f'cd {tmp_path}; echo "$1" >> starts; set -- {codes}; exit "${{@:$(wc -l < starts):1}}"')
    limits = os.environ | {"PAUSE": "0", "MAX_FAILURES": "2"}
    command = [*LOOP, f"{tmp_path}/command", "two words"]
    ended = subprocess.run(command, env=limits, capture_output=True, text=True, check=False)
    assert (tmp_path / "starts").read_text() == "two words\n" * starts
    assert ended.returncode == int(codes.split()[starts - 1])
    assert ended.stderr.count("starts again in 0 s") == starts - 1


def test_sigterm_lets_the_command_of_a_tpu_vm_save_and_ends_the_loop(tmp_path):
    saving = f"trap 'sleep 0.1; touch {tmp_path}/saved; exit 143' TERM; touch {tmp_path}/runs"
    fake(tmp_path, "command", f"{saving}\nfor _ in {{1..600}}; do sleep 0.05; done")
    with subprocess.Popen([*LOOP, f"{tmp_path}/command"]) as loop:
        while not (tmp_path / "runs").exists():
            assert loop.poll() is None
            time.sleep(0.01)
        loop.terminate()
        assert loop.wait(30) == 143 and (tmp_path / "saved").exists()


def test_each_chip_of_a_tpu_host_has_one_process_at_a_time(tmp_path):
    """With a fake environment: chips are folders, which a second process on one could not make."""
    script = (
        'mkdir "chip$TPU_VISIBLE_CHIPS" && env | grep -E "TPU_|JAX_NUM" | sort > "env$TPU_VISIBLE_CHIPS"; '
        'code=$?; echo "$0" >> done; sleep 0.1; rmdir "chip$TPU_VISIBLE_CHIPS"; exit $code'
    )
    fake(tmp_path, "work", script.replace("$0", "$*"))
    (tmp_path / "commands").write_text("".join(f"./work 'run {number}'\n" for number in range(8)) + "exit 2\n")
    chips = [*["bash", str(DEPLOY / "tpu_chips.sh")], "commands", "4"]
    ended = subprocess.run(chips, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 123 and re.fullmatch(r"chip \d: exit code 2: exit 2\n", ended.stderr)
    assert sorted((tmp_path / "done").read_text().splitlines()) == [f"run {number}" for number in range(8)]
    ports = set()
    for chip in range(4):
        pairs = (line.split("=", 1) for line in (tmp_path / f"env{chip}").read_text().splitlines())
        variables = dict(pairs)
        assert variables["TPU_CHIPS_PER_PROCESS_BOUNDS"] == variables["TPU_PROCESS_BOUNDS"] == "1,1,1"
        assert variables["TPU_PROCESS_ADDRESSES"] == f"localhost:{variables['TPU_PROCESS_PORT']}"
        ports.add(variables["TPU_PROCESS_PORT"])
        assert distributed.find(parse("bert-jax finetune", "", distributed.ProcessOptions, []), variables) is None
    assert len(ports) == 4


def test_the_dockerfile_copies_what_exists_and_installs_extras_that_exist():
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {name for name, _ in instructions} == {"FROM", "ARG", "COPY", "RUN", "ENTRYPOINT"}
    settings = (ROOT / "setup.cfg").read_text()
    extras = re.findall(r"^(\w+) =", settings.partition("[options.extras_require]")[2], re.MULTILINE)
    named = re.findall(r"/source\[([\w,]+)\]|EXTRAS=([\w,]+)", text)
    assert len(named) == 3
    assert {extra for pair in named for names in pair for extra in names.split(",") if extra} <= set(extras)
    [program] = json.loads(next(rest for name, rest in instructions if name == "ENTRYPOINT"))
    assert f"{program} = bert_jax.commands.main:start" in settings
    # The pipeline and its workers have the same version of Beam.
    assert len(set(re.findall(r"(?:_sdk:|==)([\d.]+)", text))) == 1
