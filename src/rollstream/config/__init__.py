"""The configuration: defaults in `generation.yaml`, types in `settings`."""
