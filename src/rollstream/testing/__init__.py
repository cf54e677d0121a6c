"""What it takes to test an agent loop or a pool without a model: a scripted engine and a stub server."""
