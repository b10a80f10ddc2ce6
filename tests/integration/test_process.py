"""Child processes end with this process, however it ends, and their error says why they failed."""

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from pathlib import Path

import psutil
import pytest

import heartbeat
from dapo_core.machine.stopping import ECHO_SECONDS
from tasks.processes import supervisor
from tasks.processes.child import ChildProcessFailed, background_command, run_command
from tests.processes import DEADLINE_SECONDS, folder_of, python, start_time_of, wait_until

# A tree with everything that escapes a plain killpg; each process writes "name pid start_time" to
# `members`.
TREE = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    members = sys.argv[1]

    def sleep_as(name):
        start_time = open("/proc/self/stat").read().rpartition(")")[2].split()[19]
        fd = os.open(members, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{name} {os.getpid()} {start_time}\\n".encode())
        os.close(fd)
        while True:
            time.sleep(60)

    if os.fork() == 0:
        sleep_as("child")
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleep_as("stubborn")
    if (middle := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            sleep_as("daemon")
        os._exit(0)
    os.waitpid(middle, 0)
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("tree is up", flush=True)
    sleep_as("command")
    """
)
TREE_NAMES = {"child", "stubborn", "daemon", "command"}
SLEEP = python("import os, time; print(os.getpid(), flush=True); time.sleep(600)")


def read_members(tmp_path: Path) -> dict[str, tuple[int, str]]:
    path = tmp_path / "members"
    rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {name: (int(pid), start_time) for name, pid, start_time in rows}


def living(members: dict[str, tuple[int, str]]) -> set[str]:
    return {name for name, (pid, start_time) in members.items() if start_time_of(pid) == start_time}


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def start_parent(tmp_path: Path, grace_seconds: float) -> subprocess.Popen[bytes]:
    """Start a process that runs TREE with a socket folder, and wait for the whole tree."""
    code = f"""
        import sys, time
        from tasks.processes.child import background_command
        command = [sys.executable, "-S", "-c", sys.argv[1], sys.argv[2]]
        with background_command(command, log_path=sys.argv[3], label="tree",
                                grace_seconds={grace_seconds}, folder_variable="PLACE") as tree:
            while tree.poll() is None:
                time.sleep(0.1)
    """
    words = [
        sys.executable,
        "-c",
        textwrap.dedent(code),
        TREE,
        str(tmp_path / "members"),
        str(tmp_path / "log"),
    ]
    parent = subprocess.Popen(words, stderr=subprocess.PIPE)
    wait_until(lambda: set(read_members(tmp_path)) == TREE_NAMES, "the tree to start")
    return parent


def test_a_killed_parent_leaves_no_orphans_and_the_next_attempt_waits(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, grace_seconds=1.0)
    members = read_members(tmp_path)
    below = psutil.Process(parent.pid).children(recursive=True)
    # supervisor, command, child, stubborn, daemon, and the sleeper in a session of its own
    assert len(below) == 6
    folder = folder_of(members["command"][0])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / str(uuid.uuid4())))  # as vLLM names them
    [its_supervisor] = psutil.Process(parent.pid).children()
    its_supervisor.suspend()  # so that the next attempt comes before it has ended anything
    parent.kill()
    parent.communicate()
    assert living(members) == TREE_NAMES
    threading.Timer(0.5, its_supervisor.resume).start()
    alive_at_start: list[set[str]] = []
    run_command(
        python("print('next attempt')"),
        log_path=tmp_path / "log",
        label="tree",
        on_line=lambda line: alive_at_start.append(living(members)),
    )
    assert alive_at_start == [set()]
    assert all_gone(below)
    assert not folder.exists()
    assert f"parent process {parent.pid} is gone" in (tmp_path / "log").read_text()


def test_an_interrupt_ends_the_tree_and_a_second_one_skips_the_grace_period(tmp_path: Path) -> None:
    parent = start_parent(tmp_path, grace_seconds=300.0)
    below = psutil.Process(parent.pid).children(recursive=True)
    parent.send_signal(signal.SIGINT)
    wait_until(
        lambda: living(read_members(tmp_path)) == {"stubborn"}, "all but the stubborn to end"
    )
    began = time.monotonic()
    wait_until(
        lambda: time.monotonic() > began + ECHO_SECONDS + 0.2, "a second interrupt to be one"
    )
    parent.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in parent.communicate(timeout=DEADLINE_SECONDS)[1]
    wait_until(lambda: all_gone(below), "all to end")


# On SIGTERM exits gracefully once a file exists.
TIDY = """
    import os, signal, sys, time
    def tidy(*_):
        print("ending", flush=True)
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.02)
        print("in order", flush=True)
        os._exit(143)
    signal.signal(signal.SIGTERM, tidy)
    print("up", flush=True)
    time.sleep(600)
"""
INTERRUPTED = """
    import json, sys
    from tasks.processes import child
    from tasks.processes.child import background_command, run_command
    child.ECHO_SECONDS = 300.0
    log, command = sys.argv[1], json.loads(sys.argv[2])
    try:
        if len(sys.argv) > 3:
            with background_command(command, log_path=log, label="tidy", grace_seconds=300.0):
                while "up" not in open(log).read():
                    pass
        else:
            run_command(command, log_path=log, label="tidy", grace_seconds=300.0)
        print("went on")
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("ends_anyway", [False, True])
def test_an_interrupt_echo_neither_hurries_the_stop_nor_is_lost(
    tmp_path: Path, ends_anyway: bool
) -> None:
    """It may be an echo of the first, or the first one in a block that is ending anyway."""
    log, may_end = tmp_path / "log", tmp_path / "may_end"
    words = [str(log), json.dumps(python(TIDY, may_end)), *(["block"] if ends_anyway else [])]
    command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED), *words]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wait_until(lambda: log.exists() and "up" in log.read_text(), "the command to be up")
    if not ends_anyway:
        parent.send_signal(signal.SIGINT)
    wait_until(lambda: "ending" in log.read_text(), "the command to end")
    parent.send_signal(signal.SIGINT)
    may_end.touch()
    assert parent.communicate(timeout=DEADLINE_SECONDS)[0].decode().split() == ["interrupted"]
    assert "in order" in log.read_text()


