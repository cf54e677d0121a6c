from collections import Counter

from rollstream.engine.servers import LeastInFlight


def test_ties_go_round_and_the_least_loaded_wins() -> None:
    servers = LeastInFlight(["a", "b", "c"])
    assert [servers.pick() for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
    servers.release("b")
    assert servers.pick() == "b"
    assert Counter(servers.in_flight) == Counter(a=2, b=2, c=2)


def test_tried_servers_are_left_out() -> None:
    servers = LeastInFlight(["a", "b"])
    assert servers.pick({"a"}) == "b"
    assert servers.pick({"a", "b"}) is None
    assert LeastInFlight(["a"]).pick({"a"}) is None


def test_a_failed_server_waits_out_its_cool_down_unless_it_is_the_last() -> None:
    now = 0.0
    servers = LeastInFlight(["a", "b"], clock=lambda: now)
    assert servers.pick() == "a"
    servers.release("a", failed=True)
    assert [servers.pick() for _ in range(3)] == ["b", "b", "b"]
    assert servers.pick({"b"}) == "a"
    servers.release("a")
    now = 2.0
    assert servers.pick() == "a"
