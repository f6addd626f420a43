"""The OpenAI API: what clients send, and what they get back."""
