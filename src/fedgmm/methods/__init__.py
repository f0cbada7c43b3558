"""The methods: one file per family, with its state, its two steps and its sums."""
