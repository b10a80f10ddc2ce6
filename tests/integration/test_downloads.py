"""Downloads with the hubs' own clients, against a local hub server."""

import pickle
import random
import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants
from modelscope_hub.config import set_default_config

import downloads
from downloads import DownloadError, Progress, Unreachable, fetch, resolve, urls
from tests.hub_server import Handler, HubServer, Repo, sha256

WEIGHTS = random.Random(0).randbytes(700_000)
FILES = {
    "config.json": b'{"a": 1}\n',
    "model.safetensors": WEIGHTS,
    "sub/notes.txt": b"\xe9 notes\n",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("scheme", ["hf", "modelscope"])
@pytest.mark.parametrize("kind", ["model", "dataset"])
def test_a_reference_resolves_without_content_and_its_files_are_fetched(
    hub: HubServer, tmp_path: Path, scheme: str, kind: downloads.Kind
) -> None:
    repo = hub.repos[(f"{kind}s", "org/tiny")] = Repo()
    first = repo.commit(FILES)
    snapshot = resolve(f"{scheme}:org/tiny", kind)
    assert hub.contents() == []
    assert {file.path: file.size for file in snapshot.files} == {
        name: len(FILES[name]) for name in FILES
    }
    weights = next(file for file in snapshot.files if file.path == "model.safetensors")
    assert weights.sha256 == sha256(WEIGHTS)
    seen: list[Progress] = []
    fetch(snapshot, tmp_path / "all", on_progress=seen.append)
    assert contents(tmp_path / "all") == FILES
    total = sum(map(len, FILES.values()))
    assert seen[-1] == Progress(3, 3, total, total)
    if scheme == "hf":
        assert snapshot.commit == first
        assert {file.path: file.git_oid for file in snapshot.files}["config.json"]
    repo.commit({**FILES, "config.json": b"{}"})
    moved = resolve(f"{scheme}:org/tiny@{'main' if scheme == 'hf' else 'master'}", kind)
    assert moved.commit != snapshot.commit
    assert resolve(f"{scheme}:org/tiny@{first}", kind).files == snapshot.files
    [one] = resolve(f"{scheme}:org/tiny@{first}/sub/notes.txt", kind).files
    assert one.path == "sub/notes.txt"
    assert [file.path for file in resolve(f"{scheme}:org/tiny/sub", kind).files] == [
        "sub/notes.txt"
    ]
    hub.asked.clear()
    fetch(snapshot, tmp_path / "all")  # already complete
    assert hub.contents() == []
    fetch(snapshot, tmp_path / "some", ["sub/notes.txt"])
    assert contents(tmp_path / "some") == {"sub/notes.txt": FILES["sub/notes.txt"]}
    if scheme == "hf":
        fetch(snapshot, tmp_path / "some", ["config.json"])
        assert (tmp_path / "some/config.json").read_bytes() == FILES["config.json"]
    else:  # has no commits; digests reveal a branch that moved
        with pytest.raises(DownloadError, match=r"config\.json.*may have changed"):
            fetch(snapshot, tmp_path / "some", ["config.json"])


def failing(
    reference: str | list[str], folder: Path, kind: downloads.Kind = "model"
) -> DownloadError:
    """The error of resolving and fetching a reference; checks that it survives pickling."""
    with pytest.raises(DownloadError) as caught:
        fetch(resolve(reference, kind), folder)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied)) == (type(caught.value), str(caught.value))
    assert copied.is_lasting == caught.value.is_lasting
    return caught.value


def test_unknown_names_are_refused_with_suggestions(hub: HubServer, tmp_path: Path) -> None:
    hub.model().commit(FILES, "v1.0")
    hub.model().commit(FILES)
    for reference, message in (
        ("hf:org/tiny@v1.1", r"org/tiny has no revision v1\.1 \(did you mean v1\.0\?\)"),
        ("hf:org/tiny@" + "0" * 40, r"org/tiny has no revision 0{40}; it has v1\.0, main, master"),
        (
            "hf:org/tinny",
            r"there is no model org/tinny at .*, or it is private \(HTTP 401\).*HF_TOKEN",
        ),
        (
            "hf:org/tiny/configs.json",
            r"org/tiny has no file configs\.json \(did you mean config\.json\?\)",
        ),
        ("modelscope:org/tiny@v1.1", r"no revision v1\.1.*\(did you mean v1\.0\?\)"),
        (
            "modelscope:org/tinny",
            r"does not exist, or is private; correct the name, or set MODELSCOPE_API_TOKEN",
        ),
    ):
        error = failing(reference, tmp_path)
        assert re.search(message, str(error)), error
        assert error.is_lasting
    assert hub.contents() == []


