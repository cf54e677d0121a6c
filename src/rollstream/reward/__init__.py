"""Rewards: what a rollout is worth, by a function of the user's or by a rule for its data source."""
