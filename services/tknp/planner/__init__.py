"""Prices the programs that the engine executes. Pure: no torch, no sockets, no clock.

models, hardware -> cost      what one operation takes on one rank
layout -> capacity            what a strategy leaves for KV
programs, cost -> simulate    who does what when, as spans
spans (simulated or recorded) -> timeline -> html, png, chrome
"""
