"""A command on its way through a socket, for tests in one thread."""

from __future__ import annotations

import json
import os
import socket

from vllm_tide.transport.admin import sockets


class Command:
    """A command to the process with a socket in a folder; it waits for nothing.

    Args:
        name: Of the socket's file, if there are several.
    """

    def __init__(self, folder, name="", /, kind="trainer", **request):
        paths = sockets([folder], kind)
        (path,) = [paths[name]] if name else paths.values()
        self._client, self._received = socket.socket(socket.AF_UNIX), b""
        fd = os.open(path.parent, os.O_RDONLY)
        self._client.connect(f"/proc/self/fd/{fd}/{path.name}")
        os.close(fd)
        self._client.sendall(json.dumps(request).encode() + b"\n")
        self._client.setblocking(False)

    @property
    def answer(self):
        """The answer; None if it has not come."""
        try:
            while part := self._client.recv(1 << 16):
                self._received += part
        except BlockingIOError:
            pass
        return json.loads(self._received) if self._received.endswith(b"\n") else None

    def close(self):
        """Disconnect, like a stopped client."""
        self._client.close()


def purge(folder, tenant, kind="trainer"):
    """Send a purge of a tenant's id, or of all data."""
    given = None if tenant is None else f"{tenant:016x}"
    return Command(folder, kind=kind, do="purge", tenant=given)
