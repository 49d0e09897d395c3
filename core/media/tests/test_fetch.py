"""From URLs to bytes: what is refused, which limits hold, and that an address is checked before it
is used."""

from __future__ import annotations

import base64
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegboard.errors import RequestError
from pegboard.interfaces.multimodal_processor import MediaReaderSetup, MediaSource
from pegboard_media import Reader, data_url, local_file, web
from pegboard_media.addresses import is_public
from pegboard_media.fetch import Fetcher
from pegboard_media.limits import Unusable

PUBLIC = "93.184.216.34"
Answer = Callable[[socket.socket, threading.Event], None]


def ok(body: bytes = b"picture", *headers: str) -> Answer:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", ""]
    return sends("\r\n".join(lines).encode() + body)


def sends(content: bytes) -> Answer:
    return lambda connection, stop: connection.sendall(content)


def redirect(target: str, status: int = 302) -> Answer:
    return sends(f"HTTP/1.1 {status} Found\r\nLocation: {target}\r\n\r\n".encode())


def forever(start: bytes, part: bytes, seconds: float = 0) -> Answer:
    def send(connection: socket.socket, stop: threading.Event) -> None:
        connection.sendall(start)
        while not stop.wait(seconds):
            connection.sendall(part)

    return send


class Host:
    """A server on this machine. answers: path → what it sends. requests: what came."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[str] = []
        self.addresses: list[str] = []
        self._tls = tls
        self._stop = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def connect(self, address: str, port: int, seconds: float) -> socket.socket:
        """Reach this server, whatever the address."""
        self.addresses.append(address)
        return socket.create_connection(("127.0.0.1", self.port), seconds)

    def close(self) -> None:
        self._stop.set()
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                if self._stop.is_set():
                    return
                with suppress(OSError):  # the client has gone
                    self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        if self._tls is None:
            self._speak(connection)
            return
        with self._tls.wrap_socket(connection, server_side=True) as secure:
            self._speak(secure)

    def _speak(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            part = connection.recv(4096)
            if not part:
                return
            head += part
        self.requests.append(head.decode())
        self.answers[head.split()[1].decode()](connection, self._stop)


@pytest.fixture
def host() -> Iterator[Host]:
    server = Host()
    yield server
    server.close()


def names(**addresses: Sequence[str]) -> web.Resolve:
    """Look up names with "_" for "."; others do not exist."""

    def resolve(name: str, port: int) -> Sequence[str]:
        try:
            return addresses[name.replace(".", "_")]
        except KeyError:
            raise socket.gaierror("no such name") from None

    return resolve


GOOD = names(good_test=[PUBLIC], evil_test=["10.0.0.7"])


def fetch(url: str, host: Host, resolve: web.Resolve = GOOD, domains: Sequence[str] = ()) -> bytes:
    return Fetcher(MediaReaderSetup(domains=domains), resolve, host.connect).fetch(url)


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "127.0.0.1",
        "127.255.255.254",
        "169.254.169.254",
        "172.31.0.1",
        "192.0.0.8",
        "192.168.1.1",
        "198.18.0.1",
        "203.0.113.9",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:a00:1",
        "64:ff9b::7f00:1",
        "64:ff9b::169.254.169.254",
        "64:ff9b:1::5db8:d822",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "3fff::1",
        "fc00::1",
        "fd12::1",
        "fe80::1",
        "fe80::1%eth0",
        "fec0::1",
        "ff02::1",
        "localhost",
        "",
    ],
)
def test_these_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", [PUBLIC, "1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_these_are_public(address: str) -> None:
    assert is_public(address)


@given(st.integers(0, 2**32 - 1))
def test_an_address_in_ipv6_form_is_as_public_as_itself(number: int) -> None:
    address = IPv4Address(number)
    expected = is_public(str(address))
    assert is_public(str(IPv6Address((0xFFFF << 32) + number))) == expected
    assert is_public(str(IPv6Address((0x64FF9B << 96) + number))) == expected
    if address.is_private or address.is_loopback or address.is_multicast or address.is_reserved:
        assert not expected


# --- which hosts are asked ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://0/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://[64:ff9b::127.0.0.1]/",
        "http://[fe80::1]/",
        "http://[::]/",
        "http://169.254.169.254/latest/meta-data/",
        "https://10.0.0.1/",
        "HTTP://127.0.0.1/",
        "http://127.0.0.1./",
    ],
)
def test_numeric_hosts_that_are_not_public_are_refused(url: str, host: Host) -> None:
    with pytest.raises(Unusable, match="may not be fetched"):
        fetch(url, host, web.resolve_name)
    assert not host.addresses


@pytest.mark.parametrize(
    "url",
    [
        "http://evil.test/",
        "http://missing.test/",
        "http://user@good.test/",
        "http://user:word@good.test/",
        "http://good.test@evil.test/",
        "http://good.test:0/",
        "http://good.test:65536/",
        "http://good.test:-1/",
        "http://good.test:x/",
        "http:///path",
        "http://",
        "http:good.test/",
        "http://good.test\\@evil.test/",
        "http://good.test/a b",
        "http://good.test/\r\nHost: evil.test",
        "http://good.test/\x00",
        "http://[good.test/",
        "http://" + "a" * 70 + ".test/",
        "http://\ud800.test/",
        "http://good.test/" + "a" * 9000,
    ],
)
def test_urls_that_are_refused(url: str, host: Host) -> None:
    with pytest.raises(Unusable) as error:
        fetch(url, host)
    assert str(error.value) == web.REFUSED
    assert not host.addresses


@pytest.mark.parametrize("url", ["ftp://good.test/", "gopher://a", "//good.test/", "", "a", "x:"])
def test_other_schemes_are_refused(url: str, host: Host) -> None:
    with pytest.raises(Unusable, match="expected data:, http:, https: or file:"):
        fetch(url, host)


def test_one_private_address_among_public_ones_is_enough(host: Host) -> None:
    with pytest.raises(Unusable, match="may not be fetched"):
        fetch("http://good.test/", host, names(good_test=[PUBLIC, "192.168.0.1"]))
    with pytest.raises(Unusable, match="may not be fetched"):
        fetch("http://good.test/", host, names(good_test=[]))
    assert not host.addresses


def test_a_name_is_looked_up_once_and_its_checked_address_is_used(host: Host) -> None:
    host.answers["/a"] = ok()
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    assert fetch("http://good.test/a", host, lambda name, port: next(answers)) == b"picture"
    assert host.addresses == [PUBLIC]
    assert next(answers) == ["127.0.0.1"]
    assert "\r\nHost: good.test\r\n" in host.requests[0]


def test_the_next_address_is_tried(host: Host) -> None:
    host.answers["/a"] = ok()

    def connect(address: str, port: int, seconds: float) -> socket.socket:
        if address == PUBLIC:
            raise ConnectionRefusedError
        return host.connect(address, port, seconds)

    resolve = names(good_test=[PUBLIC, "1.1.1.1"])
    assert web.Web((), resolve, connect).fetch("http://good.test/a") == b"picture"
    assert host.addresses == ["1.1.1.1"]


def test_the_host_header_and_the_target(host: Host) -> None:
    host.answers["/a%20%C3%A4?b=1&c=%C3%A4"] = ok()
    assert fetch("http://GOOD.test.:8080/a%20ä?b=1&c=ä#end", host) == b"picture"
    assert "\r\nHost: good.test:8080\r\n" in host.requests[0]
    host.answers["/"] = ok()
    assert fetch("http://[2606:4700::1111]", host, lambda name, port: [name]) == b"picture"
    assert "\r\nHost: [2606:4700::1111]\r\n" in host.requests[1]


def test_domains_name_the_hosts_that_may_be_asked(host: Host) -> None:
    host.answers["/a"] = ok()
    assert fetch("http://evil.test/a", host, domains=["Evil.Test"]) == b"picture"
    assert host.addresses == ["10.0.0.7"]
    for url in ("http://good.test/a", "http://sub.evil.test/a", "http://evil.test.com/a"):
        with pytest.raises(Unusable, match="may not be fetched"):
            fetch(url, host, domains=["evil.test"])
    assert len(host.addresses) == 1


@pytest.mark.parametrize("name", ["http_proxy", "all_proxy", "HTTP_PROXY"])
def test_proxies_are_not_used(name: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    host.answers["/a"] = ok()
    assert fetch("http://good.test/a", host) == b"picture"


# --- redirects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", sorted(web.REDIRECTS))
def test_redirects_are_followed(status: int, host: Host) -> None:
    host.answers["/a"] = redirect("/b", status)
    host.answers["/b"] = redirect("http://good.test/c", status)
    host.answers["/c"] = ok()
    assert fetch("http://good.test/a", host) == b"picture"


@pytest.mark.parametrize(
    "target",
    [
        "http://evil.test/",
        "//evil.test/",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://user@good.test/",
        "file:///etc/passwd",
        "data:,x",
        "ftp://good.test/",
    ],
)
def test_each_redirect_is_checked(target: str, host: Host) -> None:
    host.answers["/a"] = redirect(target)
    numeric = {"127.0.0.1": ["127.0.0.1"], "::1": ["::1"]}
    with pytest.raises(Unusable, match="may not be fetched"):
        fetch("http://good.test/a", host, lambda name, port: numeric.get(name) or GOOD(name, port))
    assert host.addresses == [PUBLIC]


def test_a_redirect_out_of_the_domains_is_refused(host: Host) -> None:
    host.answers["/a"] = redirect("http://good.test/b")
    with pytest.raises(Unusable, match="may not be fetched"):
        fetch("http://evil.test/a", host, domains=["evil.test"])


def test_a_name_that_changes_between_redirects_is_refused(host: Host) -> None:
    host.answers["/a"] = redirect("/a")
    answers = iter([[PUBLIC], ["127.0.0.1"]])
    with pytest.raises(Unusable, match="may not be fetched"):
        fetch("http://good.test/a", host, lambda name, port: next(answers))


def test_too_many_redirects(host: Host) -> None:
    host.answers["/a"] = redirect("/a")
    with pytest.raises(Unusable, match="could not be fetched"):
        fetch("http://good.test/a", host)
    assert len(host.requests) == 6


# --- what comes back ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1 500 Error\r\nContent-Length: 1\r\n\r\na",
        b"HTTP/1.1 206 Partial\r\nContent-Length: 1\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nab",
        b"HTTP/1.1 302 Found\r\nLocation: http://[\r\n\r\n",
    ],
)
def test_all_failures_have_one_message(answer: bytes, host: Host) -> None:
    host.answers["/a"] = sends(answer)
    with pytest.raises(Unusable) as error:
        fetch("http://good.test/a", host)
    assert str(error.value) in (web.FAILED, web.REFUSED)


def test_a_closed_port_has_the_message_of_failures() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    fetcher = Fetcher(MediaReaderSetup(domains=["127.0.0.1"]))
    with pytest.raises(Unusable) as error:
        fetcher.fetch(f"http://127.0.0.1:{port}/")
    assert str(error.value) == web.FAILED


def test_bodies_of_all_forms(host: Host) -> None:
    chunked = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    )
    host.answers["/chunked"] = sends(chunked)
    host.answers["/open"] = sends(b"HTTP/1.0 200 OK\r\n\r\nabcde")
    host.answers["/long"] = ok(b"a" * 300_000)
    host.answers["/lies"] = sends(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcde")
    assert fetch("http://good.test/chunked", host) == b"abcde"
    assert fetch("http://good.test/open", host) == b"abcde"
    assert fetch("http://good.test/long", host) == b"a" * 300_000
    assert fetch("http://good.test/lies", host) == b"abc"


@pytest.mark.parametrize(
    "start",
    [
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_a_body_is_counted_while_it_comes(
    start: bytes, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "MAX_BYTES", 10_000)
    host.answers["/a"] = forever(start, b"x" * 4096)
    with pytest.raises(Unusable, match="larger than 10000 bytes"):
        fetch("http://good.test/a", host)


@pytest.mark.parametrize("part", [b"A: b\r\n", b"a", b"A: " + b"b" * 4000 + b"\r\n"])
def test_headers_are_counted(part: bytes, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MAX_HEADER_BYTES", 10_000)
    host.answers["/a"] = forever(b"HTTP/1.1 200 OK\r\n", part)
    with pytest.raises(Unusable, match="could not be fetched"):
        fetch("http://good.test/a", host)


def test_interim_answers_are_counted(host: Host) -> None:
    host.answers["/a"] = forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n")
    with pytest.raises(Unusable, match="could not be fetched"):
        fetch("http://good.test/a", host)


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_drips_is_cut_off(
    start: bytes, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "MAX_FETCH_SECONDS", 0.3)
    host.answers["/a"] = forever(start, b"a", 0.01)
    with pytest.raises(Unusable, match="could not be fetched"):
        fetch("http://good.test/a", host)


def test_tls_is_spoken_with_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make certificates")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=good.test -addext"
    subprocess.run(
        ["openssl", *words.split(), "subjectAltName=DNS:good.test", "-keyout", key]
        + ["-out", certificate],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = Host(context)
    try:
        server.answers["/a"] = ok()
        with pytest.raises(Unusable, match="could not be fetched"):
            fetch("https://good.test/a", server)  # nobody has signed it
        trusting = ssl.create_default_context(cafile=str(certificate))
        monkeypatch.setattr(web, "tls", lambda: trusting)
        assert fetch("https://good.test/a", server) == b"picture"
        with pytest.raises(Unusable, match="could not be fetched"):
            fetch("https://other.test/a", server, names(other_test=[PUBLIC]))
    finally:
        server.close()
    assert "\r\nHost: good.test\r\n" in server.requests[0]


def test_errors_name_no_address_and_little_of_the_url(host: Host) -> None:
    reader = Reader(MediaReaderSetup(), GOOD, host.connect)
    url = "http://evil.test/" + "secret" * 50
    with pytest.raises(RequestError) as error:
        reader.read(MediaSource(modality="image", value=url, path="messages[0]"))
    assert error.value.parameter == "messages[0]"
    assert "10.0.0.7" not in str(error.value)
    assert url[:61] not in str(error.value)


# --- data: ----------------------------------------------------------------------------------------


@given(st.binary(max_size=200), st.sampled_from(["", "image/png", "text/plain;charset=utf-8"]))
def test_data_urls(content: bytes, media_type: str) -> None:
    fetcher = Fetcher(MediaReaderSetup())
    encoded = base64.b64encode(content).decode()
    assert fetcher.fetch(f"data:{media_type};base64,{encoded}") == content
    assert fetcher.fetch(f"DATA:{media_type};BASE64,{quote(encoded)}") == content
    assert fetcher.fetch(f"data:{media_type},{quote(content)}") == content


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:image/png;base64",
        "data:image/png;base64,a",
        "data:;base64,a*==",
        "data:;base64,YQ==YQ==",
        "data:a b/c,x",
        "data:image,x",
        "data:image/png;x,y",
        "data:" + "a" * 2000 + "/b,x",
    ],
)
def test_damaged_data_urls(url: str) -> None:
    with pytest.raises(Unusable, match="data"):
        Fetcher(MediaReaderSetup()).fetch(url)


@pytest.mark.parametrize("url", ["data:," + "a" * 40, "data:;base64," + "YWFh" * 10])
def test_data_urls_are_limited(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_url, "MAX_BYTES", 20)
    with pytest.raises(Unusable, match="larger than 20 bytes"):
        Fetcher(MediaReaderSetup()).fetch(url)


# --- file: ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that may be read, beside files that may not be."""
    (tmp_path / "open" / "deep").mkdir(parents=True)
    (tmp_path / "open" / "a ä?.png").write_bytes(b"a")
    (tmp_path / "open" / "deep" / "b").write_bytes(b"b")
    (tmp_path / "open2").mkdir()
    for name in ("secret", "open2/secret"):
        (tmp_path / name).write_bytes(b"secret")
    (tmp_path / "open" / "inner").symlink_to("deep/b")
    (tmp_path / "open" / "outer").symlink_to("../secret")
    (tmp_path / "open" / "up").symlink_to("..")
    (tmp_path / "open" / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "open" / "pipe")
    return tmp_path / "open"


