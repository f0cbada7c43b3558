"""What a fitted model is for."""
