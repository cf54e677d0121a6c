"""Agent loops: what happens within one rollout."""
