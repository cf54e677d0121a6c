"""Pages of docs/ whose blocks run, by their first letter."""

from tests.docs.blocks import pages_test

test_blocks_run_as_they_stand = pages_test("h", "p")
