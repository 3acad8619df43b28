"""A download is whole and right or not there, and goes on where it was cut; an archive stays in its folder."""

import hashlib
import io
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from speech_mt.data import download as module
from speech_mt.data.download import download, unpack
from speech_mt.errors import InputError

CONTENT = bytes(range(256)) * 40
SHA256 = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    """Sends CONTENT; the test says after how many bytes to cut a connection, and whether ranges are known."""

    cut_after: list[int] = []  # of the next connections
    ranges = True
    asked: list[str | None] = []
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        asked = self.headers.get("Range")
        self.asked.append(asked)
        if self.path == "/missing":
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        if start >= len(CONTENT):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        end = start + self.cut_after.pop(0) if self.cut_after else len(CONTENT)
        self.wfile.write(CONTENT[start:end])
        self.close_connection = True

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE_S", 0)
    monkeypatch.setattr(Handler, "cut_after", [])
    monkeypatch.setattr(Handler, "asked", [])
    monkeypatch.setattr(Handler, "ranges", True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_cut_connection_is_taken_up_where_it_was(server, tmp_path):
    Handler.cut_after = [3000, 500]
    path = download(f"{server}/a", tmp_path / "deeper" / "a.bin", SHA256)
    assert path.read_bytes() == CONTENT
    assert Handler.asked == [None, "bytes=3000-", "bytes=3500-"]
    assert [file.name for file in path.parent.iterdir()] == ["a.bin"]


def test_a_later_call_goes_on_from_what_came(server, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_ATTEMPTS", 1)
    Handler.cut_after = [4000, 0]
    with pytest.raises(InputError, match=r"cut at 4,000 bytes; run this again"):
        download(f"{server}/a", tmp_path / "a.bin", SHA256)
    assert not (tmp_path / "a.bin").exists()
    assert download(f"{server}/a", tmp_path / "a.bin", SHA256).read_bytes() == CONTENT
    assert Handler.asked == [None, "bytes=4000-", "bytes=4000-"]


def test_a_server_without_ranges_sends_all_of_it_again(server, tmp_path):
    Handler.ranges = False
    Handler.cut_after = [3000]
    assert download(f"{server}/a", tmp_path / "a.bin", SHA256).read_bytes() == CONTENT


def test_all_of_it_had_come_before(server, tmp_path):
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    assert download(f"{server}/a", tmp_path / "a.bin", SHA256).read_bytes() == CONTENT
    assert Handler.asked == [f"bytes={len(CONTENT)}-"]


def test_what_is_there_is_not_fetched_again(server, tmp_path):
    for _ in range(2):
        download(f"{server}/a", tmp_path / "a.bin", f"md5:{hashlib.md5(CONTENT).hexdigest()}")
    assert Handler.asked == [None]


def test_another_checksum_is_refused_and_nothing_is_left(server, tmp_path):
    with pytest.raises(InputError, match=rf"a\.bin.*is {SHA256[7:]}, expected 00; it was deleted"):
        download(f"{server}/a", tmp_path / "a.bin", "sha256:00")
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_there_is_no_reason_to_try_again(server, tmp_path):
    with pytest.raises(InputError, match=r"/missing: the server answers 404 Not Found"):
        download(f"{server}/missing", tmp_path / "a.bin")
    assert len(Handler.asked) == 1
    with pytest.raises(InputError, match="ftp://x/y: not an address"):
        download("ftp://x/y", tmp_path / "a.bin")


def archive(path, *members):
    with tarfile.open(path, "w:gz") as tar:
        for member, content in members:
            info = tarfile.TarInfo(member) if isinstance(member, str) else member
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def link(target, kind):
    info = tarfile.TarInfo("inside/link")
    info.type, info.linkname = kind, target
    return info


def test_unpack(tmp_path):
    path = archive(tmp_path / "a.tar.gz", ("LibriSpeech/README.TXT", b"one"), ("LibriSpeech/x/y.txt", b"two"))
    folder = unpack(path, tmp_path / "out")
    assert (folder / "LibriSpeech" / "x" / "y.txt").read_bytes() == b"two"
    path.unlink()
    assert unpack(path, folder) == folder  # it is there already


@pytest.mark.parametrize(
    "escape",
    [
        ("../escaped.txt", b"x"),
        (link("../../escaped.txt", tarfile.SYMTYPE), b""),
        (link("/etc/x", tarfile.LNKTYPE), b""),
    ],
)
def test_a_member_outside_the_folder_is_refused_and_nothing_is_left(tmp_path, escape):
    path = archive(tmp_path / "a.tar.gz", ("inside/good.txt", b"x"), escape)
    with pytest.raises(InputError, match=r"a\.tar\.gz: refused, since it would write outside"):
        unpack(path, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["a.tar.gz"]


@pytest.mark.parametrize("damage", [lambda content: content[:200], lambda content: b"no archive", lambda content: b""])
def test_a_damaged_archive_leaves_nothing(tmp_path, damage):
    path = archive(tmp_path / "a.tar.gz", ("a.txt", bytes(range(256)) * 100))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=r"a\.tar\.gz: not a tar archive, or a damaged one"):
        unpack(path, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["a.tar.gz"]
