"""The emulated cluster: what it gives workers, and that nothing of it outlives it.

A namespace or a worker left behind would falsify later measurements on the same machine, and a link that is not
shaped would falsify this one. Real namespaces throughout; where they are not possible the tests skip, except in
CI (CI=true), where they fail.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recipes.cluster import Cluster, ClusterUnavailable, leftovers, needs, network, why_unavailable
from recipes.cluster.launch import worker_environment

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30  # for what takes milliseconds, on a machine that does many other things

# Run by every worker: notes the cluster's name and the worker's network in the folder $NOTES.
NOTE = 'readlink /proc/self/ns/net > "$NOTES/network$RANK"; echo "$DDP_HOOKS_CLUSTER" > "$NOTES/name$RANK"; '


def require(reason: str | None) -> None:
    """Skips the test if there is a reason, and fails in CI, where everything must be installed."""
    if reason is not None and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def reason_unavailable() -> str | None:
    return why_unavailable()


@pytest.fixture
def available(reason_unavailable: str | None) -> None:
    require(reason_unavailable)


def heed_signals() -> None:
    """In a new process, as at a terminal: in background jobs, of CI for instance, shells ignore SIGINT."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Run:
    """A run of the command line, and what its workers noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*before, sys.executable, "-m", "recipes.cluster", *arguments],
            cwd=ROOT,
            env={**os.environ, "NOTES": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=heed_signals,
        )

    def finish(self, *arguments: str, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        process = self.start(*arguments, before=before)
        output, error = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output.decode(), error.decode()

    def noted(self, file: str) -> bool:
        return (self.folder / file).exists()

    def wait_for(self, *files: str) -> None:
        wait_until(lambda: all(self.noted(file) for file in files))

    @property
    def name(self) -> str:
        return (self.folder / "name0").read_text().strip()

    def remains(self) -> list[int]:
        """Processes in the run's networks, or started by it."""
        networks = {file.read_text().strip() for file in self.folder.glob("network*")}
        assert networks, "no worker noted its network"
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                inside = os.readlink(process / "ns" / "net") in networks
                started = self.name.encode() in (process / "environ").read_bytes()
            except OSError:
                continue  # ended meanwhile
            if inside or started:
                found.append(int(process.name))
        return found

    def keeper(self) -> int:
        keepers = [
            process_id
            for process_id in self.remains()
            if b"keeper.py" in Path(f"/proc/{process_id}/cmdline").read_bytes()
        ]
        assert len(keepers) == 1
        return keepers[0]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def host_names() -> str:
    """Names of the host's network devices and named namespaces."""
    devices = subprocess.run([needs.find_tools().ip, "-o", "link"], capture_output=True, text=True, check=True)
    namespaces = Path("/run/netns")
    return devices.stdout + " ".join(file.name for file in namespaces.glob("*"))


def quiet(workers: int, *options: str) -> list[str]:
    return ["--workers", str(workers), "--rate", "1gbit", "--quiet", *options]


# Settings and commands, without a network.


@pytest.mark.parametrize(
    ("text", "bits"), [("100mbit", 10**8), ("2.5gbit", 2_500_000_000), ("1Gbit", 10**9), ("800kbit", 800_000)]
)
def test_rates_are_written_as_for_tc(text: str, bits: int) -> None:
    assert network.parse_rate(text) == bits


@pytest.mark.parametrize("text", ["1gb", "1gbps", "gbit", "-1gbit", "0gbit", "10kbit", "900gbit", "1gbit; reboot"])
def test_other_rates_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="look like 500mbit"):
        Cluster(2, text)


@pytest.mark.parametrize(("text", "seconds"), [("1ms", 1e-3), ("250us", 250e-6), ("0.1s", 0.1), ("0ms", 0.0)])
def test_latencies_are_written_as_for_tc(text: str, seconds: float) -> None:
    assert network.parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["1", "1min", "-1ms", "3s"])
def test_other_latencies_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="look like 500us"):
        Cluster(2, "1gbit", text)


@pytest.mark.parametrize("workers", [-1, 0, 257])
def test_a_worker_count_out_of_range_is_refused(workers: int) -> None:
    with pytest.raises(ValueError, match=f"got {workers}"):
        Cluster(workers, "1gbit")


def test_all_workers_have_different_addresses_in_one_network() -> None:
    addresses = [network.address(rank) for rank in range(network.MAX_WORKERS)]
    assert len(set(addresses)) == network.MAX_WORKERS
    assert addresses[:2] == ["10.77.0.1", "10.77.0.2"]


