"""Protection of sums: masks (secure aggregation), noise, and the account of what was released."""
