"""What a stub server counts."""

from dataclasses import dataclass, field

_IMAGE_DIGESTS = 1024
"""How many are kept: a test with images has a few, a benchmark with images has no use for them."""


@dataclass(slots=True)
class Stats:
    """What a stub server has seen. Served at `/stub/stats`."""

    requests: int = 0
    """`/generate` requests that arrived."""
    answered: int = 0
    """Whole answers, broken ones included."""
    tokens: int = 0
    """Sampled, those of aborted requests included."""
    faults: int = 0
    aborts: int = 0
    """`/abort_request` calls that named a request in flight."""
    health_checks: int = 0
    in_flight: int = 0
    peak_in_flight: int = 0
    images: int = 0
    """Images that arrived with `/generate` requests."""
    image_digests: list[str] = field(default_factory=list)
    """SHA-256 of the newest of them, as files, in the order they came."""

    def saw_images(self, digests: list[str]) -> None:
        """Counts the images of a request."""
        self.images += len(digests)
        self.image_digests = [*self.image_digests, *digests][-_IMAGE_DIGESTS:]
