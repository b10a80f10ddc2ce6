"""A local hub server with the Hugging Face and ModelScope APIs and plain files, served from
dictionaries.
"""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Files = dict[str, bytes]
LFS = (".safetensors", ".bin", ".parquet")
_HF_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(refs|revision|tree)(?:/(.+))?)?")
_HF_FILE = re.compile(r"/(?:(datasets)/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_MS = re.compile(r"/api/v1/(models|datasets)/([^/]+/[^/]+)/(repo/files|repo/tree|revisions|repo)")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass
class Repo:
    """A repository: branches and tags name commits, commits hold files."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    token: str | None = None  # required for files
    is_gated: bool = False  # without the token, files are refused with GatedRepo
    missing: set[str] = field(default_factory=set)  # listed but not served

    def commit(self, files: Files, ref: str = "main") -> str:
        """Add a commit and point a branch at it. ModelScope's default branch follows main."""
        name = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[name] = dict(files)
        self.refs[ref] = name
        if ref == "main":
            self.refs["master"] = name
        return name

    def files(self, revision: str) -> Files | None:
        return self.commits.get(self.refs.get(revision, revision))


@dataclass
class Asked:
    """One request and the number of bytes sent."""

    method: str
    path: str
    begin: int  # start of the range
    headers: dict[str, str]
    num_bytes: int = 0


class HubServer(ThreadingHTTPServer):
    """Repositories by ("models" or "datasets", "ORG/NAME"), and plain files by their path.

    `interfere(handler)` sees each request first and returns True if it has answered. `cut` maps a
    part of the path to the numbers of bytes after which successive responses break off.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[tuple[str, str], Repo] = {}
        self.plain: Files = {}
        self.asked: list[Asked] = []
        self.cut: dict[str, list[int]] = {}
        self.held_from: int | None = None  # while set, content from this byte on is held back
        self.interfere: Callable[[Handler], bool] = lambda handler: False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def cdn(self) -> str:
        """The same server under another host name; clients must not send it the hub's token."""
        return f"http://localhost:{self.server_address[1]}"

    def model(self, name: str = "org/tiny") -> Repo:
        return self.repos.setdefault(("models", name), Repo())

    def dataset(self, name: str = "org/rows") -> Repo:
        return self.repos.setdefault(("datasets", name), Repo())

    def contents(self) -> list[Asked]:
        """Requests that were answered with file content."""
        return [asked for asked in self.asked if asked.method == "GET" and asked.num_bytes]

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore broken connections."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer
    commit = ""  # of the file asked for, on the Hugging Face Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        begin = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        self.row = Asked(self.command, self.path, int(begin[1]) if begin else 0, dict(self.headers))
        self.server.asked.append(self.row)
        self.commit = ""
        if self.server.interfere(self):
            return
        parts = urlsplit(self.path)
        path = parts.path
        if match := _MS.fullmatch(path):
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            self.modelscope(match[1], match[2], match[3], query)
        elif match := _HF_API.fullmatch(path):
            self.hugging_face(match[1], match[2], match[3], match[4])
        elif match := _HF_FILE.fullmatch(path):
            self.hugging_face_file(
                match[1] or "models", match[2], unquote(match[3]), unquote(match[4])
            )
        elif path.startswith("/cdn/"):
            self.content(next(c for c in self.all_contents() if sha256(c) == path[5:]))
        elif (content := self.server.plain.get(unquote(path))) is not None:
            self.content(content)
        else:
            self.refuse(404)

    def all_contents(self) -> Iterator[bytes]:
        for repo in self.server.repos.values():
            for files in repo.commits.values():
                yield from files.values()

    def hugging_face(self, kind: str, name: str, resource: str | None, rev: str | None) -> None:
        repo = self.server.repos.get((kind, name))
        if repo is None or (repo.token and not repo.is_gated and not self.knows(repo)):
            return self.refuse(401, "RepoNotFound")
        if resource == "refs":
            rows = [
                {"name": n, "ref": f"refs/heads/{n}", "targetCommit": c}
                for n, c in repo.refs.items()
            ]
            return self.json({"branches": rows, "converts": [], "tags": []})
        revision = unquote(rev or "main")
        files = repo.files(revision)
        if files is None:
            return self.refuse(404, "RevisionNotFound")
        if resource == "tree":
            return self.json([self.entry(path, content) for path, content in files.items()])
        siblings = []
        for path, content in files.items():
            entry = self.entry(path, content)
            row = {"rfilename": path, "size": len(content), "blobId": entry["oid"]}
            siblings.append(row | ({"lfs": entry["lfs"]} if "lfs" in entry else {}))
        info = {
            "id": name,
            "sha": repo.refs.get(revision, revision),
            "siblings": siblings,
            "tags": [],
        }
        self.json({**info, "gated": "manual" if repo.is_gated else False})

    def entry(self, path: str, content: bytes) -> dict[str, Any]:
        """A file of a tree listing."""
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        row: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": blob}
        if path.endswith(LFS):
            digest = sha256(content)
            lfs = {"size": len(content), "oid": digest, "sha256": digest, "pointerSize": 130}
            row |= {"oid": "f" * 40, "lfs": lfs}  # the pointer's
        return row

    def hugging_face_file(self, kind: str, name: str, revision: str, path: str) -> None:
        repo = self.server.repos.get((kind, name))
        if repo is None or (repo.token and not self.knows(repo)):
            gated = repo is not None and repo.is_gated
            return self.refuse(
                403 if gated and self.headers.get("Authorization") else 401, "GatedRepo"
            )
        content = (repo.files(revision) or {}).get(path)
        if content is None or path in repo.missing:
            return self.refuse(404, "EntryNotFound")
        self.commit = revision
        if path.endswith(LFS):
            self.send_response(302)
            self.send_header("X-Repo-Commit", revision)
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-Etag", f'"{sha256(content)}"')
            self.send_header("Location", f"{self.server.cdn}/cdn/{sha256(content)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.content(content)

    def modelscope(self, kind: str, name: str, resource: str, query: dict[str, str]) -> None:
        repo = self.server.repos.get((kind, name))
        if repo is None:
            return self.refuse(404)
        if repo.token and not self.knows(repo):
            return self.refuse(403)
        if resource == "revisions":
            rows = [{"Revision": ref} for ref in repo.refs if ref != "main"]
            return self.json({"Code": 200, "Data": {"RevisionMap": {"Branches": rows, "Tags": []}}})
        files = repo.files(query.get("Revision", "master"))
        if files is None:
            return self.refuse(404)
        if resource == "repo":
            path = query["FilePath"]
            return (
                self.content(files[path])
                if path in files and path not in repo.missing
                else self.refuse(404)
            )
        rows = [
            {"Path": path, "Size": len(content), "Sha256": sha256(content), "Type": "blob"}
            for path, content in files.items()
        ]
        self.json({"Code": 200, "Data": {"Files": rows}})

    def knows(self, repo: Repo) -> bool:
        return self.headers.get("Authorization") == f"Bearer {repo.token}"

    def json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status: int, code: str = "", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"X-Error-Code": code, "Content-Length": "0", **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def content(self, content: bytes) -> None:
        """Send a file from the start of the range."""
        begin = self.row.begin
        if begin >= len(content) > 0:
            return self.refuse(416, **{"Content-Range": f"bytes */{len(content)}"})
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - begin))
        self.send_header("ETag", f'"{sha256(content)}"')
        if self.commit:
            self.send_header("X-Repo-Commit", self.commit)
        self.end_headers()
        if self.command != "GET":
            return
        cuts = next(
            (cuts for part, cuts in self.server.cut.items() if cuts and part in self.path), []
        )
        end = min(len(content), begin + cuts.pop(0)) if cuts else len(content)
        for start in range(begin, end, 65536):
            while self.server.held_from is not None and start >= self.server.held_from:
                threading.Event().wait(0.02)
            block = content[start : min(start + 65536, end)]
            self.wfile.write(block)
            self.wfile.flush()
            self.row.num_bytes += len(block)
        self.close_connection = self.close_connection or end < len(content)

    def log_message(self, format: str, *args: object) -> None:
        """Silence the log; tests inspect `server.asked`."""


@contextlib.contextmanager
def serving() -> Iterator[HubServer]:
    """A hub that serves during the block."""
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
