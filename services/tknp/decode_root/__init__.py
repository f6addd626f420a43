"""The DecodeRoot service: dense operations of a layer block, for the whole batch."""
