"""What the emulated cluster needs from this machine, and what to say when it is missing."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

# Debian keeps `tc` out of the PATH of users other than root.
SYSTEM_FOLDERS = "/usr/sbin:/sbin"

# program -> the package that holds it
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}


class ClusterUnavailable(RuntimeError):
    """The emulated cluster cannot work here; the message says what is missing and how to get it."""


class Tools(NamedTuple):
    """Paths of the programs that make and enter network namespaces."""

    ip: str
    tc: str
    unshare: str
    nsenter: str


def find_tools() -> Tools:
    """Paths of all programs needed.

    Raises:
        ClusterUnavailable: on another system than Linux, or when a program is not installed.
    """
    if not sys.platform.startswith("linux"):
        raise ClusterUnavailable(
            f"the emulated cluster needs Linux (network namespaces), found {sys.platform}: "
            "run it in a Linux virtual machine or a privileged container"
        )
    folders = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{SYSTEM_FOLDERS}"
    paths = {program: shutil.which(program, path=folders) for program in PACKAGES}
    missing = [program for program, path in paths.items() if path is None]
    if missing:
        raise ClusterUnavailable(_programs_missing(missing))
    return Tools(**{program: str(path) for program, path in paths.items()})


def rights_missing(attempts: Iterable[str]) -> ClusterUnavailable:
    """The error for a machine that lets us create network namespaces neither as root nor without.

    Args:
        attempts: what was tried and the answer, one line each.
    """
    tried = "; ".join(attempts)
    remedies = "\n".join(f"  - {remedy}" for remedy in _rights_remedies())
    return ClusterUnavailable(
        "the emulated cluster needs the right to create network namespaces, which this process does not have "
        f"({tried}). Any one of these gives it:\n{remedies}"
    )


def kernel_part_missing(part: str, answer: str) -> ClusterUnavailable:
    """The error for a kernel without one of the parts we use.

    Args:
        part: ``"netem"``, ``"tbf"`` or ``"bridge and veth"``.
        answer: what ip or tc said.
    """
    if part == "netem":
        remedy = (
            "Load it with `sudo modprobe sch_netem` (where that finds no module, install it: Ubuntu "
            "linux-modules-extra-$(uname -r); Fedora and RHEL kernel-modules-extra; Debian linux-image-amd64 "
            "instead of the cloud kernel), or run without a latency"
        )
    elif part == "tbf":
        remedy = "Load it with `sudo modprobe sch_tbf`, or use a kernel with CONFIG_NET_SCH_TBF"
    else:
        remedy = "Load them with `sudo modprobe -a bridge veth`, or use a kernel with CONFIG_BRIDGE and CONFIG_VETH"
    return ClusterUnavailable(f"this kernel offers no {part} ({answer}). {remedy}.")


def _programs_missing(missing: list[str]) -> str:
    packages = sorted({PACKAGES[program] for program in missing})
    install = [f"sudo apt-get install {' '.join(packages)} (Debian, Ubuntu)"]
    fedora = " ".join("iproute iproute-tc" if package == "iproute2" else package for package in packages)
    install += [f"sudo dnf install {fedora} (Fedora, RHEL)", f"sudo pacman -S {' '.join(packages)} (Arch)"]
    return (
        f"the emulated cluster needs {', '.join(missing)}, found on neither PATH nor {SYSTEM_FOLDERS}. "
        f"Install {' and '.join(packages)}: {'; '.join(install)}."
    )


def _rights_remedies() -> list[str]:
    """Ways to get the rights, the settings that stand in the way on this machine among them."""
    remedies = ['run as root: sudo --preserve-env env PATH="$PATH" python -m recipes.cluster …']
    blocking = {
        "user.max_user_namespaces": ("0", "15000"),
        "kernel.unprivileged_userns_clone": ("0", "1"),
        "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    }
    for setting, (blocked, allowed) in blocking.items():
        file = Path("/proc/sys", *setting.split("."))
        if file.exists() and file.read_text().strip() == blocked:
            remedies.append(f"allow user namespaces: sudo sysctl -w {setting}={allowed} (is {blocked})")
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        remedies.append("start the container with --cap-add SYS_ADMIN --cap-add NET_ADMIN, or --privileged")
    return remedies
