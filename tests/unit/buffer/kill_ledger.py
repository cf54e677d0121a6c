"""A program for the test that kills it: writes, reads, acks for ever, and says what it was told."""

import asyncio
import sys
from pathlib import Path

from rollstream.buffer.ledger import Ledger
from tests.unit.buffer.ledger_worlds import item, settings


async def main(root: Path, turn: str) -> None:
    ledger = Ledger.open(root, settings(group_size=4, segment_bytes=8000))
    for lease in ledger.leases():
        await ack(ledger, lease.lease_id)

    async def write(writer: int) -> None:
        for at in range(100_000):
            uids = [f"{turn}-{writer}-{at}-{one}" for one in range(2)]
            assert (
                await ledger.write([item(uid, f"{writer}-{at // 2}", padding=60) for uid in uids])
                == [True] * 2
            )
            say("wrote", *uids)

    async def read() -> None:
        while True:
            lease = await ledger.decide(lease=ledger.candidates(limit=3), lease_seconds=60)
            if lease is None:
                await ledger.wait_for_candidates(1)
            else:
                await ack(ledger, lease.lease_id)

    await asyncio.gather(*(write(writer) for writer in range(8)), read(), read())


async def ack(ledger: Ledger, lease_id: str) -> None:
    lease = ledger.lease(lease_id)
    assert lease is not None
    uids = [payload[8:].split(b'"')[0].decode() for view in lease.groups for payload, _ in ledger.load(view)]
    say("acks", lease_id, *uids)
    await ledger.ack(lease_id)
    say("acked", lease_id)


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
