"""Traces: what a run sends and when, fixed before anything is sent."""