# On SIGTERM says whether its helper in the same process group is alive, and exits a little later.
SAVER = """
    import os, signal, time
    if (helper := os.fork()) == 0:
        signal.pause()
    def save(*_):
        time.sleep(0.5)
        print("saved, helper", "gone" if os.waitpid(helper, os.WNOHANG)[0] else "there", flush=True)
        os._exit(143)
    signal.signal(signal.SIGTERM, save)
    print("up", flush=True)
    time.sleep(600)
"""
RUN = """
    import json, sys
    from tasks.processes.child import run_command
    run_command(json.loads(sys.argv[2]), log_path=sys.argv[1], label="train", grace_seconds=300.0)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_training_whose_flow_ends_saves_first_and_the_next_attempt_waits(
    tmp_path: Path, ending: signal.Signals
) -> None:
    log = tmp_path / "log"
    words = [sys.executable, "-c", textwrap.dedent(RUN), str(log), json.dumps(python(SAVER))]
    flow = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    wait_until(lambda: log.exists() and "up" in log.read_text(), "the command to be up")
    flow.send_signal(ending)
    flow.wait(DEADLINE_SECONDS)
    run_command(python("print('next attempt')"), log_path=log, label="train")
    lines = [line for line in log.read_text().splitlines() if not line.startswith("[supervisor]")]
    assert lines == ["up", "saved, helper there", "next attempt"]


def test_a_command_that_ignores_sigterm_is_killed_after_its_grace_period(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)"
    log = tmp_path / "log"
    with background_command(python(code), log_path=log, label="deaf", grace_seconds=0.5) as deaf:
        wait_until(lambda: deaf.tail(1) == ["up"], "the command to be up")
    assert deaf.poll() == -signal.SIGKILL


def test_a_stop_that_takes_long_shows_the_commands_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS", 0.2)
    caplog.set_level("INFO")
    code = "import signal, sys, time; print('step 3'); signal.signal(15, lambda *_: end()); "
    code += "end = lambda: (time.sleep(1), sys.exit()); print('up'); time.sleep(600)"
    with background_command(python(code), log_path=tmp_path / "log", label="train") as train:
        wait_until(lambda: train.tail(1) == ["up"], "the command to be up")
    assert "train is stopping: up (" in caplog.text


def test_a_training_stopped_by_somebody_else_is_not_retried(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with background_command(
        python(SAVER), log_path=log, label="train", grace_seconds=300.0
    ) as train:
        wait_until(lambda: train.tail(1) == ["up"], "the command to be up")
        os.kill(train.pid, signal.SIGTERM)
        wait_until(lambda: train.poll() is not None, "the end")
        error = train.failure()
    assert "ended with exit code 143: stopped by SIGTERM, not by us" in str(error)
    assert error.is_lasting
    assert "saved, helper there" in log.read_text()


def test_leftover_processes_of_a_finished_command_are_killed_and_named(tmp_path: Path) -> None:
    code = """
        import subprocess
        print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
    """
    lines: list[str] = []
    run_command(python(code), log_path=tmp_path / "log", label="leaver", on_line=lines.append)
    assert start_time_of(int(lines[0])) is None
    assert lines[1].startswith("[supervisor] ending leftover processes")
    assert lines[0] in lines[1]


def test_the_error_has_exit_code_last_lines_and_log(tmp_path: Path) -> None:
    code = "import sys\nfor i in range(30): print('line', i)\nsys.exit(3)"
    with pytest.raises(ChildProcessFailed) as caught:
        run_command(python(code), log_path=tmp_path / "logs" / "train.log", label="train")
    message = str(caught.value)
    assert message.startswith(
        f"train ended with exit code 3. Its last lines, from {tmp_path}/logs/train.log:"
    )
    shown = [line for line in message.splitlines() if line.startswith("  | ")]
    assert shown == [f"  | line {i}" for i in range(10, 30)]  # 30 lines, the last 20 of them
    assert str(pickle.loads(pickle.dumps(caught.value))) == message


def test_the_error_reports_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    with pytest.raises(ChildProcessFailed) as caught:
        run_command(["false"], log_path=tmp_path / "log", label="train")
    assert "is full" not in caught.value.summary
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    with pytest.raises(ChildProcessFailed) as caught:
        run_command(["false"], log_path=tmp_path / "log", label="train")
    full = (
        f"train ended with exit code 1, and the disk of {tmp_path} is full: its last output may be "
        "missing;"
    )
    assert caught.value.summary.startswith(full)
    assert str(caught.value).startswith(full)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            python("import os; os.kill(os.getpid(), 9)"),
            r"was killed by SIGKILL \(not by us(.|\n)*\(it wrote nothing",
        ),
        (python("import os; os.kill(os.getpid(), 11)"), "was killed by SIGSEGV"),
        (["no-such-program"], r"exit code 127(.|\n)*cannot start 'no-such-program'"),
    ],
)
def test_the_error_names_the_signal_or_the_missing_program(
    tmp_path: Path, command: list[str], words: str
) -> None:
    with pytest.raises(ChildProcessFailed, match=words):
        run_command(command, log_path=tmp_path / "log", label="train")


def test_each_line_arrives_once_whatever_its_bytes(tmp_path: Path) -> None:
    # Written in bursts around the polls; the last line has no newline and comes right before the
    # end.
    code = r"""
        import os, sys, time
        for i in range(20000):
            sys.stdout.write(f"{i}\n")
            if i % 10000 == 0:
                time.sleep(0.15)
        sys.stdout.flush()
        os.write(1, b"bad \xff byte\n")
        os.write(1, "\u00e9t".encode()[:1])  # half a character, the other half after a poll
        time.sleep(0.3)
        os.write(1, "\u00e9t".encode()[1:] + b"\r\n")
        os.write(1, b"step 1\rstep 2\rstep 3\n")
        sys.stdout.write("end")
    """
    lines: list[str] = []
    run_command(python(code), log_path=tmp_path / "log", label="talker", on_line=lines.append)
    assert lines == [str(i) for i in range(20000)] + ["bad \ufffd byte", "\u00e9t", "step 3", "end"]


def test_environment_folder_and_input_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "INHERITED",
        "ADDED",
        "TAKEN",
        "PREFECT_API_KEY",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL",
    )
    for name in names:
        monkeypatch.setenv(name, f"value of {name}")
    code = (
        f"import os, sys; print(*map(os.environ.get, {names}), os.getcwd(), "
        "repr(sys.stdin.read()), sep=', ')"
    )
    env = {"ADDED": "too", "TAKEN": None}
    with background_command(
        python(code), log_path=tmp_path / "log", label="asker", env=env
    ) as process:
        wait_until(lambda: process.poll() is not None, "the end")
        assert process.tail(2) == [f"value of INHERITED, too, None, None, None, {os.getcwd()}, ''"]


def test_secrets_printed_by_a_command_are_redacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very-secret")
    code = """
        import os, sys, time
        os.write(1, b"using hf_very-")
        time.sleep(0.2)
        os.write(1, b"secret\\n")
        sys.exit("401 for " + os.environ["HF_TOKEN"])
    """
    lines: list[str] = []
    with pytest.raises(ChildProcessFailed) as caught:
        run_command(python(code), log_path=tmp_path / "log", label="fetch", on_line=lines.append)
    assert lines == ["using [redacted]", "401 for [redacted]"]
    assert "401 for [redacted]" in str(caught.value)
    assert "secret" not in (tmp_path / "log").read_text()


def test_an_unusable_log_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "log"):
        with pytest.raises(
            ChildProcessFailed, match=rf"fetch: its log {path} cannot be opened: "
        ) as caught:
            run_command(SLEEP, log_path=path, label="fetch")
        assert caught.value.is_lasting


def test_a_command_ignores_only_inherited_ignored_signals(tmp_path: Path) -> None:
    """Python itself ignores SIGPIPE; under nohup this process and the command ignore SIGHUP."""
    lines: list[str] = []
    command = ["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"]
    run_command(command, log_path=tmp_path / "log", label="asker", on_line=lines.append)
    masks = {name: int(mask, 16) for name, mask in (line.split() for line in lines)}
    # glibc keeps 32 and 33 to itself
    settable = sum(1 << (number - 1) for number in signal.valid_signals())
    hangup = 1 << (signal.SIGHUP - 1)
    ignored = hangup if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else 0
    assert {name: mask & settable for name, mask in masks.items()} == {
        "SigBlk:": 0,
        "SigIgn:": ignored,
    }


def test_a_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    # The parent-death signal also comes when only the starting thread ends; that must not end the
    # server.
    context = background_command(SLEEP, log_path=tmp_path / "log", label="server")
    servers = []
    starter = threading.Thread(target=lambda: servers.append(context.__enter__()))
    starter.start()
    starter.join()
    try:
        time.sleep(2 * supervisor.POLL_SECONDS)
        assert servers[0].poll() is None
    finally:
        context.__exit__(None, None, None)
    assert servers[0].poll() == -signal.SIGTERM


def test_a_killed_supervisor_takes_its_command_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder is removed too, and socket paths fit however long the temporary directory is."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    log_path = tmp_path / "log"
    with background_command(
        SLEEP, log_path=log_path, label="server", folder_variable="PLACE"
    ) as server:
        wait_until(lambda: len(server.tail(1)) == 1, "the command to start")
        command_pid = int(server.tail(1)[0])
        folder = folder_of(command_pid)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / str(uuid.uuid4())))
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: start_time_of(command_pid) is None, "the command to end")
        wait_until(lambda: server.poll() == -signal.SIGKILL, "the supervisor's end to be known")
    assert not folder.exists()


def test_a_rotated_log_is_followed_from_its_new_beginning(tmp_path: Path) -> None:
    log, lines, seen = tmp_path / "log", list[str](), tmp_path / "seen"
    code = """
        import os, sys, time
        print("before " * 100, flush=True)
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.02)
        os.truncate(sys.argv[1], 0)
        print("after", flush=True)
    """

    def on_line(line: str) -> None:
        lines.append(line)
        seen.touch()

    run_command(python(code, log, seen), log_path=log, label="job", on_line=on_line)
    assert lines[0].startswith("before")
    assert lines[-1] == "after"