def test_the_latency_sits_below_the_rate() -> None:
    link = network.Link(rate_bit_s=10**10, latency_s=0.02)
    command = network.latency_command("cluster0", link)
    assert "parent 1:1 " in command and "handle 1: tbf" in network.rate_command("cluster0", link)
    assert "netem delay 20000us" in command
    assert link.queue_packets * 1500 > 10**10 / 8 * 0.02  # netem holds a packet for all of the latency


def test_workers_get_the_environment_of_torchrun() -> None:
    environment = worker_environment({"HOME": "/home"}, rank=2, num_workers=4)
    expected = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "2"}
    expected |= {"GROUP_RANK": "2", "MASTER_ADDR": "10.77.0.1", "OMP_NUM_THREADS": "1", "HOME": "/home"}
    expected |= {"GLOO_SOCKET_IFNAME": "cluster0", "NCCL_SOCKET_IFNAME": "cluster0"}
    assert environment.items() >= expected.items()
    assert environment["MASTER_PORT"].isdigit()


def test_neighbouring_workers_share_a_node() -> None:
    environments = [worker_environment({}, rank, 4, 2) for rank in range(4)]
    assert [each["LOCAL_RANK"] for each in environments] == ["0", "1", "0", "1"]
    assert [each["NODE_RANK"] for each in environments] == ["0", "0", "1", "1"]
    last = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "NCCL_HOSTID": "worker1"}
    assert environments[3].items() >= last.items()
    with pytest.raises(ValueError, match="ranks_per_node must divide 4 workers, got 3"):
        Cluster(4, "1gbit", ranks_per_node=3)


