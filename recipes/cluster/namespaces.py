"""The network namespaces of a cluster: creating, entering and ending them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from recipes.cluster import keeper
from recipes.cluster.needs import Tools, rights_missing

# How to get the right to create network namespaces, in the order tried.
AS_ROOT: tuple[str, ...] = ()
AS_USER: tuple[str, ...] = ("--user", "--map-root-user")


class Namespaces:
    """Network namespaces that live until `close`, or until this process ends, however it ends.

    Args:
        num: how many.
        mark: name of the cluster, put into the environment of the process that keeps them.
        tools: programs found on this machine.

    Raises:
        ClusterUnavailable: this process may not create network namespaces.
    """

    def __init__(self, num: int, mark: str, tools: Tools) -> None:
        attempts = []
        for rights in (AS_ROOT, AS_USER):
            process, answer = _start_keeper(num, mark, tools, rights)
            if answer:
                self._mark = mark
                self._tools = tools
                self._keeper = process
                self._descriptors = [int(number) for number in answer.split()]
                self._own_users = rights is AS_USER
                return
            _, error = process.communicate()
            attempts.append(f"{'with a user namespace' if rights else 'directly'}: {error.strip()}")
        raise rights_missing(attempts)

    def path(self, index: int) -> str:
        """File that stands for a namespace, for programs that take one."""
        return f"/proc/{self._keeper.pid}/fd/{self._descriptors[index]}"

    def enter(self, index: int) -> list[str]:
        """What to write before a command so that it runs in a namespace.

        The process started is the command itself, not a parent of it.
        """
        users = [f"--user=/proc/{self._keeper.pid}/ns/user", "--preserve-credentials"]
        return [
            self._tools.nsenter,
            *(users if self._own_users else []),
            f"--net={self.path(index)}",
            "--",
        ]

    def close(self) -> None:
        """Kills what still runs in the namespaces; with it they disappear."""
        try:
            self._keeper.communicate("x", timeout=keeper.GIVE_UP_S + 5)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        if self._keeper.returncode != 0:
            # Somebody killed it before it could do its work.
            keeper.end_processes(lambda process_id: keeper.mark_of(process_id) == self._mark)


def _start_keeper(num: int, mark: str, tools: Tools, rights: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
    """Starts a keeper; the answer is empty when it could not create the namespaces."""
    enter = [tools.unshare, *rights, "--"] if rights else []
    process = subprocess.Popen(
        [*enter, sys.executable, "-I", "-S", keeper.__file__, str(num), mark],
        env={**os.environ, keeper.MARK_VARIABLE: mark},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # out of reach of Ctrl-C and of signals to our process group
    )
    assert process.stdout is not None
    return process, process.stdout.readline()
