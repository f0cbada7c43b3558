"""The methods: one file a family."""
