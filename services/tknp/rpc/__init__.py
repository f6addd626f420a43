"""What every service's gRPC has in common: status codes, channels, servers, conversions."""
