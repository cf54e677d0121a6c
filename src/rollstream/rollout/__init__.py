"""Running many rollouts: bounded window, retries, executors."""