def local(folder: Path, name: str) -> bytes:
    url = f"file://{quote(str(folder))}/{name}"
    return Fetcher(MediaReaderSetup(local_path=str(folder))).fetch(url)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (quote("a ä?.png"), b"a"),
        ("deep/b", b"b"),
        ("deep/../deep/b", b"b"),
        ("%64eep/b", b"b"),
        ("inner", b"b"),
    ],
)
def test_files_below_the_folder(folder: Path, name: str, content: bytes) -> None:
    assert local(folder, name) == content


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "deep",
        "missing",
        "../secret",
        "..%2fsecret",
        "%2e%2e/secret",
        "deep/../../secret",
        "../open2/secret",
        "outer",
        "up/secret",
        "loop",
        "pipe",
        "inner%00",
        "%ff%fe",
        "deep/b/c",
    ],
)
def test_files_that_may_not_be_read(folder: Path, name: str) -> None:
    with pytest.raises(Unusable) as error:
        local(folder, name)
    assert str(error.value) == "is not a file that this server may read"


@pytest.mark.parametrize(
    "url", ["file://host{0}/deep/b", "file:deep/b", "file://user@localhost{0}/deep/b", "file://["]
)
def test_file_urls_are_local_and_absolute(folder: Path, url: str) -> None:
    with pytest.raises(Unusable, match="is not a file"):
        Fetcher(MediaReaderSetup(local_path=str(folder))).fetch(url.format(folder))


