"""A server with known timing: what the load generator is checked and measured against."""
