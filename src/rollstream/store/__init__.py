"""The store: rollouts become durable here. Journal + sealed batches are the truth, all else is derived."""