def test_the_folder_may_be_a_link(folder: Path) -> None:
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert local(link, "deep/b") == b"b"


def test_no_file_is_read_without_a_folder(folder: Path) -> None:
    with pytest.raises(Unusable, match="--allowed-local-media-path"):
        Fetcher(MediaReaderSetup()).fetch(f"file://{folder}/deep/b")


def test_files_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_file, "MAX_BYTES", 3)
    (folder / "long").write_bytes(b"abcd")
    with pytest.raises(Unusable, match="larger than 3 bytes"):
        local(folder, "long")


@pytest.mark.parametrize("name", ["deep/b", "deep"])
def test_a_link_that_is_put_there_late_is_not_followed(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = folder / "deep" / "b"

    def resolve(path: Path, strict: bool = False) -> Path:
        """Say where the path is, and then swap a part of it for a link to the outside."""
        if path == target:
            swapped = folder / name
            shutil.move(swapped, folder.parent / "moved")
            swapped.symlink_to(folder.parent / ("secret" if name == "deep/b" else "open2"))
        return path

    (folder.parent / "open2" / "b").write_bytes(b"secret")
    monkeypatch.setattr(Path, "resolve", resolve)
    with pytest.raises(Unusable, match="is not a file"):
        local(folder, "deep/b")


def test_a_look_up_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the time of the fetch, and says no more than for an unknown host."""
    monkeypatch.setattr(web, "MAX_FETCH_SECONDS", 0.2)
    asked = threading.Event()
    ends = threading.Event()

    def resolve(name: str, port: int) -> Sequence[str]:
        asked.set()
        ends.wait(30)
        return [PUBLIC]

    def connect(*_: object) -> socket.socket:
        raise AssertionError("nothing may be asked")

    with pytest.raises(web.Unusable, match="may not be fetched"):
        web.Web((), resolve, connect).fetch("http://good.test/a")
    assert asked.is_set()
    ends.set()
