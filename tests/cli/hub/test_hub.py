"""Hub downloads, from a local server that answers like Hugging Face's hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.flags.model_options import Repo, url
from logitless.cli.hub import download, model_source
from logitless.cli.hub.hub import Hub
from logitless.cli.hub.repository import CachedFile, choose, choose_block, choose_folder, choose_projector
from logitless.cli.setup.model import find_draft_model, find_projector
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from tests.helpers.hub_cache import HubCache, add_to_hub_cache
from tests.helpers.huggingface_folders import write_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = bytes(range(256)) * 40
TOKEN = "hf_secretsecret"


@dataclass
class FakeHub:
    """Repositories by name: files by name. `log` has (method, path, Range, Authorization) of each request."""

    url: str = ""
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)  # by repository: status, X-Error-Code
    cut: int = 0  # bytes after which the next transfer breaks off
    lie: bytes = b""  # sent in the place of a file's content
    log: list[tuple[str, str, str, str]] = field(default_factory=list)
    needs_token: bool = False

    def asked(self, method: str) -> list[tuple[str, str, str, str]]:
        """Requests for models; huggingface-hub now and then asks other things too."""
        return [e for e in self.log if e[0] == method and (e[1].startswith("/api/models/") or "/resolve/" in e[1])]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    fake = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            given = self.headers.get("Authorization", "")
            fake.log.append((self.command, self.path, self.headers.get("Range", ""), given))
            api = re.fullmatch(r"/api/models/([^/]+/[^/?]+)(\?.*)?", self.path)
            if api:
                self.answer_api(api[1], given)
            else:
                self.answer_file(given)

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def answer_api(self, repo: str, given: str) -> None:
            if repo in fake.refusals:
                self.refuse(*fake.refusals[repo])
            elif repo not in fake.repos or (fake.needs_token and given != f"Bearer {TOKEN}"):
                self.refuse(401, "RepoNotFound")
            else:
                files = [{"rfilename": name} for name in fake.repos[repo]]
                body = json.dumps({"id": repo, "sha": COMMIT, "siblings": files}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def answer_file(self, given: str) -> None:
            repo, _, name = self.path.lstrip("/").partition("/resolve/main/")
            files = fake.repos.get(repo, {})
            if name not in files or (fake.needs_token and given != f"Bearer {TOKEN}"):
                self.refuse(404, "EntryNotFound")
                return
            content = files[name]
            start = int((re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")) or [0, "0"])[1])
            sent = (fake.lie or content)[start:]
            self.send_response(206 if start else 200)
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            if self.command == "GET":
                if fake.cut:
                    sent, fake.cut = sent[: fake.cut], 0
                    self.close_connection = True
                self.wfile.write(sent)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", fake.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()


def of(hub: FakeHub, cache: Path, text: str, file: str = "", **settings: Any) -> Path:
    return Hub(settings.pop("token", None), cache=cache, **settings).model(Repo.parse(text), file)


# --- which file


NAMES = ["README.md", "m-BF16.gguf", "m-Q8_0.gguf", "m-q4_k_m.gguf", "mmproj-F16.gguf"]
SPLIT = [f"Q2_K/big-Q2_K-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("text", "file", "chosen"),
    [
        ("u/r", "", ["m-q4_k_m.gguf"]),
        ("u/r:q8_0", "", ["m-Q8_0.gguf"]),
        ("u/r:Q2_K", "", SPLIT),
        ("u/r", "m-BF16.gguf", ["m-BF16.gguf"]),
        ("u/r:Q8_0", SPLIT[0], SPLIT),
    ],
)
def test_file_of_repository_is_chosen(text: str, file: str, chosen: list[str]) -> None:
    assert choose([*NAMES, *SPLIT], Repo.parse(text), file) == chosen


BLOCKS = ["mtp-m-BF16.gguf", "mtp-m-Q8_0.gguf"]


def test_a_block_is_no_model() -> None:
    """But for who names its file."""
    assert choose([*BLOCKS, "z-Q8_0.gguf"], Repo.parse("u/r:Q8_0")) == ["z-Q8_0.gguf"]
    assert choose([*BLOCKS, "z-Q8_0.gguf"], Repo("u/r"), BLOCKS[1]) == [BLOCKS[1]]
    with pytest.raises(CliError, match=r"u/r has no GGUF file that is a whole model; it has mtp-m-BF16\.gguf, mtp-"):
        choose(BLOCKS, Repo("u/r"))
    with pytest.raises(CliError, match=r"u/r has no GGUF file$"):
        choose(["README.md"], Repo("u/r"))


@pytest.mark.parametrize(
    ("names", "like", "chosen"),
    [
        (BLOCKS, "m-Q8_0.gguf", "mtp-m-Q8_0.gguf"),
        (BLOCKS, "m-Q4_K_M.gguf", "mtp-m-BF16.gguf"),
        (["sub/MTP-x.gguf"], "m.gguf", "sub/MTP-x.gguf"),
        ([*NAMES, "empty-1.gguf", "mtp-x.txt"], "m-Q8_0.gguf", ""),
        (["eagle3-m.gguf", "dflash-m.gguf"], "m.gguf", ""),
    ],
)
def test_mtp_file_beside_model_is_chosen(names: list[str], like: str, chosen: str) -> None:
    assert choose_block(names, like) == chosen
    drafters = [name.lower().replace("mtp-", "eagle3-") for name in names]
    assert choose_block(drafters, like, "eagle3") == chosen.lower().replace("mtp-", "eagle3-") or not chosen
    with pytest.raises(CliError, match="no GGUF file"):
        choose([name for name in drafters if "eagle3-" in name], Repo("u/r"))


def test_without_the_default_the_first_counts() -> None:
    assert choose(["z-F16.gguf", "b-Q8_0.gguf"], Repo("u/r")) == ["b-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("names", "text", "file", "line"),
    [
        (NAMES, "u/r:F16", "", r"u/r has no F16; it has BF16, Q8_0, q4_k_m$"),
        (NAMES, "u/r:Q4", "", "has no Q4; it has"),
        (NAMES, "u/r", "x.gguf", r"--hf-file: u/r has no file x.gguf; it has m-BF16"),
        (["a.txt"], "u/r", "", "u/r has no GGUF file"),
        (SPLIT[:2], "u/r", "", f"but not its part {SPLIT[2]}"),
    ],
)
def test_missing_file_error_lists_files_of_repository(names: list[str], text: str, file: str, line: str) -> None:
    with pytest.raises(CliError, match=line):
        choose(names, Repo.parse(text), file)


@pytest.mark.parametrize("text", ["", "r", "u/r/x", "../r", "u/..", "u/r:", "u/r:../x", "-u/r", "u/r\n", "u/r:a b"])
def test_text_that_is_no_repository_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not USER/REPO"):
        Repo.parse(text)


@pytest.mark.parametrize("text", ["", "file:///etc/passwd", "ftp://x/y", "http://", "http://a b", "https://x/\n"])
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an http"):
        url(text)


# --- the hub


def test_a_model_comes_once_and_stays(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos["u/r"] = {"m-Q8_0.gguf": b"eight", "m-Q4_K_M.gguf": CONTENT}
    hub.needs_token = True
    path = of(hub, tmp_path, "u/r", token=TOKEN)
    assert path.name == "m-Q4_K_M.gguf"
    assert path.read_bytes() == CONTENT
    assert len(hub.asked("GET")) == 2  # what there is, and the file
    assert of(hub, tmp_path, "u/r:q4_k_m", token=TOKEN) == path
    assert len(hub.asked("GET")) == 3  # what there is
    hub.log.clear()
    assert of(hub, tmp_path, "u/r", offline=True) == path
    assert hub.log == []
    assert of(hub, tmp_path, "u/r:Q8_0", token=TOKEN).read_bytes() == b"eight"
    said = "".join(capsys.readouterr())
    assert "downloading u/r/m-Q4_K_M.gguf of" in said
    assert TOKEN not in said


def test_an_interrupted_download_goes_on_where_it_was(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["u/r"] = {"m.gguf": CONTENT}
    hub.cut = 5000
    assert of(hub, tmp_path, "u/r").read_bytes() == CONTENT
    assert [entry[2] for entry in hub.asked("GET")[1:]] == ["", "bytes=5000-"]


def test_a_later_start_goes_on_with_what_an_earlier_one_left(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["u/r"] = {"m.gguf": CONTENT}
    hub.cut = 7000
    with monkeypatch.context() as patch:
        patch.setattr(download, "_Progress", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            of(hub, tmp_path, "u/r")
    assert of(hub, tmp_path, "u/r").read_bytes() == CONTENT
    assert hub.asked("GET")[-1][2] == "bytes=7000-"


class Interrupting(download._Progress):
    def show(self, have: int, size: int | None) -> None:
        if have:
            raise KeyboardInterrupt


def test_the_parts_of_a_split_model_come_together(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["u/r"] = {name: name.encode() for name in SPLIT}
    first = of(hub, tmp_path, "u/r")
    assert [first.with_name(name.rpartition("/")[2]).read_bytes() for name in SPLIT] == [n.encode() for n in SPLIT]


def test_content_that_is_not_what_the_hub_promised_is_not_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["u/r"] = {"m.gguf": CONTENT}
    hub.lie = CONTENT[::-1]
    with pytest.raises(CliError, match="does not have the checksum"):
        of(hub, tmp_path, "u/r")
    with pytest.raises(CliError, match="has never been downloaded"):
        of(hub, tmp_path, "u/r", offline=True)
    hub.lie = b""
    assert of(hub, tmp_path, "u/r").read_bytes() == CONTENT


def test_without_an_answer_the_downloaded_one_serves(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["u/r"] = {"m.gguf": CONTENT}
    path = of(hub, tmp_path, "u/r")
    hub.refusals["u/r"] = (503, "")
    assert of(hub, tmp_path, "u/r") == path
    with pytest.raises(CliError, match="answers 503"):
        of(hub, tmp_path, "u/r:Q8_0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert of(hub, tmp_path, "u/r") == path
    with pytest.raises(CliError, match=r"u/other: http://127.0.0.1:9 cannot be reached") as caught:
        of(hub, tmp_path, "u/other")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("refusal", "line"),
    [
        (None, "u/x is not at http://127.0.0.1:.* .a private one needs --hf-token"),
        ((403, "GatedRepo"), "u/x is gated: accept its terms at http://127.0.0.1:.*/u/x"),
        ((403, ""), "answers 403: the token is wrong"),
        ((400, ""), "answers 400"),
    ],
)
def test_refusals_are_one_line_without_the_token(
    hub: FakeHub, tmp_path: Path, refusal: tuple[int, str] | None, line: str
) -> None:
    if refusal is not None:
        hub.refusals["u/x"] = refusal
    with pytest.raises(CliError, match=line) as caught:
        of(hub, tmp_path, "u/x", token=TOKEN)
    assert TOKEN not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_token_stays_with_the_host_that_it_is_for(hub: FakeHub, tmp_path: Path) -> None:
    """A redirect to another host (here: another name of this machine) takes no secrets along."""
    hub.repos["x"] = {"m": CONTENT}
    away = hub.url.replace("127.0.0.1", "localhost") + "/x/resolve/main/m"

    class Redirect(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", away)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirect) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        start = f"http://127.0.0.1:{server.server_address[1]}/"
        download.fetch(start, tmp_path / "m", name="m", headers={"Authorization": f"Bearer {TOKEN}"})
    assert (tmp_path / "m").read_bytes() == CONTENT
    assert hub.log[-1][3] == ""


# --- the disk


def test_a_full_disk_is_told_before_and_while_writing(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["u/r"] = {"m.gguf": CONTENT}
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 99, 1))  # type: ignore[attr-defined]
        with pytest.raises(CliError, match=r"u/r/m.gguf: 10240 bytes are needed in .*, and 1 bytes are free"):
            of(hub, tmp_path, "u/r")
    if os.path.exists("/dev/full"):
        (tmp_path / "full").mkdir()
        part = tmp_path / "full" / f"m.{hashlib.sha256(b'v').hexdigest()[:12]}.part"
        part.symlink_to("/dev/full")
        with pytest.raises(CliError, match="no space left for it"):
            download.fetch(f"{hub.url}/u/r/resolve/main/m.gguf", tmp_path / "full" / "m", name="m", version="v")
    assert of(hub, tmp_path, "u/r").read_bytes() == CONTENT


def test_a_folder_that_cannot_be_made(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["u/r"] = {"m.gguf": CONTENT}
    (tmp_path / "file").write_text("")
    with pytest.raises(CliError, match="cannot be written to"):
        download.fetch(f"{hub.url}/u/r/resolve/main/m.gguf", tmp_path / "file" / "m", name="m")


def test_download_of_llama_cpp_is_used(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub_cache: HubCache
) -> None:
    hub.repos["u/r"] = {"m-Q8_0.gguf": CONTENT, "m-Q4_0.gguf": b"four", "mtp-m-Q8_0.gguf": b"head"}
    llama = tmp_path / "llama"
    there = add_to_hub_cache(llama, "u/r", "m-Q8_0.gguf", CONTENT)
    add_to_hub_cache(llama, "u/r", "m-Q4_0.gguf", b"an old version")
    head = add_to_hub_cache(llama, "u/r", "mtp-m-Q8_0.gguf", b"head")
    assert Hub().model(Repo("u/r", "Q8_0")) == there
    assert Hub().block(Repo("u/r"), there) == head
    newer = Hub().model(Repo("u/r", "Q4_0"))
    assert (newer.read_bytes(), newer.is_relative_to(tmp_path / "hub")) == (b"four", True)
    for other in (Hub(offline=True), Hub()):
        assert other.model(Repo("u/r", "Q8_0")) == there
        assert other.model(Repo("u/r", "Q4_0")) == newer
        assert other.block(Repo("u/r"), there) == head
        hub.refusals["u/r"] = 503, ""  # for the second
    with pytest.raises(CliError, match="u/r has no Q6_K; it has Q4_0"):
        Hub(offline=True).model(Repo("u/r", "Q6_K"))
    with pytest.raises(CliError, match="u/other has never been downloaded"):
        Hub(offline=True).model(Repo("u/other"))


# --- --model-url


def test_a_url_is_downloaded_once_and_again_when_it_changes(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    hub.repos["x"] = {"m.gguf": CONTENT}
    address = f"{hub.url}/x/resolve/main/m.gguf"
    path = model_source.of_url(address)
    assert (path.name, path.read_bytes()) == ("m.gguf", CONTENT)
    assert model_source.of_url(address) == path
    assert len(hub.asked("GET")) == 1
    hub.repos["x"]["m.gguf"] = b"new"
    assert model_source.of_url(address, offline=True).read_bytes() == CONTENT
    assert model_source.of_url(address).read_bytes() == b"new"
    with pytest.raises(CliError, match="the server answers 404"):
        model_source.of_url(f"{hub.url}/x/resolve/main/none.gguf")
    with pytest.raises(CliError, match=r"--offline: .* has never been downloaded"):
        model_source.of_url(f"{hub.url}/x/resolve/main/none.gguf", offline=True)
    hub.url = "http://127.0.0.1:9"
    with pytest.raises(CliError, match=r"http://127.0.0.1:9/m.gguf: cannot be reached") as caught:
        model_source.of_url("http://user:pass@127.0.0.1:9/m.gguf?key=secret")
    assert not re.search("pass|secret", str(caught.value))


def test_a_file_of_the_users_own_is_never_overwritten(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["x"] = {"m.gguf": CONTENT}
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(b"precious")
    with pytest.raises(CliError, match="is there already"):
        model_source.of_url(f"{hub.url}/x/resolve/main/m.gguf", mine)
    assert mine.read_bytes() == b"precious"


# --- a block beside a model


def test_a_block_is_brought_and_known_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["u/r"] = {"m-Q8_0.gguf": CONTENT, "mtp-m-Q8_0.gguf": CONTENT[::-1]}
    model = of(hub, tmp_path, "u/r:Q8_0")
    block = Hub(cache=tmp_path).block(Repo("u/r"), model)
    assert block is not None
    assert (block.name, block.read_bytes()) == ("mtp-m-Q8_0.gguf", CONTENT[::-1])
    assert of(hub, tmp_path, "u/r", offline=True).name == "m-Q8_0.gguf"
    assert Hub(cache=tmp_path, offline=True).block(Repo("u/r"), model) == block
    hub.refusals["u/r"] = 503, ""
    assert Hub(cache=tmp_path).block(Repo("u/r"), model) == block


def test_most_repositories_have_no_block(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["u/r"] = {"m-Q8_0.gguf": CONTENT}
    assert Hub(cache=tmp_path).block(Repo("u/r"), of(hub, tmp_path, "u/r")) is None
    assert Hub(cache=tmp_path, offline=True).block(Repo("u/r")) is None


@pytest.mark.parametrize("has_block", [True, False])
@pytest.mark.parametrize("flag", ["hf_repo", "hf_repo_draft"])
@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
def test_draft_mtp_looks_for_one(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_block: bool, flag: str, kind: str
) -> None:
    """Not where the model has a block itself, unless another repository is named."""
    monkeypatch.setattr("logitless.cli.hub.hub.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("logitless.cli.setup.model._has_mtp_head", lambda _: has_block)
    hub.repos["u/r"] = {"m-Q8_0.gguf": CONTENT, f"{kind}-m-Q8_0.gguf": CONTENT[::-1]}
    given = {"hf_repo": None, "hf_repo_draft": None} | {flag: Repo("u/r")}
    options = SimpleNamespace(**given, model_draft=None, spec_type=f"draft-{kind}", hf_token=None, offline=False)
    find_draft_model(options, Path("m-Q8_0.gguf"))
    if has_block and flag == "hf_repo" and kind == "mtp":
        assert options.model_draft is None
    else:
        assert Path(options.model_draft).name == f"{kind}-m-Q8_0.gguf"


def test_nothing_else_does(hub: FakeHub, tmp_path: Path) -> None:
    for kinds in ("none", "draft-simple", "draft-mtp,draft-simple"):
        options = SimpleNamespace(hf_repo=Repo("u/r"), hf_repo_draft=None, model_draft=None, spec_type=kinds)
        find_draft_model(options, tmp_path / "m.gguf")
        assert options.model_draft is None
    assert hub.log == []


# --- projectors


LARGE = "UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf"
BITS = ["mmproj-m-BF16.gguf", "mmproj-m-F16.gguf", "mmproj-m-F32.gguf", "mmproj-m-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("names", "model", "chosen"),
    [
        (BITS, "m-Q4_K_M.gguf", "mmproj-m-Q8_0.gguf"),  # the nearest number of bits
        (BITS, "m-F32.gguf", "mmproj-m-F32.gguf"),
        (BITS, "m-BF16.gguf", "mmproj-m-BF16.gguf"),
        (BITS[:3], "m-Q8_0.gguf", "mmproj-m-BF16.gguf"),  # of equal ones the first
        (BITS[1:3], LARGE, "mmproj-m-F16.gguf"),  # above it, too
        (["mmproj-F32.gguf", "UD-Q2_K_XL/mmproj-F32.gguf"], LARGE, "UD-Q2_K_XL/mmproj-F32.gguf"),  # rather beside it
        (["other/mmproj-F16.gguf", "mmproj-F16.txt", "m-F16.gguf"], "m-F16.gguf", ""),
        (["a/mmproj-F16.gguf"], "b/m-F16.gguf", ""),
        (["M.MMPROJ-f16.gguf"], "M.Q4_0.gguf", "M.MMPROJ-f16.gguf"),
        ([], "m.gguf", ""),
    ],
)
def test_projector_of_model_is_chosen(names: list[str], model: str, chosen: str) -> None:
    """llama.cpp's rule (common/download.cpp)."""
    assert choose_projector([*names, model], model) == chosen


