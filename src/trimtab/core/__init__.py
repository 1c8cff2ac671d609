"""Records, registry, recipes and the shared pieces every method uses. Importing this package loads no torch."""
