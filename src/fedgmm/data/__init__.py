"""What clients hold."""
