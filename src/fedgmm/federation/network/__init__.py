"""A federation over a network: one gRPC stream per site, TLS, and registered keys."""