def projecting(**given: Any) -> SimpleNamespace:
    usual = {"mmproj": None, "mmproj_url": None, "mmproj_auto": True, "hf_repo": None, "hf_token": None}
    return SimpleNamespace(**(usual | {"offline": False} | given))


def test_the_projector_comes_with_the_model(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logitless.cli.hub.hub.cache_folder", lambda: tmp_path)
    judged: list[str] = []

    def is_usable(projector: Path, path: Path) -> bool:
        judged.append(projector.name)
        return b"good" in projector.read_bytes()

    monkeypatch.setattr("logitless.cli.setup.model._is_usable", is_usable)
    hub.repos["u/r"] = {"q4/m-Q4_0.gguf": CONTENT, "mmproj-F16.gguf": b"good", "mmproj-F32.gguf": b"good too"}
    path = of(hub, tmp_path, "u/r")
    for options in (projecting(hf_repo=Repo("u/r"), mmproj_auto=False), projecting(hf_repo=Repo("u/r"), mmproj="x")):
        find_projector(options, path)
        assert options.mmproj in (None, "x")
    assert judged == []
    options = projecting(hf_repo=Repo("u/r"))
    find_projector(options, path)
    assert Path(options.mmproj).read_bytes() == b"good"
    hub.log.clear()
    for options in (
        projecting(hf_repo=Repo("u/r"), offline=True),
        projecting(),
    ):  # by its path alone, as a router's child
        find_projector(options, path)
        assert options.mmproj == str(path.parent.parent / "mmproj-F16.gguf")
    assert hub.log == []
    hub.repos["u/bad"] = {"m.gguf": b"m", "mmproj.gguf": b"bad"}
    options = projecting(hf_repo=Repo("u/bad"))
    find_projector(options, of(hub, tmp_path, "u/bad"))
    assert (options.mmproj, options.mmproj_auto) == (None, False)
    hub.repos["u/none"] = {"m.gguf": b"text"}
    options = projecting(hf_repo=Repo("u/none"))
    find_projector(options, of(hub, tmp_path, "u/none"))
    assert (options.mmproj, options.mmproj_auto) == (None, True)


def test_a_projector_of_an_address(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "_folder", lambda: tmp_path)
    hub.repos["x"] = {"mmproj.gguf": CONTENT}
    options = projecting(mmproj_url=f"{hub.url}/x/resolve/main/mmproj.gguf", mmproj_auto=False)
    find_projector(options, tmp_path / "m.gguf")
    assert Path(options.mmproj).read_bytes() == CONTENT
    with pytest.raises(UsageError, match="--mmproj and --mmproj-url: give one of them"):
        find_projector(projecting(mmproj_url=hub.url, mmproj="x"), tmp_path / "m.gguf")


def test_projectors_go_with_the_last_model(hub: FakeHub, tmp_path: Path) -> None:
    names = ["m-Q4_0.gguf", "m-Q8_0.gguf", "mmproj-F16.gguf"]
    paths = [add_to_hub_cache(tmp_path, "u/r", name) for name in names]
    for repo, rest in (("u/r:Q4_0", [False, True, True]), ("u/r:Q8_0", [False, False, False])):
        CachedFile(tmp_path, Repo.parse(repo)).remove()
        assert [path.exists() for path in paths] == rest


# --- repositories of config.json and safetensors


def test_repository_without_gguf_files_is_downloaded_as_a_folder(hub: FakeHub, tmp_path: Path) -> None:
    source, cache = write_folder(tmp_path / "source", "qwen2"), tmp_path / "cache"
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    hub.repos["u/r"] = {**files, "README.md": b"", "consolidated.safetensors": b"", "adapter_model.safetensors": b""}
    hub.cut = 1000  # a transfer breaks off once, and goes on
    folder = of(hub, cache, "u/r")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    with GGUFFile.open(folder) as gguf:
        assert gguf.metadata["general.name"] == "r"
    assert of(hub, cache, "u/r", offline=True) == folder
    cached = CachedFile(cache, Repo("u/r"))
    assert cached.whole_folder() == folder
    cached.remove()
    assert cached.whole_folder() is None
    assert list((cached.folder / "blobs").iterdir()) == []


def test_folder_of_an_unknown_architecture_is_refused_before_its_weights(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["u/r"] = {"config.json": b'{"architectures": ["Foo"]}', "model.safetensors": CONTENT}
    with pytest.raises(ModelFileError, match="Hugging Face architecture 'Foo' is not supported"):
        of(hub, tmp_path, "u/r")
    assert not any("model.safetensors" in path for _, path, _, _ in hub.log)


def test_gguf_files_come_before_safetensors() -> None:
    kimi = ["config.json", "model.safetensors", "modeling_deepseek.py", "tiktoken.model"]
    assert choose_folder(kimi) == ["config.json", "tiktoken.model", "model.safetensors"]
    folder = ["config.json", "model.safetensors", "tokenizer.json", "model-00001-of-00002.safetensors"]
    assert choose_folder(folder) == ["config.json", "tokenizer.json", "model.safetensors"]
    pooled = [*folder, "1_Pooling/config.json", "2_Dense/config.json", "onnx/model.safetensors"]
    modules = ["1_Pooling/config.json", "2_Dense/config.json"]  # the folder is refused for the second one
    assert choose_folder(pooled) == ["config.json", *modules, "tokenizer.json", "model.safetensors"]
    assert choose_folder([*folder, "m-Q8_0.gguf"]) == []
    assert choose_folder(["config.json", "x/model.safetensors"]) == []
