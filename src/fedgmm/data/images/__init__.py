"""Images of clients: files, downloads, and their division among clients."""
