"""Server and sites of a federation, and the messages between them."""
