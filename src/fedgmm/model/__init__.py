"""The fitted model: predict, evaluate, adapt to new clients, detect novel rows, save, load, export."""
