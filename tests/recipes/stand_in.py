"""A stub of the Hub with the endpoints that configs need, over real HTTP, with files in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


TOKEN = "hf_" + "Ab1" * 10
Files = dict[str, bytes]


@dataclass
class Repository:
    """Branches and commits of one repository."""

    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, changes: Files) -> str:
        """Commits files to a branch, and returns the hash."""
        files = {**self.files(branch), **changes}
        oid = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        """Returns the hash of a branch or commit."""
        return self.branches.get(revision, revision if revision in self.commits else None)

    def files(self, revision: str) -> Files:
        """Returns the files of a revision by path."""
        return self.commits.get(self.resolve(revision) or "", {})


@dataclass
class StandIn:
    """State of the server, with path and body of every request."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def sent(self) -> str:
        """Returns everything that clients sent, with decoded files."""
        bodies = [body.decode() for _, body in self.requests]
        contents = [base64.b64decode(found).decode() for body in bodies for found in CONTENT.findall(body)]
        return "\n".join([*bodies, *contents])

    def add(self, repo_id: str, files: Files) -> str:
        """Creates a repository without a client, and returns its newest commit."""
        repository = self.repositories.setdefault(repo_id, Repository(private=False))
        return repository.commit("main", files)


CONTENT = re.compile(r'"content": ?"([A-Za-z0-9+/=]+)"')
API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<action>\w+)/(?P<revision>[^/]+))?")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """Runs the stub."""
    state = StandIn()
    handler = type("BoundHandler", (Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """Answers like the Hub, as far as `huggingface_hub` requires."""

    state: StandIn
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append((path, body))
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse_token()
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        found = API.fullmatch(path)
        repository = self.state.repositories.get(found["repo"]) if found else None
        if found is None or repository is None:
            return self.refuse(404, "RepoNotFound")
        if found["action"] == "branch":
            return self.branch(repository, found["revision"], body)
        if repository.resolve(found["revision"]) is None:
            return self.refuse(404, "RevisionNotFound")
        if found["action"] == "preupload":
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self.answer({"files": modes})
        lines = [json.loads(line) for line in body.splitlines()]
        parent = next((line["value"].get("parentCommit") for line in lines if line["key"] == "header"), None)
        if parent not in (None, repository.resolve(found["revision"])):
            return self.refuse(412, message="A commit has happened since. Please refresh and try again.")
        changes = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"])
            for line in lines
            if line["key"] == "file"
        }
        oid = repository.commit(found["revision"], changes)
        return self.answer({"commitUrl": f"{self.state.url}/{found['repo']}/commit/{oid}", "commitOid": oid})

    def create(self, wanted: dict[str, object]) -> None:
        repo_id = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        if repo_id in self.state.repositories:
            return self.answer({"url": f"{self.state.url}/{repo_id}"}, status=409)
        repository = Repository(private=wanted.get("visibility") == "private" or bool(wanted.get("private")))
        repository.commit("main", {".gitattributes": b""})
        self.state.repositories[repo_id] = repository
        return self.answer({"url": f"{self.state.url}/{repo_id}", "name": repo_id})

    def branch(self, repository: Repository, name: str, body: bytes) -> None:
        if name in repository.branches:
            return self.refuse(409, message="Reference already exists")
        wanted = json.loads(body or b"{}").get("startingPoint", "main")
        repository.branches[name] = repository.resolve(wanted) or repository.branches["main"]
        return self.answer({})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append((path, b""))
        found = API.fullmatch(path) or FILE.fullmatch(path)
        repository = self.state.repositories.get(found["repo"]) if found else None
        if self.headers.get("Authorization") not in (None, f"Bearer {TOKEN}"):
            return self.refuse_token()
        if found is None or repository is None or (repository.private and not self.headers.get("Authorization")):
            return self.refuse(404 if self.headers.get("Authorization") else 401, "RepoNotFound")
        commit = repository.resolve(found["revision"] or "main")
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        files = repository.files(commit)
        if "path" in found.groupdict():
            if found["path"] not in files:
                return self.refuse(404, "EntryNotFound", commit=commit)
            return self.answer(files[found["path"]], commit)
        siblings = [{"rfilename": name} for name in files]
        repo = {"id": found["repo"], "modelId": found["repo"], "private": repository.private}
        return self.answer({**repo, "sha": commit, "siblings": siblings})

    do_HEAD = do_GET

    def answer(self, value: object, commit: str | None = None, status: int = 200) -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
            self.send_header("ETag", f'"{oid_of(body)}"')
        self.end(body)

    def refuse(self, status: int, code: str = "", message: str = "", commit: str = "") -> None:
        self.send_response(status)
        for name, value in {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit}.items():
            if value:
                self.send_header(name, value)
        self.end(json.dumps({"error": message or code}).encode())

    def refuse_token(self) -> None:
        return self.refuse(401, message="Invalid credentials in Authorization header")

    def end(self, body: bytes) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Does nothing, because requests are recorded."""


def oid_of(content: bytes) -> str:
    """Returns Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
