"""Requests over a real sshd on loopback: login shells, an unknown key, an unknown host."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.nodes.inventory import Inventory
from tasks.nodes.reach import Answer, ask

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
START_SECONDS = 200.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keys, and the ssh configuration of the host `node`, which this fixture's sshd serves."""
    if SSHD is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd (Debian's openssh-server)")
    separation = Path("/run/sshd")
    if not separation.is_dir():
        if os.geteuid() != 0:
            pytest.skip(f"sshd needs {separation}, which only root makes")
        separation.mkdir(mode=0o755)
    folder = tmp_path_factory.mktemp("ssh")
    for name in ("host", "own", "other"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile none\nUsePAM "
        "no\nStrictModes no\n"
        f"AuthorizedKeysFile {folder}/own.pub\nPasswordAuthentication no\nPermitRootLogin "
        "prohibit-password\n"
        # as if it were the login shell
        f'AcceptEnv DAPO_*\nForceCommand $DAPO_SHELL -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    key = (folder / "host.pub").read_text()
    (folder / "known").write_text(f"[127.0.0.1]:{port} {key}")
    (folder / "config").write_text(
        f"Host node\n HostName 127.0.0.1\n Port {port}\n User {getpass.getuser()}\n"
        f" IdentitiesOnly yes\n UserKnownHostsFile {folder}/known\n StrictHostKeyChecking yes\n"
    )
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [SSHD, "-D", "-e", "-f", folder / "sshd_config"], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while "Server listening" not in (folder / "log").read_text():
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield folder
    finally:
        server.terminate()
        server.wait()


def _ask(
    folder: Path, key: str = "own", *options: str, login: str = "sh", **changes: Any
) -> Answer:
    settings = (
        f"-F {folder}/config -i {folder}/{key} -o BatchMode=yes -o SetEnv=DAPO_SHELL={login}",
        *options,
    )
    shell = " ".join(("ssh", *settings, "{host}"))
    inventory = Inventory(hosts=("node",), device="cpu", devices=1, shell=shell, **changes)
    return ask(inventory, {"node": {"verb": "status", "cluster": "node_1", "host": "node"}})["node"]


@pytest.mark.parametrize("login", ["bash", "dash", "tcsh", "fish"])
def test_a_host_answers_over_ssh_with_any_login_shell(
    folder: Path, tmp_path: Path, login: str
) -> None:
    if shutil.which(login) is None:
        pytest.skip(f"there is no {login} (Debian's {login})")
    text = r"""$HOME `id` "two" \ 'one' !! é *"""
    setup = f"[ $# = 0 ]\ncat <<'END' >{tmp_path}/text\n{text}\nEND\n"
    answer = _ask(folder, login=login, setup=setup)
    assert (answer.problem, answer.reply) == ("", {"running": None}), (folder / "log").read_text()
    assert (tmp_path / "text").read_text() == f"{text}\n"


def test_a_rejected_key_names_ssh_copy_id(folder: Path) -> None:
    answer = _ask(folder, "other")
    assert "Permission denied (publickey" in answer.problem
    assert answer.problem.endswith("; install your key: ssh-copy-id node")


def test_an_unknown_host_key_says_to_compare_it(folder: Path) -> None:
    (folder / "nothing").touch()
    answer = _ask(folder, "own", f"-o UserKnownHostsFile={folder}/nothing")
    assert answer.problem == "Host key verification failed; run ssh node once and compare its key"
