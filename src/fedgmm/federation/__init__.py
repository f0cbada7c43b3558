"""Where a method runs."""
