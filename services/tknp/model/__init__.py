"""The network as mathematics: shapes, weights, tokenizer. No parallelism, no services."""
