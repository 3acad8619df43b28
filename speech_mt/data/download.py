"""Fetch a file that may take hours, and unpack an archive that may not be trusted."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import time
import zlib
from http.client import HTTPException, HTTPResponse
from lzma import LZMAError
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tqdm import tqdm

from speech_mt.errors import InputError

_BLOCK = 2**20
_TIMEOUT_S = 60
_ATTEMPTS = 5  # in a row that bring nothing
_PAUSE_S = 2.0
_PASSING = {429, 500, 502, 503, 504}  # answers of a busy server
_REQUESTED_RANGE_NOT_SATISFIABLE = 416


def download(url: str, path: Path, checksum: str | None = None) -> Path:
    """Fetch ``url`` to ``path``, which appears only when it is whole and its checksum is right.

    What has come is kept in ``path`` + ``.part``: a cut connection is taken up where it was, at once and by a
    later call. A file that is there already is not fetched again.

    Args:
        url: http or https.
        path: the file to write.
        checksum: the name of a hash, a colon and its hexadecimal digest, such as ``sha256:...`` or
            ``md5:...``; None takes whatever comes.

    Returns:
        ``path``.

    Raises:
        InputError: the server refuses or cannot be reached, or the file has another checksum; it is deleted
            then.
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{url}: not an address that begins with http:// or https://")
    if path.exists():
        _check(path, url, checksum)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    failures = 0
    with tqdm(unit="B", unit_scale=True, desc=path.name, mininterval=1) as progress:
        while True:
            before = _size(part)
            try:
                if _fetch(url, part, progress):
                    break
                reason = f"the connection was cut at {_size(part):,} bytes"
            except HTTPError as error:
                reason = f"the server answers {error.code} {error.reason}"
                if error.code not in _PASSING:
                    raise InputError(f"{url}: {reason}") from None
            except (OSError, HTTPException) as error:
                if getattr(error, "filename", None):  # of the disk, not of the network
                    raise
                reason = str(getattr(error, "reason", error))
            failures = failures + 1 if _size(part) <= before else 0
            if failures >= _ATTEMPTS:
                raise InputError(f"{url}: {reason}; run this again to go on from there")
            time.sleep(_PAUSE_S)
    _check(part, url, checksum)
    os.replace(part, path)
    return path


def _fetch(url: str, part: Path, progress: tqdm) -> bool:
    """Append to ``part`` what is missing; return whether it is whole now."""
    start = _size(part)
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            resumed = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
            if not resumed:  # the server sends all of it
                start = 0
            total = _total(response, start)
            progress.total = total
            progress.update(start - progress.n)
            with open(part, "ab" if resumed else "wb") as file:
                while block := response.read(_BLOCK):
                    file.write(block)
                    progress.update(len(block))
    except HTTPError as error:
        if error.code == _REQUESTED_RANGE_NOT_SATISFIABLE and start:
            if error.headers.get("Content-Range") == f"bytes */{start}":
                return True  # all of it came before
            part.unlink()  # not a part of that file
            return False
        raise
    return total is None or _size(part) == total


def _total(response: HTTPResponse, start: int) -> int | None:
    """The size of the whole file, if the server tells."""
    length = response.headers.get("Content-Length")
    return None if length is None else start + int(length)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check(path: Path, url: str, checksum: str | None) -> None:
    """Compare and, if another file came, delete it: nothing of it can be used."""
    if checksum is None:
        return
    name, _, expected = checksum.partition(":")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, name).hexdigest()
    if found != expected:
        path.unlink()
        raise InputError(
            f"{path}: the {name} of what came from {url} is {found}, expected {expected}; it was deleted: "
            "run this again, and if that does not help, fetch the file from another mirror"
        )


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a tar archive, compressed or not, to ``folder``, which appears whole or not at all.

    Members that would land outside the folder, links that point outside, and devices are refused (the filter
    ``data`` of Python's tarfile).

    Returns:
        ``folder``. If it is there already, nothing is done.

    Raises:
        InputError: it is no tar archive, or damaged, or holds such a member.
    """
    if folder.exists():
        return folder
    temporary = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with tarfile.open(archive) as tar, tqdm(tar, unit=" files", desc=archive.name, mininterval=1) as members:
            for member in members:
                tar.extract(member, temporary, filter="data")
                tar.members.clear()  # it would keep every member of the archive in memory
        os.replace(temporary, folder)
    except tarfile.FilterError as error:
        raise InputError(f"{archive}: refused, since it would write outside its folder: {error}") from None
    except (tarfile.TarError, EOFError, zlib.error, LZMAError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of the archive
            raise
        raise InputError(f"{archive}: not a tar archive, or a damaged one ({error}); fetch it again") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
