"""The AttentionOwner service: pages of its requests, and KV that prefill writes into them."""
