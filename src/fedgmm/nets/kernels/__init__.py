"""Fused operations and recorded steps for GPUs."""
