"""The demo model: how the small language model that ships with rollstream is made.

Not part of the package: run ``python -m demo_model.make`` from the repository's root.
"""
