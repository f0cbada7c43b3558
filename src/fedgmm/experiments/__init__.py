"""Demonstrations, and studies that repeat the paper's experiments (one module each in ``paper``)."""
