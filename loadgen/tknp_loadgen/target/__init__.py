"""How to talk to a server: one module an API, all behind `base.Target`."""