def test_the_users_threads_stay_and_a_surrounding_torchrun_goes() -> None:
    base = {"OMP_NUM_THREADS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "eth0"}
    environment = worker_environment(base, rank=0, num_workers=1)
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["GLOO_SOCKET_IFNAME"] == "cluster0"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment


def test_the_launcher_is_light() -> None:
    check = "import sys, recipes.cluster.__main__; print({'torch', 'numpy', 'rich'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


# The network.


@pytest.mark.usefixtures("available")
def test_each_worker_has_its_own_network_and_reaches_the_others(run: Run) -> None:
    # Rank 0 answers at MASTER_ADDR:MASTER_PORT; the others send their rank there and to their own loopback.
    script = """
import json, os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
master = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
heard = []
if rank == 0:
    with socket.create_server(master, backlog=size) as server:
        open(os.environ["NOTES"] + "/listening", "w").close()
        for _ in range(size - 1):
            heard.append(server.accept()[0].makefile().read())
else:
    while not os.path.exists(os.environ["NOTES"] + "/listening"):
        time.sleep(0.02)
    with socket.create_connection(master, timeout=20) as stream:
        stream.sendall(b"%d" % rank)
interfaces = [name for _, name in socket.if_nameindex()]
answer = {"heard": heard, "interfaces": interfaces, "threads": os.environ["OMP_NUM_THREADS"]}
json.dump(answer, open(os.environ["NOTES"] + f"/answer{rank}", "w"))
"""
    command = NOTE + f"exec {sys.executable} -c '{script}'"
    code, _, error = run.finish(*quiet(3), "--", "sh", "-c", command)
    assert code == 0, error
    answers = [json.loads((run.folder / f"answer{rank}").read_text()) for rank in range(3)]
    assert sorted(answers[0]["heard"]) == ["1", "2"]
    assert all(answer["interfaces"] == ["lo", "cluster0"] for answer in answers)
    networks = {(run.folder / f"network{rank}").read_text().strip() for rank in range(3)}
    assert len(networks | {os.readlink("/proc/self/ns/net")}) == 4
    assert run.remains() == []
    assert not any(name in host_names() for name in ("cluster0", "ddp-cluster"))


@pytest.mark.slow
@pytest.mark.usefixtures("available")
def test_gloo_works_in_it(run: Run) -> None:
    script = (
        "import sys, torch, torch.distributed as dist; dist.init_process_group(); x = torch.arange(4.0);"
        "dist.all_reduce(x); sys.stdout.write(f'{x.tolist()} {dist.get_world_size()}\\n'); dist.destroy_process_group()"
    )
    command = [sys.executable, "-c", script.replace("group()", "group('gloo')", 1)]
    code, output, error = run.finish(*quiet(2), "--prefix", "--", *command)
    assert (code, sorted(output.splitlines())) == (0, ["[0.0, 2.0, 4.0, 6.0] 2", "[1] [0.0, 2.0, 4.0, 6.0] 2"]), error


@pytest.mark.usefixtures("available")
def test_both_ends_of_every_link_are_shaped() -> None:
    tools = needs.find_tools()

    def queues(enter: list[str]) -> dict[str, dict[str, object]]:
        listing = subprocess.run([*enter, tools.tc, "-json", "qdisc"], capture_output=True, text=True, check=True)
        return {queue["dev"]: queue for queue in json.loads(listing.stdout)}

    with Cluster(3, "200mbit") as cluster:
        assert cluster._namespaces is not None
        bridge = queues(cluster._namespaces.enter(3))
        shaped = [bridge[f"port{rank}"] for rank in range(3)]
        shaped += [queues(cluster.enter(rank))["cluster0"] for rank in range(3)]
    assert [queue["kind"] for queue in shaped] == ["tbf"] * 6
    # tc's JSON has bytes per second.
    assert {queue["options"]["rate"] for queue in shaped} == {200_000_000 // 8}  # type: ignore[index]


@pytest.mark.usefixtures("available")
def test_the_self_check_measures_the_rate(run: Run) -> None:
    slow = measured_mbit_s(run, "20mbit")
    fast = measured_mbit_s(run, "400mbit")
    # Far apart, so that a machine with other work to do cannot blur them; 20 times when idle.
    assert 3 * slow < fast
    assert slow < 40


def measured_mbit_s(run: Run, rate: str) -> float:
    code, _, error = run.finish("--workers", "2", "--rate", rate, "--", "true")
    assert code == 0, error
    return float(error.partition("from rank 1 to 0: ")[2].split()[0])


@pytest.mark.usefixtures("available")
def test_workers_of_a_node_share_a_link_and_are_fast_among_themselves(run: Run) -> None:
    options = ("--workers", "4", "--ranks-per-node", "2", "--rate", "20mbit")
    code, _, error = run.finish(*options, "--", "sh", "-c", NOTE)
    assert code == 0 and "from rank 2 to 0" in error, error
    networks = [(run.folder / f"network{rank}").read_text() for rank in range(4)]
    assert networks[0] == networks[1] != networks[2] == networks[3]
    with Cluster(4, "20mbit", ranks_per_node=2) as cluster:
        between, within = cluster.measure(), cluster.measure(sender=1)
    assert between.goodput_bit_s < 40e6 < within.goodput_bit_s


@pytest.mark.usefixtures("available")
def test_check_measures_every_link_and_needs_no_command(run: Run) -> None:
    code, output, error = run.finish("--workers", "2", "--rate", "50mbit", "--check")
    assert (code, output) == (0, "")
    assert "from rank 1 to 0" in error and "from rank 0 to 1" in error and "goodput" in error


@pytest.mark.usefixtures("available")
def test_one_worker_alone(run: Run) -> None:
    code, output, error = run.finish("--workers", "1", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    assert (code, output) == (0, "0 of 1\n"), error


@pytest.mark.usefixtures("available")
def test_latency_is_added_or_netem_named_as_missing() -> None:
    try:
        with Cluster(2, "1gbit", "5ms") as cluster:
            speed = cluster.measure()
    except ClusterUnavailable as error:
        assert "netem" in str(error) and "modprobe sch_netem" in str(error)
    else:
        assert speed.round_trip_s >= 10e-3


@pytest.mark.usefixtures("available")
def test_it_works_without_root(run: Run) -> None:
    # As root we give up the right that creates namespaces; otherwise we do not have it.
    before = ("setpriv", "--bounding-set=-sys_admin") if os.geteuid() == 0 else ()
    works = subprocess.run([*before, "unshare", "--user", "--map-root-user", "true"], capture_output=True, text=True)
    require(f"no user namespaces here: {works.stderr}" if works.returncode else None)
    command = NOTE + 'cat /proc/self/uid_map > "$NOTES/users$RANK"; setsid sleep 1000 & exit 0'
    code, _, error = run.finish(*quiet(2), "--", "sh", "-c", command, before=before)
    assert code == 0, error
    _, outside, num_users = (run.folder / "users1").read_text().split()
    assert (int(outside), int(num_users)) == (os.geteuid(), 1)
    assert run.remains() == []


# The workers' output and exit codes.


@pytest.mark.usefixtures("available")
def test_rank_0_is_shown_unchanged_and_the_others_errors_with_their_rank(run: Run) -> None:
    command = ["sh", "-c", r'printf "a\rb %s" $RANK; echo "problem $RANK" >&2']
    code, output, error = run.finish(*quiet(3), "--", *command)
    assert (code, output) == (0, "a\rb 0")
    assert {"[1] problem 1", "[2] problem 2", "problem 0"} <= set(error.splitlines())


@pytest.mark.usefixtures("available")
def test_prefix_shows_what_the_others_print(run: Run) -> None:
    code, output, _ = run.finish(*quiet(3), "--prefix", "--", "sh", "-c", "echo hello from $RANK")
    assert code == 0
    assert sorted(output.splitlines()) == ["[1] hello from 1", "[2] hello from 2", "hello from 0"]


@pytest.mark.usefixtures("available")
def test_a_cluster_runs_many_commands_and_passes_variables() -> None:
    with Cluster(2, "1gbit") as cluster:
        assert cluster.run(["sh", "-c", 'test "$COLOUR" = red'], env={"COLOUR": "red"}) == 0
        assert cluster.run(["sh", "-c", "exit $((RANK * 3))"]) == 3
        assert cluster.run(["true"]) == 0


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rate", "fast", "--", "true"], "rate must"),
        (["--workers", "2", "--", "no-such-program"], "'no-such-program' is not a program"),
        (["--workers", "2"], "expected a COMMAND"),
    ],
)
def test_mistakes_on_the_command_line(run: Run, options: list[str], message: str) -> None:
    code, _, error = run.finish("--quiet", *options)
    assert code == 2
    assert message in error


# Ends of all kinds. The workers of these tests would run for ever.


@pytest.mark.usefixtures("available")
def test_after_a_crash_the_others_may_say_what_they_saw(run: Run) -> None:
    command = NOTE + (
        'if test $RANK = 1; then touch "$NOTES/crash"; kill -SEGV $$; fi; '
        'while ! test -e "$NOTES/crash"; do sleep 0.05; done; sleep 0.2; echo "lost rank 1" >&2; exit 9'
    )
    code, _, error = run.finish(*quiet(3), "--", "sh", "-c", command)
    assert code == 128 + signal.SIGSEGV
    assert "rank 1 was ended by SIGSEGV" in error
    assert "[2] lost rank 1" in error
    assert run.remains() == []


@pytest.mark.usefixtures("available")
def test_after_a_crash_the_others_are_stopped_with_all_they_started(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.cluster.launch.STOP_S", 0.2)
    monkeypatch.setenv("NOTES", str(run.folder))
    # Rank 0 ignores signals, and so does a child of it that left its process group.
    command = NOTE + (
        'if test $RANK = 1; then while ! test -e "$NOTES/ready"; do sleep 0.02; done; exit 3; fi; '
        'trap "" TERM INT; setsid sleep 1000 & touch "$NOTES/ready"; sleep 1000; sleep 1000'
    )
    with Cluster(2, "1gbit") as cluster:
        assert cluster.run(["sh", "-c", command], grace=0.1) == 3
        assert run.remains()
    assert run.remains() == []


@pytest.mark.usefixtures("available")
def test_a_timeout_stops_all_workers(run: Run) -> None:
    code, _, error = run.finish(*quiet(2, "--timeout", "0.2"), "--", "sleep", "1000")
    assert code == 124
    assert "timeout of 0.2 s: stopping ranks 0, 1" in error


@pytest.mark.usefixtures("available")
def test_an_exception_in_the_block_ends_the_cluster(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTES", str(run.folder))
    with pytest.raises(ZeroDivisionError), Cluster(2, "1gbit") as cluster:
        cluster.run(["sh", "-c", NOTE + "setsid sleep 1000 & exit 0"])
        _ = 1 / 0
    assert run.remains() == []


@pytest.mark.quick("15")
@pytest.mark.usefixtures("available")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_workers_and_ends_everything(run: Run, number: signal.Signals) -> None:
    command = NOTE + (
        f'trap "touch $NOTES/told$RANK; exit 1" {number.name[3:]}; setsid sleep 1000 & '
        'touch "$NOTES/ready$RANK"; while true; do sleep 0.05; done'
    )
    process = run.start(*quiet(2), "--", "sh", "-c", command)
    run.wait_for("ready0", "ready1")
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    assert run.noted("told0") and run.noted("told1")
    assert run.remains() == []


FOR_EVER = NOTE + 'touch "$NOTES/ready$RANK"; sleep 1000; sleep 1000'


@pytest.mark.usefixtures("available")
def test_a_killed_launcher_leaves_nothing(run: Run) -> None:
    process = run.start(*quiet(2), "--", "sh", "-c", FOR_EVER)
    run.wait_for("ready0", "ready1")
    process.kill()
    process.wait()
    wait_until(lambda: run.remains() == [])
    assert run.finish(*quiet(2), "--", "true")[0] == 0


@pytest.mark.usefixtures("available")
@pytest.mark.parametrize("how", ["next run", "clean all", "clean by name"])
def test_what_remains_when_the_keeper_is_killed_too_is_found_later(run: Run, how: str) -> None:
    process = run.start(*quiet(2), "--", "sh", "-c", FOR_EVER)
    run.wait_for("ready0", "ready1")
    os.kill(run.keeper(), signal.SIGKILL)
    process.kill()
    process.wait()
    assert run.remains()
    arguments = {"next run": [*quiet(1), "--", "true"], "clean all": ["--clean"]}
    code, _, error = run.finish(*arguments.get(how, ["--clean", run.name]))
    assert code == 0
    assert run.name in error
    assert run.remains() == []


# What is not ours.


@pytest.mark.parametrize("name", ["eth0", "ddp-cluster-1", "ddp-cluster-1-2-3-4", "../ddp-cluster-1-2-3"])
def test_a_name_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="was not created by this tool and is left alone"):
        leftovers.remove(name)


@pytest.mark.usefixtures("available")
def test_a_running_cluster_is_refused_and_not_disturbed(run: Run) -> None:
    with Cluster(2, "1gbit") as cluster:
        code, _, error = run.finish("--clean", cluster.name)
        assert code == 2
        assert f"{cluster.name} is in use by process {os.getpid()}" in error
        assert run.finish("--clean")[0] == 0
        assert run.finish(*quiet(2), "--", "true")[0] == 0
        assert cluster.run(["true"]) == 0


@pytest.mark.parametrize("kind", ["a name of another form", "a living owner", "another user"])
def test_processes_of_others_are_left_alone(kind: str) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    marks = {"a name of another form": "mine", "a living owner": leftovers.new_name()}
    mark = marks.get(kind, f"ddp-cluster-{ended.pid}-1-1")
    other_user = kind == "another user"
    if other_user and os.geteuid() != 0:
        pytest.skip("only root can look at other users' processes")
    before = ["setpriv", "--reuid=65534", "--clear-groups"] if other_user else []
    bystander = subprocess.Popen([*before, "sleep", "1000"], env={**os.environ, "DDP_HOOKS_CLUSTER": mark})
    try:
        wait_until(lambda: b"sleep" in Path(f"/proc/{bystander.pid}/cmdline").read_bytes()[:6])
        assert mark not in leftovers.find()
        if other_user:
            leftovers.remove(mark)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


# What is missing.


def test_missing_programs_are_named_with_how_to_get_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(needs, "SYSTEM_FOLDERS", "/nowhere")
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = why_unavailable()
    assert reason is not None
    assert "ip, tc" in reason and "apt-get install iproute2" in reason


def test_another_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in str(why_unavailable())


@pytest.mark.usefixtures("available")
def test_missing_rights_are_named_with_ways_to_get_them(run: Run) -> None:
    # A user without a number, as in a user namespace without a mapping, may create no namespace of any kind.
    before = ("unshare", "--user")
    works = subprocess.run([*before, "true"], capture_output=True, text=True)
    require(f"no user namespaces here: {works.stderr}" if works.returncode else None)
    code, _, error = run.finish("--check", before=before)
    assert code == 2
    assert "right to create network namespaces" in error and "run as root: sudo" in error


@pytest.mark.parametrize(
    ("part", "advice"),
    [("netem", "run without a latency"), ("tbf", "sch_tbf"), ("bridge and veth", "CONFIG_BRIDGE")],
)
def test_missing_parts_of_the_kernel_are_named(part: str, advice: str) -> None:
    message = str(needs.kernel_part_missing(part, "unknown kind"))
    assert f"no {part} (unknown kind)" in message and advice in message
