"""Where the daemon listens: a port or a Unix socket, with TLS or without.

Knows sockets and certificates. Does not know what is served.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import socket
import ssl
import stat

import structlog

from skippy_sched.config import ServerSection
from skippy_sched.errors import AddressUnavailable, ConfigError

log = structlog.get_logger("skippy_sched.daemon")

#: Connections that the kernel holds while the loop is busy.
BACKLOG = 2048
#: Files that are not connections: the model, the log, sockets of our own, and connections that
#: are over the limit and still have to be told so.
OTHER_FILES = 320


def listen(section: ServerSection) -> socket.socket:
    """A listening socket; raises AddressUnavailable.

    Made before anything is loaded, so that a port in use is known at once.
    """
    if section.unix_socket is not None:
        return _listen_unix(section.unix_socket, int(section.unix_socket_mode, 8))
    host, port = section.host, section.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise AddressUnavailable(
            f"no such address {host!r} (server.host): {error.strerror}"
        ) from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressUnavailable(f"cannot listen on {host}:{port}: {_why(error)}") from error
    return listener


def _listen_unix(path: str, mode: int) -> socket.socket:
    """What a daemon that was killed has left there is taken away."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o777 & ~mode)
    try:
        _remove_abandoned(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        raise AddressUnavailable(f"cannot listen on {path} (server.unix_socket): {why}") from error
    finally:
        os.umask(before)
    return listener


def _remove_abandoned(path: str) -> None:
    """Remove a socket on which nobody listens; raises OSError for one in use."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EEXIST, "there is a file that is no socket; choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)
        if client.connect_ex(path) != errno.ECONNREFUSED:
            raise OSError(errno.EADDRINUSE, "it is in use; stop the other process")
    os.unlink(path)


def remove(section: ServerSection) -> None:
    """Take a Unix socket's file away at the end; a port needs nothing."""
    if section.unix_socket is not None:
        with contextlib.suppress(OSError):
            os.unlink(section.unix_socket)


def _why(error: OSError) -> str:
    hints = {
        errno.EADDRINUSE: "it is in use; stop the other process or choose another --port",
        errno.EACCES: "not allowed; ports below 1024 need privileges, choose another --port",
        errno.EADDRNOTAVAIL: "this machine does not have that address; choose another --host",
    }
    return hints.get(error.errno or 0, str(error.strerror))


def url(listener: socket.socket, section: ServerSection) -> str:
    """How clients write it; a Unix socket as ``unix:/path``."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    scheme = "http" if section.tls_cert is None else "https"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_local(listener: socket.socket) -> bool:
    """Whether only this machine reaches it."""
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


def tls_context(section: ServerSection) -> ssl.SSLContext | None:
    """None without TLS; raises ConfigError. TLS 1.2 or later."""
    if section.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    load_certificate(context, section)
    return context


def load_certificate(context: ssl.SSLContext, section: ServerSection) -> None:
    """New connections get it; raises ConfigError, and then the former one stays."""
    cert, key = section.tls_cert, section.tls_key
    assert cert is not None
    assert key is not None

    def no_password() -> bytes:
        raise ConfigError(f"server.tls_key: {key} is encrypted; give the key unencrypted")

    for name, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"server.{name}: cannot read {path}: {error.strerror}") from None
    try:
        # A pair that does not match must not reach the context that serves.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, no_password)
        context.load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        reason = error.reason or str(error)
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = "the key is not the certificate's"
        raise ConfigError(
            f"server.tls_cert, server.tls_key: cannot use {cert} with {key}: {reason}; "
            "both must be PEM files"
        ) from None


def make_room(connections: int) -> int:
    """How many connections there can be: as many as wanted if the process may have the files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == wanted:
        return connections
    possible = max(1, soft - OTHER_FILES)
    log.warning(
        "fewer_connections",
        connections_max=possible,
        hint=f"this process may open {soft} files only; raise its limit (LimitNOFILE= in systemd), "
        "or lower server.connections_max",
    )
    return possible
