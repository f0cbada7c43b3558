"""Learners and how they train, on a CPU or an accelerator."""
