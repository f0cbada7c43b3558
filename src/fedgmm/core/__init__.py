"""The paper's equations: pure functions on tensors."""
