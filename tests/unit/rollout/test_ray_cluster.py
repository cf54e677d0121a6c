"""What is said of a cluster that cannot be joined."""

from rollstream.rollout.ray_cluster import _shown


def test_arguments_are_shown_without_their_secrets() -> None:
    shown = _shown(
        {
            "num_cpus": 2,
            "_redis_password": "TELLNOBODY",
            "runtime_env": {"env_vars": {"OPENAI_API_KEY": "TELLNOBODY", "A": "b"}},
        }
    )
    assert "TELLNOBODY" not in shown
    assert "num_cpus=2" in shown and "'A': 'b'" in shown
