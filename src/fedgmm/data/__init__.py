"""Data of clients, as stacked rows: arrays, tables, images, synthetic and example data."""
