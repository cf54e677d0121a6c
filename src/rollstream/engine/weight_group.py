"""A group of a trainer's process and the workers of one server, in which the trainer broadcasts tensors.

torch alone makes it, and no default process group is touched: both ends may have one of their own. Rank 0 is the
trainer's. It listens at one address, for as long as the group lasts, and to whoever connects: its network must be a
trusted one, as for every `torch.distributed`.
"""

import socket
from datetime import timedelta
from threading import Thread
from typing import Any, Literal

Transport = Literal["gloo", "nccl"]

MEETING_S = 30.0
"""For members to find each other: sockets on a network. A server that cannot reach the trainer generates nothing
meanwhile."""

PREFIXES = ("rollstream",)


def address_facing(host: str, port: int) -> str:
    """The address of this machine by which it reaches a host, and the host reaches it. Nothing is sent."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def listen_at(address: str, size: int) -> tuple[Any, int]:
    """A store by which `size` members find each other, and its port."""
    from torch.distributed import TCPStore

    # Left to itself the store listens on all addresses.
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(128)
    port: int = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        size,
        is_master=True,
        timeout=timedelta(seconds=MEETING_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def connect_to(address: str, port: int) -> Any:
    """The store that listens there."""
    from torch.distributed import TCPStore

    return TCPStore(address, port, timeout=timedelta(seconds=MEETING_S), wait_for_workers=False)


class WeightGroup:
    """The members; made when all of them make it.

    Args:
        transport: `gloo`: from and into main memory; `nccl`: from and into CUDA devices.
        store: the trainer's, see `listen_at`.
        address: of this machine, by which the others reach it.
        rank: this member's, of `size`.
        timeout: seconds for one tensor.
        prefixes: of the group's keys in the store, the outermost first.
    """

    def __init__(
        self,
        transport: Transport,
        store: Any,
        address: str,
        *,
        rank: int,
        size: int,
        timeout: float,
        prefixes: tuple[str, ...] = PREFIXES,
    ) -> None:
        from torch import distributed

        for prefix in prefixes:
            store = distributed.PrefixStore(prefix, store)
        if transport == "gloo":
            kind = distributed.ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(hostname=address)]
        else:
            kind = distributed.ProcessGroupNCCL  # a torch without CUDA has none
            options = kind.Options()
        # gloo meets the others here, and nccl at the first tensor.
        options._timeout = timedelta(seconds=MEETING_S if transport == "gloo" else timeout)
        self._sending = distributed.BroadcastOptions()
        self._sending.timeout = timedelta(seconds=timeout)
        self._group: Any = kind(store, rank, size, options)

    def broadcast(self, tensor: Any) -> None:
        """Sends the trainer's tensor, or receives it into another member's. Raises `RuntimeError`."""
        self._group.broadcast([tensor], self._sending).wait()

    def close(self) -> None:
        """Ends the group, as soon as nothing is on its way any more. May be called twice."""
        held, self._group = [self._group], None
        if held[0] is not None:
            # The thread has the last reference: gloo waits for what is on its way when it is deleted.
            Thread(target=lambda: held.pop().abort(), daemon=True).start()
