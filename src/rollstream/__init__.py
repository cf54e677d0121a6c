"""rollstream: prompts in, durable, training-ready LLM trajectories out."""

__version__ = "0.1.0"
