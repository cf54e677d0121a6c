"""One file a neighbour; each imports its neighbour only when it is used."""
