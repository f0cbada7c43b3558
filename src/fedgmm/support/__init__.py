"""Tools for the other rooms that know nothing of mixtures: blocks of rows, scratch files, checks."""
