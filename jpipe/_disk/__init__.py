"""States as files of Orbax, with a digest of each leaf."""
