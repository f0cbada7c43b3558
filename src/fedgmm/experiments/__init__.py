"""One file a table, figure or demonstration."""
