"""The rollout buffer: a durable HTTP door between agent frameworks and trainers.

Agent frameworks write trajectories as they finish (`items`), a ledger keeps what it acknowledged, and
trainers read complete groups, filtered, normalised and padded (`groups`, `hooks`).
"""
