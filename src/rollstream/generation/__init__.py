"""Door 1: a run that collects trajectories."""
