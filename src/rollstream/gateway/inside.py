"""Run inside a sandbox without a network: its port of 127.0.0.1 leads to the gateway's socket.

    program --(TCP 127.0.0.1:PORT)--> this --(unix socket, bound into the sandbox)--> rollstream

It runs the program and ends like it; what is left of the sandbox ends with it. When nobody listens at the
socket any more, rollstream is gone: then it ends, too, where no reaper can reach (in a container).

It is run as a file, `python3 -I -S inside.py SOCKET PORT COMMAND …`, with nothing but the standard library, for
a sandbox may have neither rollstream nor its Python. PORT 0: no way to the gateway is wanted.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time

_CONNECTIONS = 100
"""At once; others wait to be accepted."""

_LOOK_S = 5.0


def main(path: str, port: int, command: list[str]) -> None:
    """Runs the command to its end."""
    if port:
        listener = socket.create_server(("127.0.0.1", port), backlog=_CONNECTIONS)
        threading.Thread(target=_serve, args=(listener, path), daemon=True).start()
    threading.Thread(target=_end_without_owner, args=(path,), daemon=True).start()
    try:
        program = subprocess.Popen(command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)
    signal.signal(
        signal.SIGTERM, lambda *_: program.terminate()
    )  # the first process of a container ignores it
    code = program.wait()
    os._exit(code if code >= 0 else 128 - code)


def _serve(listener: socket.socket, path: str) -> None:
    slots = threading.BoundedSemaphore(_CONNECTIONS)
    while slots.acquire():
        client, _ = listener.accept()
        threading.Thread(target=_forward, args=(client, path, slots), daemon=True).start()


def _forward(client: socket.socket, path: str, slots: threading.BoundedSemaphore) -> None:
    with slots, contextlib.suppress(OSError), client, socket.socket(socket.AF_UNIX) as gateway:
        gateway.connect(path)
        back = threading.Thread(target=_copy, args=(gateway, client), daemon=True)
        back.start()
        _copy(client, gateway)
        back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for one, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
        with contextlib.suppress(OSError):
            one.shutdown(how)


def _end_without_owner(path: str) -> None:
    while True:
        time.sleep(_LOOK_S)
        try:
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            os._exit(1)
        except OSError:  # it has too much to do
            continue


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
