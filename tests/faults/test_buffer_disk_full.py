"""A full disk: writes are refused with 507, reads go on; writes are taken again when there is room."""

import resource
from pathlib import Path

import requests

from tests.integration.buffer_servers import serve_buffer

LARGEST_FILE = 300_000


def test_a_full_disk_refuses_writes_and_loses_nothing(tmp_path: Path) -> None:
    with serve_buffer(tmp_path / "buffer", "--group-size", "2") as server, requests.Session() as session:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (LARGEST_FILE, resource.RLIM_INFINITY))
        stored: list[str] = []
        refused: list[str] = []
        for number in range(40):
            items = [
                {
                    "uid": f"{number}-{n}",
                    "instance_id": number,
                    "messages": [{"role": "user", "content": "x" * 15_000}],
                    "reward": n,
                }
                for n in range(2)
            ]
            path = "/buffer/write" if number % 2 else "/v1/items"
            for body in items if number % 2 else [{"items": items}]:
                answer = session.post(server.url + path, json=body, timeout=30)
                uids = [one["uid"] for one in (body.get("items") or [body])]
                if answer.status_code == 200:
                    stored += uids
                else:
                    assert answer.status_code == 507, answer.text
                    assert "What was acknowledged is safe" in answer.json()["error"]["message"]
                    refused += uids
                    read = session.post(server.url + "/v1/read", json={"max_groups": 1}, timeout=30).json()
                    assert len(read["groups"]) == 1, "reads go on"
                    lease = read["head"]["lease"]
                    assert session.post(f"{server.url}/v1/leases/{lease}/nack", timeout=30).status_code == 200
        assert refused and stored
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        known = session.post(server.url + "/v1/uids/known", json={"uids": stored}, timeout=30).json()["known"]
        assert all(known)
        stats = session.get(server.url + "/v1/stats", timeout=30).json()
        assert stats["items"] >= len(stored)
        answer = session.post(
            server.url + "/buffer/write",
            json={"uid": "last", "instance_id": "z", "messages": [{"role": "user"}], "reward": 1},
            timeout=30,
        )
        assert answer.status_code == 200