@pytest.mark.parametrize("is_gated", [True, False])
def test_a_token_opens_gated_and_private_repositories_and_is_sent_only_to_the_hub(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_gated: bool
) -> None:
    repo = hub.model()
    repo.commit(FILES)
    repo.token, repo.is_gated = "hf_right_token", is_gated
    for token in (None, "hf_wrong_token"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
            monkeypatch.setenv("MODELSCOPE_API_TOKEN", token)
            set_default_config(None)
        error = failing("hf:org/tiny", tmp_path / "out")
        assert ("is denied" if is_gated else "or it is private") in str(error)
        terms = f"accept its terms at {hub.url}/org/tiny if it is gated, and set HF_TOKEN"
        assert terms in str(error)
        error = failing("modelscope:org/tiny", tmp_path / "out")
        assert re.search("is denied.*MODELSCOPE_API_TOKEN", str(error))
        assert error.is_lasting
    assert hub.contents() == []
    for name in ("HF_TOKEN", "MODELSCOPE_API_TOKEN"):
        monkeypatch.setenv(name, "hf_right_token")
    set_default_config(None)
    for scheme in ("hf", "modelscope"):
        hub.asked.clear()
        fetch(resolve(f"{scheme}:org/tiny"), tmp_path / scheme)
        assert contents(tmp_path / scheme) == FILES
        elsewhere = [asked for asked in hub.asked if asked.path.startswith("/cdn/")]
        assert len(elsewhere) == (scheme == "hf")
        assert not any("Authorization" in asked.headers for asked in elsewhere)


@pytest.mark.parametrize("scheme", ["hf", "modelscope", "url"])
def test_an_interrupted_download_resumes(hub: HubServer, tmp_path: Path, scheme: str) -> None:
    hub.model().commit(FILES)
    hub.plain["/model.safetensors"] = WEIGHTS
    pinned = f"{hub.url}/model.safetensors#sha256={sha256(WEIGHTS)}"
    snapshot = resolve(pinned if scheme == "url" else f"{scheme}:org/tiny")
    place = {"hf": sha256(WEIGHTS), "modelscope": "model.safetensors", "url": "/model.safetensors"}[
        scheme
    ]
    hub.cut[place] = [300_000, 200_000]
    fetch(snapshot, tmp_path, ["model.safetensors"])
    assert contents(tmp_path) == {"model.safetensors": WEIGHTS}
    begins = [asked.begin for asked in hub.contents() if place in asked.path]
    assert len(begins) == 3
    assert scheme == "hf" or begins == [0, 300_000, 500_000]  # its client resumes every 10 MiB


def test_a_busy_server_is_retried_and_a_busy_hub_is_worth_another_attempt(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.model().commit(FILES)
    hub.plain["/w.bin"] = WEIGHTS
    answers = [429, 503, 503, 503]  # the first goes to the question for the size

    def busy(handler: Handler) -> bool:
        return bool(answers) and handler.refuse(answers.pop(0)) is None

    hub.interfere = busy
    fetch(resolve(f"{hub.url}/w.bin#sha256={sha256(WEIGHTS)}"), tmp_path)
    assert contents(tmp_path) == {"w.bin": WEIGHTS}
    hub.interfere = lambda handler: handler.command == "HEAD" and handler.content(b"") is None
    fetch(resolve(f"{hub.url}/w.bin#sha256={sha256(WEIGHTS)}"), tmp_path / "unsized")
    hub.interfere = busy
    answers.append(503)
    error = failing("hf:org/tiny", tmp_path)
    assert "org/tiny returned HTTP 503; run it again later" in str(error)
    assert not error.is_lasting


def test_a_mirror_that_lacks_a_listed_file(hub: HubServer, tmp_path: Path) -> None:
    repo = hub.model()
    repo.commit(FILES)
    repo.missing = {"config.json"}
    error = failing("hf:org/tiny", tmp_path / "hf")
    assert re.search(r"config\.json does not exist \(HTTP 404\).*mirror may list files", str(error))
    error = failing("modelscope:org/tiny", tmp_path / "ms")
    assert "lacks a file that it lists" in str(error)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_wrong_content_is_not_kept(hub: HubServer, tmp_path: Path, name: str) -> None:
    hub.model().commit(FILES)
    snapshot = resolve("hf:org/tiny")
    bad = FILES[name][:-1] + b"!"

    def exchange(handler: Handler) -> bool:
        handler.commit = snapshot.commit
        return handler.path.endswith(name) and handler.content(bad) is None

    hub.interfere = exchange
    with pytest.raises(
        DownloadError, match=rf"{name} of org/tiny is not the expected file.*sha256 {sha256(bad)}"
    ):
        fetch(snapshot, tmp_path / "out", [name])
    assert not (tmp_path / "out" / name).exists()
    assert len(hub.contents()) == 1
    hub.interfere = lambda handler: False
    fetch(snapshot, tmp_path / "out", [name])
    assert contents(tmp_path / "out") == {name: FILES[name]}


def test_a_small_disk_is_reported_before_the_first_byte(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.model().commit(FILES)
    hub.plain["/w.bin"] = WEIGHTS
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(downloads.shutil, "disk_usage", lambda _: usage)
    for reference in (
        "hf:org/tiny",
        "modelscope:org/tiny",
        f"{hub.url}/w.bin#sha256={sha256(WEIGHTS)}",
    ):
        error = failing(reference, tmp_path / "out")
        assert re.search(
            r"700,\d{3} bytes to download do not fit on the disk of .*, which has 100,000 free",
            str(error),
        )
    assert hub.contents() == []


def test_a_disk_that_fills_up_is_reported(hub: HubServer, tmp_path: Path) -> None:
    hub.model().commit(FILES)
    reference = "modelscope:org/tiny/config.json"
    parts = tmp_path / ".parts" / resolve(reference).commit
    parts.mkdir(parents=True)
    (parts / "config.json.incomplete").symlink_to("/dev/full")
    assert "the disk filled up during the download: [Errno 28]" in str(failing(reference, tmp_path))


@pytest.mark.parametrize("scheme", ["hf", "modelscope", "url"])
def test_network_failures_are_told_apart(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(urls, "MAX_ATTEMPTS", 1)
    monkeypatch.setattr("modelscope_hub._legacy_api.REPO_TREE_PAGE_MAX_ATTEMPTS", 1)

    def error_at(endpoint: str) -> Unreachable:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", endpoint)
        set_default_config(None)
        close_session()
        url = f"{endpoint}/f.json#sha256={'0' * 64}"
        error = failing(url if scheme == "url" else f"{scheme}:org/tiny", tmp_path)
        assert isinstance(error, Unreachable)
        return error

    refused = error_at("http://127.0.0.1:9")
    assert re.search(
        r"127\.0\.0\.1.* cannot be reached \(.*refused.*check the network", str(refused)
    )
    assert not refused.is_lasting
    assert "check the network and the endpoint's spelling" in str(error_at("http://hub.invalid"))
    tls = error_at(hub.url.replace("http:", "https:"))  # the hub does not speak TLS
    assert re.search(r"certificate|TLS|SSL", str(tls))
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    assert re.search("through the proxy.*HTTPS_PROXY", str(error_at("http://hub.example")))


def test_a_url_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(DownloadError, match="a user or password") as caught:
        resolve(f"https://me:hidden-word@a.org/b#sha256={'0' * 64}")
    assert "hidden-word" not in str(caught.value)


def test_archives_stay_in_their_folder(hub: HubServer, tmp_path: Path) -> None:
    def pinned(name: str) -> str:
        hub.plain[f"/{name}"] = (tmp_path / name).read_bytes()
        return f"{hub.url}/{name}#sha256={sha256(hub.plain[f'/{name}'])}"

    (tmp_path / "in").write_bytes(b"content")
    for member in ("../out", "/etc/x"):
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as packed:
            packed.write(tmp_path / "in", "fine")
            packed.writestr(zipfile.ZipInfo(member), b"x")
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as packed:
            packed.add(tmp_path / "in", "fine")
            packed.addfile(tarfile.TarInfo(member))
        for name in ("a.zip", "a.tar.gz"):
            assert "leads out of the folder" in str(failing(pinned(name), tmp_path / "to" / name))
    with tarfile.open(tmp_path / "l.tar", "w") as packed:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(link)
    assert "contains link, a link or device" in str(failing(pinned("l.tar"), tmp_path / "to/l"))
    (tmp_path / "bad.tar").write_bytes(b"no archive")
    assert "bad.tar cannot be unpacked" in str(failing(pinned("bad.tar"), tmp_path / "to/bad"))
    assert not (tmp_path / "to/out").exists()
    with zipfile.ZipFile(tmp_path / "good.zip", "w") as packed:
        packed.write(tmp_path / "in", "top/a/in")
    fetch(resolve(pinned("good.zip")), tmp_path / "to/good")
    assert contents(tmp_path / "to/good") == {"a/in": b"content"}
    (tmp_path / "to/good/a/in").write_bytes(b"changed")
    fetch(resolve(pinned("good.zip")), tmp_path / "to/good")
    assert contents(tmp_path / "to/good") == {"a/in": b"content"}
    (tmp_path / "to/cut/a/in").mkdir(parents=True)  # unpacking fails here
    with pytest.raises(OSError, match="a/in"):
        fetch(resolve(pinned("good.zip")), tmp_path / "to/cut")
    (tmp_path / "to/cut/a/in").rmdir()
    hub.asked.clear()
    fetch(resolve(pinned("good.zip")), tmp_path / "to/cut")
    assert hub.contents() == []  # the archive was still there
    assert contents(tmp_path / "to/cut") == {"a/in": b"content"}


def test_a_listed_path_cannot_leave_the_folder(hub: HubServer, tmp_path: Path) -> None:
    hub.model().commit({"../escaped.json": b"{}"})
    assert "leads out of the folder" in str(failing("hf:org/tiny", tmp_path / "out"))
    assert not (tmp_path / "escaped.json").exists()
