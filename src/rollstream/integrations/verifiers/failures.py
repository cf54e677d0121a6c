"""How an environment fails a rollout."""

from rollstream.errors import RollstreamError, TransientError


class EnvironmentFailedError(RollstreamError):
    """The environment ended a rollout with an error of its own; the message has its type and words."""


class TransientEnvironmentError(EnvironmentFailedError, TransientError):
    """The same, of something that may pass: a sandbox that died, a tunnel, a server of tools."""
