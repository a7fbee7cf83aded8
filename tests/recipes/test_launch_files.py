"""Launch files say what Slurm and the Kubeflow operator understand, and start programs that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "recipes" / "slurm" / "train.sbatch"
PYTORCHJOB = ROOT / "recipes" / "kubernetes" / "pytorchjob.yaml"
PAGES = [SBATCH.parent / "README.md", PYTORCHJOB.parent / "README.md", ROOT / "docs" / "launching.md"]

# Of `man sbatch`; those that the file may come to use.
SBATCH_OPTIONS = {
    *["account", "constraint", "cpus-per-task", "error", "exclusive", "gpus-per-node", "gres", "job-name", "mem"],
    *["nodes", "ntasks-per-node", "open-mode", "output", "partition", "qos", "requeue", "signal", "time"],
}
# Of kubeflow.org/v1: spec.runPolicy, and its cleanPodPolicy.
RUN_POLICY = {
    *["activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy", "schedulingPolicy", "suspend"],
    "ttlSecondsAfterFinished",
}


@pytest.mark.parametrize("path", [SBATCH, PYTORCHJOB, *PAGES], ids=lambda path: path.name)
def test_every_recipe_that_is_named_exists(path: Path) -> None:
    named = set(re.findall(r"recipes/[\w/]+\.\w+", path.read_text(encoding="utf-8")))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("path", [SBATCH, SBATCH.parent / "README.md", PAGES[-1]], ids=lambda path: path.name)
def test_every_option_of_a_command_is_known(path: Path) -> None:
    from recipes import with_lightning
    from recipes.complete import resnet_imagenet

    parsers = {"resnet_imagenet": resnet_imagenet.parse_arguments, "with_lightning": with_lightning.parse_arguments}
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"recipes/(?:complete/)?(\w+)\.py +(--.*)", text)
    assert commands
    for recipe, arguments in commands:
        parsers[recipe](arguments.replace("--data /data/imagenet", "").split())  # a folder that is not here


# Slurm -------------------------------------------------------------------------------------------------


def test_sbatch_file_is_shell_with_options_of_slurm() -> None:
    subprocess.run(["bash", "-n", str(SBATCH)], check=True, timeout=20)
    lines = SBATCH.read_text(encoding="utf-8").splitlines()
    options = [line.split()[1] for line in lines if re.match(r"#+SBATCH ", line)]
    names = [option.removeprefix("--").partition("=")[0] for option in options]
    assert set(names) <= SBATCH_OPTIONS and len(set(names)) == len(names)
    assert "--ntasks-per-node=1" in options, "torchrun starts the others"
    # Slurm stops looking for options at the first command.
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(number < first_command for number, line in enumerate(lines) if line.startswith("#SBATCH"))


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a job on two nodes, with commands that run everything on this one."""
    commands = {
        "scontrol": 'echo "localhost"; echo "another-node"',
        # One task per node, at the same time; when one fails the other ends, too (--kill-on-bad-exit).
        "srun": """
            while [[ "$1" == --* ]]; do shift; done
            SLURM_NODEID=0 "$@" & first=$!
            SLURM_NODEID=1 "$@" & second=$!
            while kill -0 "$first" && kill -0 "$second"; do sleep 0.1; done 2>/dev/null
            if kill -0 "$first" 2>/dev/null; then ended=$second other=$first; else ended=$first other=$second; fi
            wait "$ended" || { code=$?; kill "$other"; exit "$code"; }
            wait "$other"
        """,
        "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    }
    for name, text in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
    yield {
        **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PET_", "OMP_"))},
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(100000 + os.getpid()),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "2",
    }


@pytest.mark.slow
def test_sbatch_file_joins_the_ranks_of_all_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(())\n"
        "dist.all_reduce(total)\n"
        "said = [f'rank {dist.get_rank()}', f'{total:.0f} ranks', os.environ['OMP_NUM_THREADS'], *sys.argv[1:]]\n"
        "sys.stdout.write(', '.join(said) + '\\n')\n"  # at once: both write to one pipe
        "dist.destroy_process_group()\n"
    )
    run = subprocess.run(
        ["bash", str(SBATCH), str(script), "--name", "two words"],
        cwd=tmp_path,
        env={**slurm, "PROCESSES_PER_NODE": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    expected = [f"rank {rank}, 2 ranks, 2, --name, two words" for rank in range(2)]
    assert sorted(run.stdout.splitlines()) == expected


def test_sbatch_file_without_a_script_says_so(slurm: dict[str, str], tmp_path: Path) -> None:
    run = subprocess.run(
        ["bash", str(SBATCH)], cwd=tmp_path, env=slurm, capture_output=True, text=True, timeout=20, check=False
    )
    assert run.returncode == 2 and "name the script to run" in run.stderr


# Kubernetes --------------------------------------------------------------------------------------------


@pytest.fixture
def job() -> dict[str, Any]:
    yaml: Any = pytest.importorskip("yaml")
    loaded: dict[str, Any] = yaml.safe_load(PYTORCHJOB.read_text(encoding="utf-8"))
    return loaded


def test_pytorchjob_has_what_the_operator_needs(job: dict[str, Any]) -> None:
    assert job.keys() == {"apiVersion", "kind", "metadata", "spec"}
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", job["metadata"]["name"]), "a DNS-1035 label"
    spec = job["spec"]
    assert spec.keys() == {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"}
    assert isinstance(spec["nprocPerNode"], str), "the operator takes a string: a number, auto, cpu or gpu"
    assert spec["runPolicy"].keys() <= RUN_POLICY
    assert spec["runPolicy"]["cleanPodPolicy"] in {"None", "Running", "All"}
    replicas = spec["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1 <= replicas["Worker"]["replicas"]
    for replica in replicas.values():
        assert replica.keys() == {"replicas", "restartPolicy", "template"}
        assert replica["restartPolicy"] in {"Always", "OnFailure", "Never", "ExitCode"}
        assert [container["name"] for container in replica["template"]["spec"]["containers"]] == ["pytorch"]
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]


def test_pods_have_gpus_shared_memory_and_all_volumes(job: dict[str, Any]) -> None:
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == job["spec"]["nprocPerNode"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert mounted.keys() == volumes.keys()
    assert mounted["shared-memory"] == "/dev/shm"
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"


def test_pods_run_a_recipe_with_arguments_that_it_knows(job: dict[str, Any]) -> None:
    from recipes.complete import resnet_imagenet

    (container,) = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert container["command"] == ["torchrun", "recipes/complete/resnet_imagenet.py"]
    arguments = [argument for argument in container["args"] if not argument.startswith("--data=")]
    args = resnet_imagenet.parse_arguments(arguments)
    folders = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert str(args.output.parent) in folders and args.resume
