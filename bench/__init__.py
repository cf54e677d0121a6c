"""Benchmarks: `python -m bench.NAME [--quick] [--json FILE]`. Only figures of one run compare."""
