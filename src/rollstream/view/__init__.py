"""A web page of runs, groups, tokens and training: `rollstream view`."""
