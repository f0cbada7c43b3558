"""The paper's experiments: one module per table or figure."""
