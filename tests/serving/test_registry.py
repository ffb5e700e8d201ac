"""What the registry of servers on a Ray cluster knows. It runs without Ray here."""

import pytest

from trl_darts.engines.server_list import ServerList
from trl_darts.serving.registry import LEASE_S, Registry
from trl_darts.serving.supervisor import ProcessState


A, B = "http://10.0.0.1:8000", "http://10.0.0.2:8001"
STARTING, HEALTHY, GONE = ProcessState.STARTING, ProcessState.HEALTHY, ProcessState.GONE


@pytest.fixture
def registry(clock) -> Registry:
    registry = Registry(clock)
    assert registry.reserve(2) == [0, 1]
    return registry


def urls(registry: Registry, owner: str = "me") -> tuple[str, ...]:
    return ServerList.of(registry.read(owner)).urls


def test_healthy_servers_are_listed(registry, clock):
    assert registry.read("me") == {"servers": [], "num_servers": 2}
    for state in (STARTING, HEALTHY):
        assert registry.report(0, 1.0, "a", state, A, [f"it is {state.value}"])
        clock.advance(3.0)
    assert urls(registry) == (A,)
    entries, messages, num_seen = registry.look([0, 1], 0)
    assert [(entry.node, entry.state, seconds) for entry, seconds in entries.values()] == [
        ("a", HEALTHY, 3.0),
        ("no node yet", ProcessState.WAITING, 6.0),
    ]
    assert messages == ["it is starting", "it is healthy"]
    assert registry.look([0, 1], num_seen)[1:] == ([], 2)
    registry.report(0, 1.0, "a", GONE, None, ["it died"], 7)
    assert urls(registry) == ()
    assert registry.look([0], 2)[0][0][0].exit_code == 7


def test_reports_of_a_frozen_node_are_rejected_once_another_has_taken_over(registry):
    assert registry.report(0, 1.0, "a", HEALTHY, A)
    assert registry.report(0, 2.0, "b", STARTING, B)
    assert not registry.report(0, 1.0, "a", HEALTHY, A)
    assert urls(registry) == ()
    assert registry.report(0, 2.0, "b", HEALTHY, B)
    assert urls(registry) == (B,)


def test_commands_that_share_a_registry(registry):
    assert registry.reserve(1) == [2]
    registry.report(0, 1.0, "a", HEALTHY, A, ["zero"])
    registry.report(2, 1.0, "b", HEALTHY, B, ["two"])
    assert urls(registry) == (A, B)
    assert registry.look([2], 0)[1] == ["two"]
    registry.forget([2])
    assert not registry.report(2, 1.0, "b", HEALTHY, B)
    assert urls(registry) == (A,)
    assert registry.reserve(1) == [3]


def test_a_restarted_registry_is_filled_by_reports(clock):
    registry = Registry(clock)
    assert registry.report(1, 5.0, "a", HEALTHY, A)
    assert urls(registry) == (A,)
    assert registry.look([0, 1], 9) == (registry.look([1], 0)[0], [], 0)
    assert registry.reserve(1) == [2]


def test_one_trainer_at_a_time(registry, clock):
    registry.read("me")
    assert registry.read("you") == {"taken": "me"}
    clock.advance(LEASE_S - 1)
    registry.read("me")
    clock.advance(LEASE_S - 1)
    assert registry.read("you") == {"taken": "me"}
    clock.advance(2)  # it has died
    assert "servers" in registry.read("you")
    registry.release("me")
    assert registry.read("me") == {"taken": "you"}
    registry.release("you")
    assert "servers" in registry.read("me")
